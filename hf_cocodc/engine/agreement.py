"""Checks that regions are in step, start from one state and end with one model."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CheckpointError, LinkError
from ..links.base import Link
from ..links.trailer import Ending, Trailer

logger = logging.getLogger(__name__)


class Standing(NamedTuple):
    """Where a region stands: an inner step, and a checksum of weights (-1 if regions need not agree on them)."""

    inner_step: int
    digest: int


def check_in_step(region: int, trailers: Sequence[Trailer], fragment: int, sent_at: int) -> None:
    """Check that the transfer that arrived is the same one in every region; warn of regions that sat it out.

    Raises:
        LinkError: it is not the same.
    """
    for other, trailer in enumerate(trailers):
        if (trailer.fragment, trailer.inner_step) != (fragment, sent_at):
            raise LinkError(
                f"regions are out of step: region {region} landed fragment {fragment} sent at step {sent_at}, region {other} "
                f"fragment {trailer.fragment} sent at step {trailer.inner_step}. Every region must make the same number of "
                "inner steps."
            )
        if not trailer.weight and trailer.ending is Ending.NO:
            logger.warning(
                "region %d sat out fragment %d sent at step %d: its outer gradient was not finite.",
                *(other, fragment, sent_at),
            )


def check_same_start(link: Link, own: Standing) -> None:
    """Check that all regions resume from the same step of the same run.

    Raises:
        CheckpointError: they do not.
    """
    standings = link.gather(own, "the checkpoint to resume from")
    first = standings[0]
    for region, other in enumerate(standings):
        if other.inner_step != first.inner_step:
            raise CheckpointError(
                f"region 0 resumes from step {first.inner_step}, region {region} from step {other.inner_step}. Give every "
                "region the checkpoint of the same step."
            )
        if other.digest != first.digest:
            raise CheckpointError(
                f"the checkpoints of region 0 and region {region} are both of step {first.inner_step}, but their global "
                "params differ: they are from different runs. Give every region its own checkpoint of one run."
            )


def check_same_end(link: Link, own: Standing) -> None:
    """Compare the final weights of all regions; warn if they differ."""
    for region, other in enumerate(link.gather(own, "the end of the run")):
        if other.digest != own.digest:
            logger.warning(
                "the final global weights of region %d and region %d differ. Do their processors round differently? Use one "
                "of the two models and lower digest_interval.",
                *(link.region, region),
            )
