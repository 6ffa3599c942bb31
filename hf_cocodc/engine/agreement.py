"""Checks that regions are in step, start from one state and end with one model."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import CheckpointError, HandshakeError, LinkError
from ..links.base import Arrival, Link
from ..links.spreading import spread_all
from ..links.trailer import Ending

logger = logging.getLogger(__name__)


class StepChecksum(NamedTuple):
    """Where a region stands: an inner step, and a checksum of weights (-1 if regions need not agree on them)."""

    inner_step: int
    digest: int


class Layout(NamedTuple):
    """The parameters that a region wants to synchronise, see `Watch.layout`."""

    number: int


def check_in_step(region: int, arrival: Arrival, fragment: int, sent_at: int) -> None:
    """Check that the transfer that arrived is the same one in every region; warn of regions that sat it out.

    Raises:
        LinkError: it is not the same.
    """
    for other, trailer in zip(arrival.members, arrival.trailers, strict=True):
        if (trailer.fragment, trailer.inner_step) != (fragment, sent_at):
            raise LinkError(
                f"regions are out of step: region {region} landed fragment {fragment} sent at step {sent_at}, region {other} "
                f"fragment {trailer.fragment} sent at step {trailer.inner_step}. Every region must make the same number of "
                "inner steps."
            )
        if not trailer.weight and trailer.ending is Ending.NO:
            logger.warning(
                "region %d sat out fragment %d sent at step %d: its outer gradient was not finite, or it had trained no step.",
                *(other, fragment, sent_at),
            )


def check_same_start(link: Link, own: StepChecksum) -> None:
    """Check that all regions resume from the same step of the same run.

    Raises:
        CheckpointError: they do not.
    """
    standings = link.gather(own, "the checkpoint to resume from")
    first, lowest = standings[0], link.parties[0]
    for region, other in zip(link.parties, standings, strict=True):
        if other.inner_step != first.inner_step:
            raise CheckpointError(
                f"region {lowest} resumes from step {first.inner_step}, region {region} from step {other.inner_step}. Give every "
                "region the checkpoint of the same step."
            )
        if other.digest != first.digest:
            raise CheckpointError(
                f"the checkpoints of region {lowest} and region {region} are both of step {first.inner_step}, but their global "
                "params differ: they are from different runs. Give every region its own checkpoint of one run."
            )


def common_layout(link: Link, own: int) -> int | None:
    """The layout that all regions want now; None if they want different ones. A collective call."""
    layouts = {other.number for other in link.gather(Layout(own), "trained parameters")}
    return layouts.pop() if len(layouts) == 1 else None


def agreed_layout(
    link: Link, heard: Sequence[Arrival], lines_of: Callable[[int], Sequence[str]]
) -> int | None:
    """The layout that all regions want, by the newest of the transfers that have just landed; None if there is none.

    A region that is about to end has no say: it trains no more, and changes no parameters.

    Args:
        link: reaches the other regions.
        heard: transfers that have landed.
        lines_of: what this region has called by the number of a layout: one line for each parameter.

    Raises:
        HandshakeError: regions want different ones.
    """
    said = [each for each in heard if all(trailer.ending is Ending.NO for trailer in each.trailers)]
    for each in said:
        if len({trailer.layout for trailer in each.trailers}) > 1:
            said_here = dict(zip(each.members, each.trailers, strict=True)).get(link.region)
            own = () if said_here is None else lines_of(said_here.layout)
            _refuse_layouts(link, each.trailers[0].inner_step, own)
    newest = max(said, key=lambda each: each.trailers[0].inner_step, default=None)
    return newest.trailers[0].layout if newest else None


def _refuse_layouts(link: Link, step: int, own: Sequence[str]) -> None:
    found = texts(link, "\n".join(own), "the names of trained parameters")
    told = {region: text.split("\n") for region, text in found.items()}
    lowest = min(told)
    for region, lines in told.items():
        if lines == told[lowest]:
            continue
        theirs, ours = sorted(set(lines) - set(told[lowest])), sorted(set(told[lowest]) - set(lines))
        raise HandshakeError(
            f"region {lowest} and region {region} do not train the same parameters at step {step}: "
            + " and ".join(
                f"only region {who} has {', '.join(found[:3])}"
                + (f" and {len(found) - 3} more" if found[3:] else "")
                for who, found in ((lowest, ours), (region, theirs))
                if found
            )
            + ". Unfreeze or add parameters in all regions at the same inner step: let the step decide, or a number that is "
            "equal in all regions, but not a region's own loss, epoch or random numbers."
        )


def texts(link: Link, own: str, what: str) -> dict[int, str]:
    """Every region's text, by region. A collective call."""
    told = link.together(lambda: spread_all(link, own.encode(), what), what)
    return {region: text.decode() for region, text in told.items()}
