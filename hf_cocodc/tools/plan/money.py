"""What a run costs in US dollars: the traffic that leaves the regions, and the hours of their GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

from ...errors import InputError, nearest

FILE = Path(__file__).with_name("prices.yaml")


class Prices(NamedTuple):
    """US dollars; None where no price is given.

    Attributes:
        usd_per_gb: of traffic that leaves a region, in the mean of the regions.
        usd_per_gpu_hour: of one GPU.
        gpus: of all regions together.
        source: where the price of traffic comes from, in words.
    """

    usd_per_gb: float | None = None
    usd_per_gpu_hour: float | None = None
    gpus: int = 0
    source: str = ""

    @property
    def are_given(self) -> bool:
        """Whether there is one."""
        return self.usd_per_gb is not None or self.usd_per_gpu_hour is not None


NONE = Prices()


class Cost(NamedTuple):
    """US dollars of a run; None where no price is given."""

    traffic: float | None
    gpus: float | None

    @property
    def total(self) -> float:
        return (self.traffic or 0.0) + (self.gpus or 0.0)


def cost(gigabytes: float, seconds: float, prices: Prices) -> Cost:
    """What it costs that so much leaves all regions, in so much time."""
    hour_price = prices.usd_per_gpu_hour
    return Cost(
        traffic=None if prices.usd_per_gb is None else gigabytes * prices.usd_per_gb,
        gpus=None if hour_price is None else seconds / 3600 * prices.gpus * hour_price,
    )


def list_price(names: Sequence[str], regions: int) -> tuple[float, str]:
    """The mean price of a GB that leaves regions in these clouds, one name for each region or one for all; and its source.

    Raises InputError if a cloud is not known, or if the number of names does not fit.
    """
    content: dict[str, Any] = YAML(typ="safe").load(FILE)
    known: dict[str, dict[str, Any]] = content["prices"]
    for name in names:
        if name not in known:
            raise InputError(
                f"--prices {name} is not known.{nearest(name, list(known))} For another cloud give --usd-per-gb."
            )
    if len(names) not in (1, regions):
        raise InputError(
            f"--prices names {len(names)} clouds for {regions} regions: name one for all regions, or one for each."
        )
    quoted = "; ".join(
        f"{name} {known[name]['usd_per_gb']:g} ({known[name]['what']})" for name in dict.fromkeys(names)
    )
    price = sum(float(known[name]["usd_per_gb"]) for name in names) / len(names)
    return price, f"list prices of {content['checked']}, in dollars a GB: {quoted}. Look at the clouds' pages"
