"""What a region does when an error ends its training."""

import logging

from transformers import Trainer

from ..errors import LinkError, RunLeft, RunStopped
from ..links.base import Link
from ..run.endings import farewell
from ..run.outer_optimizer import OuterOptimizer

logger = logging.getLogger(__name__)


def leave(trainer: Trainer, link: Link | None, outer: OuterOptimizer | None, error: BaseException) -> None:
    """Leave in good order if possible, so that the other regions can stop with a checkpoint; or so that they go on.

    Args:
        trainer: of this region.
        link: reaches the other regions; None before they have met.
        outer: the outer optimizer; None before there is one.
        error: ends this region.
    """
    reason = f"{type(error).__name__} at step {outer.inner_step if outer else 0}: {error}"
    if outer is None:
        if link is not None:
            link.close(reason)
        return
    region = outer.link.region
    if not outer.link.is_elastic and keeps_in_step(trainer, error) and not outer.should_stop:
        logger.warning(
            "region %d failed (%s). It keeps in step with the others until they have heard of it; interrupt it to leave "
            "at once.",
            *(region, reason),
        )
        try:
            outer.leave(reason)
        except Exception as second:  # after a CUDA error nothing works on that device
            logger.warning("region %d cannot keep in step (%s): it leaves at once.", region, second)
    outer.close(reason)
    outer.journal.write_error(outer.inner_step, error)


def keeps_in_step(trainer: Trainer, error: BaseException) -> bool:
    """Whether a region can keep in step with the others until they have heard of an error."""
    is_orderly = isinstance(error, Exception) and not isinstance(error, LinkError)
    return is_orderly and trainer.accelerator.num_processes == 1


def say_farewell(outer: OuterOptimizer) -> None:
    """At the end of a training.

    Raises:
        RunStopped: all regions have stopped together, with a checkpoint, or this one has left (RunLeft).
        InputError: the journal could not be written.
    """
    if not outer.finished:
        step, why = outer.inner_step, outer.why
        stopped = RunStopped(farewell(step, why, outer.endings.word.saved_at, outer.endings.saved_everywhere))
        if outer.verdict == "leave":
            stopped = RunLeft(
                f"region {outer.link.region} has left the run at step {step}: {why}. The others train on. To come back, start it "
                "again with the same command."
            )
        outer.journal.write_error(step, stopped)
        raise stopped
    outer.journal.check()
