"""What a region does when an error ends its training."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer

from ..errors import LinkError, RunFinished, RunLeft, RunStopped, spare_traceback
from ..link.base import Link
from ..run.endings import farewell
from ..run.outer_optimizer import OuterOptimizer

logger = logging.getLogger(__name__)

TOGETHER_S = 5.0
"""SIGTERMs within so many seconds are one request: Slurm sends one to every process of a job, and launchers pass theirs on."""


def answer(name: str, region: int, leaves_alone: bool) -> str:
    """What a region says when a signal interrupts it; `leaves_alone`: the others are to train on."""
    does = (
        "sends what it has trained, and leaves; the others train on"
        if leaves_alone
        else "trains on until the others have heard of it; then all stop with a checkpoint"
    )
    return f"{name}: region {region} {does}. A second Ctrl-C, or a SIGTERM after {TOGETHER_S:g} s, ends this process at once.\n"


@contextlib.contextmanager
def first_signal(note: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, call note(name) at the first SIGINT or SIGTERM. A second signal has its usual effect.

    SIGTERMs that come together are one signal (`TOGETHER_S`). An existing SIGTERM handler (Trainer's just-in-time checkpoint)
    is called too. Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted_at = 0.0
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, previous in before.items():
            if signal.getsignal(number) in (handle, ignore_at_first):
                signal.signal(number, previous)

    def ignore_at_first(number: int, frame: Any) -> None:
        if time.monotonic() - noted_at >= TOGETHER_S:
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)

    def handle(number: int, frame: Any) -> None:
        nonlocal noted_at
        restore()
        noted_at = time.monotonic()
        signal.signal(signal.SIGTERM, ignore_at_first)
        note(signal.Signals(number).name)
        previous = before[signal.Signals(number)]
        if number == signal.SIGTERM and callable(previous):
            previous(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


def leave(trainer: Trainer, link: Link | None, outer: OuterOptimizer | None, error: BaseException) -> None:
    """Leave in good order if possible, so that the other regions can stop with a checkpoint, or go on."""
    if isinstance(error, RunFinished):
        spare_traceback()
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
    outer.training.journal.write_error(outer.inner_step, error)


def keeps_in_step(trainer: Trainer, error: BaseException) -> bool:
    """Whether a region can keep in step with the others until they have learned of an error."""
    is_orderly = isinstance(error, Exception) and not isinstance(error, LinkError)
    return is_orderly and trainer.accelerator.num_processes == 1


def say_farewell(outer: OuterOptimizer) -> None:
    """Raise RunStopped, RunLeft, or RegionLostError, if the run has not finished; else InputError if the journal could not be
    written.
    """
    if not outer.finished:
        outer.raise_loss()
        step, why = outer.inner_step, outer.why
        endings = outer.training.endings
        is_whole = not outer.link.is_elastic and len(endings.savers) == outer.link.most_regions
        savers = None if is_whole else endings.savers
        stopped = RunStopped(farewell(step, why, endings.word.saved_at, endings.saved_everywhere, savers))
        if outer.verdict == "leave":
            stopped = RunLeft(
                f"region {outer.link.region} has left the run at step {step}: {why}. The others train on. To come back, start it "
                "again with the same command."
            )
        outer.training.journal.write_error(step, stopped)
        raise stopped
    outer.training.journal.check()
