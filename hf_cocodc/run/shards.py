"""Give each region its own part of a dataset.

Importing this module imports neither torch nor datasets. Each function imports the libraries that it uses.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from typing import Any

from ..coordinator.hello import ORDER
from ..errors import InputError, spare_traceback
from ..settings import RegionConfig
from ..settings.environment import (
    ENV_COORDINATOR,
    ENV_REGION,
    ENV_REGIONS,
    check_alone,
    check_split,
    from_env,
    warn_alone,
)
from ..settings.fields import converted


def region_shard(
    dataset: Any, region: int | RegionConfig | None = None, num_regions: int | None = None
) -> Any:
    """Return the part of `dataset` that belongs to one region. Every sample is in exactly one part, in a fixed order.

    All regions must pass the same samples in the same order, which they compare when a run begins (`data.order`). To shuffle, use
    the same seed in all regions before this call, or shuffle the shard after it. A stream that splits itself over DataLoader
    workers needs the same number of workers in all regions.

    If regions may join the run (regions.max), the dataset has `max` parts, so that each region that ever takes part has one of
    its own: the part belongs to the number of the region, and a region that comes back goes on with it. Nobody reads the part
    of a region that is not there.

    Args:
        dataset: datasets.Dataset (strided), datasets.IterableDataset (whole files if the number of files is a multiple of
            num_regions or at least 16 times as large, else, and after `skip` or `take`, strided, in an order that epochs do not
            change), torch map-style dataset (strided Subset), or torch iterable dataset (strided, no length; what it draws from
            global generators depends on the epoch alone). Strided: every num_regions-th sample.
        region: 0 .. num_regions - 1; or the RegionConfig of this region, which also has the number of regions. Default:
            environment HF_COCODC_REGION.
        num_regions: number of parts: of regions, or, if regions may join, of all that may take part at once; default:
            environment HF_COCODC_REGIONS. With neither variable set, region 0 of 1, with a warning. Of one region no number
            is needed.

    Raises:
        InputError: the region does not exist, there are fewer samples than regions, `dataset` is not a dataset, or a stream is
            shuffled without a seed, or is to be dealt.

    Examples:
        >>> dataset = ["a", "b", "c", "d", "e"]  # a torch map-style dataset: it has a length and an index
        >>> [list(region_shard(dataset, region, num_regions=2)) for region in (0, 1)]
        [['a', 'c', 'e'], ['b', 'd']]
    """
    is_dealt = isinstance(region, RegionConfig) and region.shards == "dealt"
    region, num_regions = _place(region, num_regions)
    if num_regions == 1:
        return dataset
    import datasets
    from torch.utils.data import IterableDataset, Subset

    from .samples import digest, order_of
    from .streams import RegionStride, generators_of, part_of

    # a datasets.IterableDataset may also be a torch IterableDataset
    if isinstance(dataset, (datasets.IterableDataset, IterableDataset)):
        if is_dealt:
            raise InputError(
                "regions.shards=dealt deals samples by their numbers, and a stream has none. Use a map-style dataset, or remove "
                "regions.shards."
            )
        _note(f"a stream {digest(generators_of(dataset))}")
        divide = part_of if isinstance(dataset, datasets.IterableDataset) else RegionStride
        return divide(dataset, region, num_regions)
    if isinstance(dataset, Mapping | str | bytes) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise InputError(f"{type(dataset).__name__} is not a dataset. Pass one split, map-style or iterable.")
    if len(dataset) < num_regions:
        counts = f"{len(dataset)} samples for {num_regions} regions"
        raise InputError(f"{counts}: each region needs at least one. Use more data or fewer regions.")
    _note(order_of(dataset))
    if is_dealt:
        return dataset
    if isinstance(dataset, datasets.Dataset):
        return dataset.shard(num_regions, region, contiguous=False)
    return Subset(dataset, range(region, len(dataset), num_regions))


_divided = threading.local()
"""What this thread has divided since a run began: simulated regions are threads."""


def _note(order: str) -> None:
    if getattr(_divided, "is_known", True):
        _divided.orders, _divided.is_known = set(), False
    _divided.orders.add(order)


def note_order(dataset: Any) -> None:
    """For the run that begins: every region has all of this map-style dataset, in the same order."""
    from .samples import order_of

    _note(order_of(dataset))


def facts_of_shards() -> dict[str, Any]:
    """For the run that begins: what this region's calls of `region_shard` have divided, which must be equal in all regions."""
    _divided.is_known = True
    orders = sorted(getattr(_divided, "orders", ()))
    return {ORDER: orders} if orders else {}


def num_shards(count: int, most: int | None) -> int:
    """Parts of the data of a run that begins with `count` regions, and that at most `most` (regions.max) take part in.

    >>> num_shards(2, None), num_shards(2, 4)
    (2, 4)
    """
    return max(count, most or 0)


def _place(region: int | RegionConfig | None, num_regions: int | None) -> tuple[int, int]:
    """Take missing arguments from the environment, and check both."""
    if isinstance(region, RegionConfig) or (region is None and num_regions is None):
        if num_regions is not None:
            raise InputError(
                f"num_regions={num_regions} beside a RegionConfig: it has the number of regions. Remove num_regions."
            )
        try:
            return _told(region or RegionConfig())
        except InputError as error:
            spare_traceback(error)  # no line of a script is to blame
            raise
    place: int | None = converted(region, int | None, "region_shard: region")
    count: int | None = converted(num_regions, int | None, "region_shard: num_regions")
    if place is None:
        place = from_env(None, os.environ, ENV_REGION, "region")
    if count is None:
        count = from_env(None, os.environ, ENV_REGIONS, "num_regions")
    if place is None and count == 1:
        place = 0
    if place is not None and count is not None and 0 <= place < count:
        return place, count
    raise InputError(
        f"region={place} of num_regions={count} does not exist: regions are 0 .. num_regions - 1. Correct "
        f"both (the arguments of region_shard, or {ENV_REGION} and {ENV_REGIONS}), or set neither. If regions may join, pass the "
        "RegionConfig, which has regions.max: region_shard(dataset, regions)."
    )


def _told(config: RegionConfig) -> tuple[int, int]:
    """This region, and the number of parts, as its settings and the environment say."""
    env = os.environ
    region = from_env(config.region, env, ENV_REGION, "regions.region")
    count = from_env(config.count, env, ENV_REGIONS, "regions.count")
    if count is None:
        check_split(env)
        check_alone(region, config.coordinator or env.get(ENV_COORDINATOR))
        warn_alone()
        return 0, 1
    # each region that may ever join has a part, whether this process joins now or not
    joins = config.joins(env) or (region is not None and config.max is not None)
    config = dataclasses.replace(config, region=region, count=count, join=joins).numbered()
    assert config.region is not None
    return config.region, num_shards(count, config.max)
