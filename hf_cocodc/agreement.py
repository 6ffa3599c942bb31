"""What regions settle among themselves beside outer gradients: where to go on from, when to end, and that they are equal."""

import logging
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

from .errors import CheckpointError, HandshakeError, LinkError
from .links.base import Link, Trailer

logger = logging.getLogger(__name__)


class Ending(IntEnum):
    """A region's word on its own end; rides on every transfer."""

    NO = 0
    """It trains on."""
    DONE = 1
    """It has come to the end of its training: early stopping, or its data ran out."""
    INTERRUPTED = 2
    """It has to leave, by a signal or an error."""


def verdict(endings: Sequence[int], policy: str) -> str | None:
    """What all regions do now: "finish", "stop" (with a checkpoint, to be resumed), or None, to go on.

    Args:
        endings: every region's word, as it rode on one transfer.
        policy: `regions.when_one_ends`.
    """
    if Ending.INTERRUPTED in endings:
        return "finish" if policy == "finish" else "stop"
    if Ending.DONE not in endings or (policy == "continue" and Ending.NO in endings):
        return None
    return "stop" if policy == "stop" else "finish"


def newest_common(link: Link, own: Sequence[int], run: int, num_writers: int) -> tuple[int, list[int], int]:
    """The step to resume from, the regions that hold a complete checkpoint of it, and its run; step 0 where there is none.

    The newest step that is complete in every region that has any; where no step is, the newest of all: who lacks it
    takes it from another region. Regions go on with the run that most of them have checkpoints of; those of another run
    (a folder that was used before) count as having none, and so do those of a region that had left when the newest were
    written. A collective call.

    Args:
        link: reaches the other regions.
        own: steps of this region's complete checkpoints.
        run: number of the run that wrote them.
        num_writers: regions that took part when the newest of them was written.
    """
    trailers = link.gather(
        Trailer(inner_step=max(own, default=0), digest=run), "the newest complete checkpoint"
    )
    runs = Counter(trailer.digest for trailer in trailers if trailer.inner_step)
    if not runs:
        return 0, [], 0
    [(chosen, _)] = runs.most_common(1)  # of equally many that of the first region
    if own and run != chosen:
        logger.warning("region %d holds checkpoints of another run: they are not used.", link.region)
    own = own if run == chosen else ()
    steps = [int(trailer.inner_step) if trailer.digest == chosen else 0 for trailer in trailers]
    newest = max(steps)
    writers = link.gather(Trailer(inner_step=num_writers), "who wrote the newest complete checkpoint")
    count = int(writers[steps.index(newest)].inner_step)
    # one that joined after them has taken them over
    first = [step if region < count or step == newest else 0 for region, step in enumerate(steps)]
    if own and not first[link.region]:
        logger.warning(
            "region %d was not there when the checkpoints of step %d were written: its own are not used.",
            *(link.region, newest),
        )
        own = ()
    steps = first
    while len(set(steps) - {0}) > 1:
        bound = min(step for step in steps if step)
        proposal = max((step for step in own if step <= bound), default=0)
        trailers = link.gather(Trailer(inner_step=proposal), "the newest complete checkpoint")
        steps = [int(trailer.inner_step) for trailer in trailers]
        if steps.count(0) > first.count(0):  # one that had some has none so old
            steps = [step if step == max(first) else 0 for step in first]
    return max(steps), [region for region, step in enumerate(steps) if step], int(chosen)


def agree_on_start(link: Link, max_steps: int, run: int) -> tuple[int, int]:
    """The smallest `max_steps` of all regions, and region 0's number for the run. A collective call.

    Shards of unequal length give epochs of unequal length.
    """
    trailers = link.gather(Trailer(inner_step=max_steps, digest=run), "the number of inner steps")
    return int(min(trailer.inner_step for trailer in trailers)), int(trailers[0].digest)


def check_same_interval(link: Link, interval: int, verb: str, setting: str) -> None:
    """What all regions have to do at the same inner steps comes equally often in each; 0: not in this region.

    Raises:
        HandshakeError: it does not.
    """
    trailers = link.gather(Trailer(inner_step=interval), f"how often a region {verb}")
    found = {region: int(trailer.inner_step) for region, trailer in enumerate(trailers) if trailer.inner_step}
    for region, steps in found.items():
        first = min(found)
        if steps != found[first]:
            raise HandshakeError(
                f"region {first} {verb} every {found[first]} inner steps, region {region} every {steps}, but they have to do it "
                f"together. Where that is the length of an epoch their shards differ: set {setting}_strategy=steps and "
                f"{setting}_steps={min(found.values())} in every region."
            )


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
