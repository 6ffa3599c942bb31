"""Which of a machine's GPUs each region there gets."""

import os
from collections.abc import Sequence
from typing import TypeVar

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that says which GPUs a process may use; "" hides all."""

T = TypeVar("T")


def visible() -> list[str]:
    """The GPUs that this process may use, by their names in `VISIBLE`. Does not start CUDA."""
    import torch

    count, given = torch.cuda.device_count(), os.environ.get(VISIBLE)
    # names behind the first that is none do not count: CUDA ignores them, too
    return [str(index) for index in range(count)] if given is None else given.split(",")[:count]


def shares(gpus: Sequence[T], regions: int, ranks: int | None = None) -> list[list[T]]:
    """The GPUs of each region of a machine: one for each of its `ranks`, by default as many as each can have. Where there are
    too few, they go round: regions share them.

    >>> shares("01234", 2), shares("01", 3)
    ([['0', '1'], ['2', '3']], [['0'], ['1'], ['0']])
    """
    each = ranks or max(1, len(gpus) // regions)
    return [[gpus[(place * each + rank) % len(gpus)] for rank in range(each)] for place in range(regions)]


def sharing(gpus: int, regions: int, ranks: int = 1) -> str | None:
    """What it means that the regions of a machine share its GPUs, in a sentence; None if they do not."""
    if not 0 < gpus < regions * ranks:
        return None
    most = -(-regions * ranks // gpus)
    who = "regions" if ranks == 1 else f"regions of {ranks} processes"
    return (
        f"{regions} {who} share {gpus} GPU(s): an inner step takes up to {most} times as long as with enough GPUs, and up to "
        f"{most} models lie on one GPU."
    )
