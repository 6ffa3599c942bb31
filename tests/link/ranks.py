"""Ranks of a region as threads of one process, over real gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from hf_cocodc.link.group import RegionGroup

T = TypeVar("T")


class ThreadGroup(RegionGroup):
    """The group as one thread has it."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._group = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(minutes=1))
        self.heard: Any = None


def on_ranks(num_ranks: int, live: Callable[[ThreadGroup], T]) -> list[Future[T]]:
    """What each rank came to."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return [pool.submit(lambda group: live(group()), make) for make in groups(num_ranks)]


def groups(num_ranks: int) -> list[Callable[[], ThreadGroup]]:
    """For each rank, what its thread calls to have its group: it waits for the others."""
    store = dist.HashStore()
    return [functools.partial(ThreadGroup, store, rank, num_ranks) for rank in range(num_ranks)]
