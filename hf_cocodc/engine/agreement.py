"""Checks that regions are in step, start from the same state and end with the same weights."""

import logging
from collections.abc import Sequence

from ..errors import CheckpointError, LinkError
from ..links.base import Link
from ..links.trailer import Ending, Trailer

logger = logging.getLogger(__name__)


def check_in_step(region: int, trailers: Sequence[Trailer], fragment: int, sent_at: int) -> None:
    """What has arrived must be the same transfer in every region; who sat it out is named.

    Raises:
        LinkError: it is not.
    """
    for other, trailer in enumerate(trailers):
        if (trailer.fragment, trailer.inner_step) != (fragment, sent_at):
            raise LinkError(
                f"regions are out of step: region {region} landed fragment {fragment} sent at step {sent_at}, region {other} "
                f"fragment {trailer.fragment:.0f} sent at step {trailer.inner_step:.0f}. Every region has to make the same "
                "number of inner steps."
            )
        if not trailer.weight and trailer.ending == Ending.NO:
            logger.warning(
                "region %d sat out fragment %d sent at step %d: its outer gradient was not finite.",
                *(other, fragment, sent_at),
            )


def check_same_start(link: Link, inner_step: int, digest: int) -> None:
    """All regions must resume from the same step of the same run.

    Raises:
        CheckpointError: they do not.
    """
    trailers = link.gather(Trailer(inner_step=inner_step, digest=digest), "the checkpoint to resume from")
    first = trailers[0]
    for region, trailer in enumerate(trailers):
        if trailer.inner_step != first.inner_step:
            raise CheckpointError(
                f"region 0 resumes from step {first.inner_step:.0f}, region {region} from step {trailer.inner_step:.0f}. Give "
                "every region the checkpoint of the same step."
            )
        if trailer.digest != first.digest:
            raise CheckpointError(
                f"the checkpoints of region 0 and region {region} are both of step {first.inner_step:.0f}, but hold different "
                "global params: they are of different runs. Give every region its own of one run."
            )


def check_same_end(link: Link, inner_step: int, digest: int) -> None:
    """Compare the weights that training leaves behind; a difference is said, never passed over."""
    trailers = link.gather(Trailer(inner_step=inner_step, digest=digest), "the end of the run")
    for region, trailer in enumerate(trailers):
        if trailer.digest != digest:
            logger.warning(
                "the final global weights of region %d and region %d differ. Do their processors round differently? Use one "
                "of the two models and lower digest_interval.",
                *(link.region, region),
            )
