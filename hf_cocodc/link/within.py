"""What the ranks of a region tell each other, as JSON or text in tensors. Nothing is pickled."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import Accelerator, PartialState

from .base import Link
from .group import RegionGroup

Value = TypeVar("Value")

_group: tuple[Any, RegionGroup] | None = None
"""The group of this region's ranks, beside the default process group for which it was made."""


def ranks_of_region() -> RegionGroup:
    """The group in which this region's ranks wait for each other without a time-out. The first call is a collective one."""
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, RegionGroup()
    return _group[1]


def wait_for_ranks(accelerator: Accelerator | PartialState, what: str) -> None:
    """Wait until all ranks of the region have come here, however long one of them writes or reads: `wait_for_everyone` ends a
    run after NCCL's 10 minutes. A collective call. Raises LinkError if a rank has died.
    """
    if accelerator.num_processes > 1:
        ranks_of_region().begin_largest((0,), what).wait()


def from_main(accelerator: Accelerator, value: Any) -> Any:
    """The main process's `value`, which JSON can express, in all ranks of the region. A collective call."""
    if accelerator.num_processes == 1:
        return value
    return ranks_of_region().say(0, value, "what the main process knows")


def main_says(
    link: Link,
    accelerator: Accelerator,
    find: Callable[[], Value],
    what: str,
    read: Callable[[Any], Value] = lambda plain: plain,
) -> Value:
    """What `find` returns in the region's main process, in all of its ranks. A collective call of the region's ranks.

    `find` may take longer than a collective call may: the other ranks wait for it without a time-out. `read` makes the value
    again from what JSON makes of it. Raises what `find` has raised, in the main process; in the other ranks an error of the
    same kind, or LinkError.
    """
    outcome: Future[Value] = Future()

    def attempt(_: Link) -> None:
        if accelerator.is_main_process:  # every pipeline stage leads itself
            try:
                outcome.set_result(find())
            except Exception as error:
                outcome.set_exception(error)

    link.lead(attempt, what)
    if accelerator.num_processes > 1:
        group = ranks_of_region()
        group.lead(outcome.result, what, lambda value: json.loads(json.dumps(value, default=_plain)))
        if not accelerator.is_main_process:
            return read(group.heard)
    return outcome.result()


def _plain(value: Any) -> Any:
    """What JSON cannot express by itself, as what it can."""
    return str(value) if isinstance(value, Path) else asdict(value)
