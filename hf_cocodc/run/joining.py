"""A region that joins a run, or comes back to it, begins from another region's base."""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from ..links.base import Link
from ..links.rules import Standing
from . import checkpoint as disk
from . import local_weights
from .base import Received, received_in
from .checkpoint import Saved
from .donor import Inner
from .session import session_of
from .shelf import main_says

logger = logging.getLogger(__name__)


def joins(link: Link, accelerator: Accelerator) -> bool:
    """Whether this region is a newcomer, which has no base yet. All ranks of the region call this together."""
    if not link.is_elastic:
        return False

    def is_joining() -> bool:
        session = session_of(link)
        assert session is not None
        return session.link.standing is Standing.JOINING

    return main_says(link, accelerator, is_joining, "whether this region joins")


def get_base(link: Link, accelerator: Accelerator, folder: Path) -> Received:
    """Get a base from a member of the run, into `folder`. All ranks of the region call this together.

    Raises:
        LinkError: no member gives one.
        CheckpointError: what comes is no base, or the disk refuses.
    """

    def get() -> Received:
        session = session_of(link)
        assert session is not None
        return session.get_base(folder)

    return main_says(link, accelerator, get, "a base from another region", received_in)


def place_for_bases(link: Link, accelerator: Accelerator, journal: str | Path | None) -> Path:
    """A folder for bases that all ranks of the region reach: beside the journal, if there is one."""
    if journal is not None or not link.is_elastic:
        return Path(journal or ".").absolute().parent
    return Path(
        main_says(link, accelerator, lambda: tempfile.mkdtemp(prefix="hf_cocodc-"), "a folder for bases")
    )


def inner_of(accelerator: Accelerator) -> Inner:
    """What a plain loop shows of the rest of its training: what Accelerate has prepared."""
    states = {}
    for name, parts in _prepared(accelerator).items():
        for index, part in enumerate(parts):
            states[_file(name, index)] = part.state_dict()
    return Inner(states)


def load_inner(accelerator: Accelerator, base: Path) -> None:
    """Let a plain loop continue from what the base has of it.

    Objects that were registered for checkpointing are not in it: they travel only as pickles.
    """
    for name, parts in _prepared(accelerator).items():
        for index, part in enumerate(parts):
            path = base / _file(name, index)
            if path.is_file():
                part.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            else:
                logger.warning(
                    "the base of the other region has no %s: this region begins with a fresh one.", path.name
                )
    if accelerator._custom_objects:
        logger.warning(
            "objects that were registered for checkpointing do not come from another region: they begin as they are."
        )


def read_base(link: Link, accelerator: Accelerator, model: nn.Module, folder: Path) -> tuple[Saved, int]:
    """Get a base from a member of the run, and let a plain loop continue from it.

    Returns the engine's state, and the number of the run.

    Raises:
        LinkError, CheckpointError: see `get_base`.
    """
    received = get_base(link, accelerator, folder)
    base = received.folder
    saved = disk.read(base, link.lane)
    load_inner(accelerator, base)
    # global params come with the engine: this is what is not trained, such as buffers
    local_weights.restore(model, base / local_weights.weights_file(link.lane), ())
    return saved, received.run


def advance(accelerator: Accelerator, before: int, after: int, is_new: bool) -> None:
    """Step the learning rate schedules of a plain loop as often as the other regions have.

    Only schedules that are stepped once for each inner step: by their own count, they are at `before`, or one step behind if the
    loop steps them after `outer.step()`.

    Args:
        accelerator: has prepared them.
        before: inner step at which they are.
        after: inner step to which this region has jumped.
        is_new: whether the loop has yet to begin; else it is inside `outer.step()`.
    """
    for schedule in accelerator._schedulers:
        plain, often = _plain(schedule, accelerator)
        count = int(getattr(plain, "last_epoch", -1))
        if count not in (often * before, often * (before - 1)):
            logger.warning(
                "%s is at %d after %d inner steps: it is not stepped once for each, and stays as it is.",
                *(type(plain).__name__, count, before),
            )
            continue
        for _ in range(often * after - count if is_new else often * (after - before)):
            plain.step()


def _plain(schedule: Any, accelerator: Accelerator) -> tuple[Any, int]:
    """A schedule without Accelerate's wrapper, and how often that steps it each time."""
    if not isinstance(schedule, AcceleratedScheduler):
        return schedule, 1
    once = schedule.split_batches or not schedule.step_with_optimizer
    return schedule.scheduler, 1 if once else accelerator.num_processes


def _prepared(accelerator: Accelerator) -> dict[str, Sequence[Any]]:
    scaler = accelerator.scaler
    return {
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "scaler": [] if scaler is None else [scaler],
    }


def _file(name: str, index: int) -> str:
    return f"{name}_{index}.pt" if index else f"{name}.pt"
