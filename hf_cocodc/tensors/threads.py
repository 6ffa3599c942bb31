"""How many threads may work on flat tensors of the host, and how work is divided among them."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from .pieces import in_this_thread

T = TypeVar("T")

REGIONS_HERE = "HF_COCODC_REGIONS_HERE"
"""Environment variable: how many regions share this machine, where one command has started them."""
_MOST = 16
"""More threads than this rarely move more bytes: the memory of one processor is then the limit."""
_WORTH_A_THREAD = 4
"""Number of pieces for which a thread is worth its start."""


def divide(work: Callable[[range], T], count: int, threads: int) -> list[T]:
    """Results of `work` for consecutive parts of range(count), each part in its own thread, in order.

    Inside, torch does not use threads of its own (see `in_this_thread`). The parts do not change what is computed.

    Args:
        work: handles the pieces with these numbers.
        count: number of pieces.
        threads: threads to use at most, the calling one included.
    """
    num_parts = max(min(threads, count // _WORTH_A_THREAD), 1)
    parts = [range(count * i // num_parts, count * (i + 1) // num_parts) for i in range(num_parts)]
    with in_this_thread():
        if num_parts == 1:
            return [work(parts[0])]
        # new threads each time: a pool that is kept would not survive a fork
        with ThreadPoolExecutor(num_parts - 1, initializer=torch.set_num_threads, initargs=(1,)) as others:
            pending = [others.submit(work, part) for part in parts[1:]]
            return [work(parts[0]), *(each.result() for each in pending)]


class HostThreads:
    """The number of threads for work on the host; training keeps the cores that it needs.

    Where the model trains on the host, work in the training thread may use the threads that training would use now. Work in
    the link's thread uses one thread while training goes on, and training's threads while training waits for it. Where the
    model trains on an accelerator, both use half of this rank's share of the cores; data loading keeps the other half.

    Args:
        trains_on_host: whether the model's parameters are in the host's memory.
    """

    def __init__(self, trains_on_host: bool) -> None:
        self._on_host = trains_on_host
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * int(os.environ.get(REGIONS_HERE, "1"))
        share = cores() // ranks // 2
        # asked here, in the training thread: in torch every thread has a number of its own
        self._most = min(torch.get_num_threads() if trains_on_host else max(share, 1), _MOST)

    def in_training(self) -> int:
        """For work in the training thread."""
        return self._most

    def in_background(self, awaited: bool) -> int:
        """For work in the link's thread; `awaited`: the training thread waits for its result."""
        return 1 if self._on_host and not awaited else self._most


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
