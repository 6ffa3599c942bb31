"""How work on a flat tensor is cut: into pieces that fit into a cache, and over threads."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, linalg

PIECE = 1 << 18
"""Values in a piece. A send or a landing finishes one piece before the next, while the piece is in the cache."""
UNSHARED = (1 << 15) - (1 << 10)
"""Number of values up to which torch never splits an operation over its threads."""

T = TypeVar("T")
REGIONS_HERE = "HF_COCODC_REGIONS_HERE"
"""Environment variable: how many regions share this machine, where one command has started them."""
_MOST = 16
"""More threads than this rarely move more bytes: the memory of one processor is then the limit."""
_WORTH_A_THREAD = 4
"""Number of pieces for which a thread is worth its start."""


class Cut(NamedTuple):
    """A stretch of a flat vector: the positions of the parameters that have values in it, and how many values each has."""

    params: tuple[int, ...]
    sizes: tuple[int, ...]

    def views(self, piece: Tensor) -> Sequence[Tensor]:
        """One view of `piece` for each parameter."""
        return piece.split_with_sizes(self.sizes) if len(self.sizes) > 1 else (piece,)


def cuts(numels: Sequence[int], longest: int) -> list[Cut]:
    """Cut parameters of these lengths into pieces of at most `longest` values. Small neighbors share a piece.

    >>> for cut in cuts([2, 1, 5], longest=4):
    ...     print(cut)
    Cut(params=(0, 1), sizes=(2, 1))
    Cut(params=(2,), sizes=(4,))
    Cut(params=(2,), sizes=(1,))
    """
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for param, numel in enumerate(numels):
        for start in range(0, numel, longest):
            size = min(longest, numel - start)
            if size > room:
                groups.append([])
                room = longest
            groups[-1].append((param, size))
            room -= size
    return [Cut(*zip(*group, strict=True)) for group in groups]


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Inside the `with` block, torch does not split operations over its threads.

    For pieces in the cache, threads cost more than they save: after every operation all wait for the slowest one, much longer
    if other processes use the same cores. One core alone reaches most of the memory bandwidth.
    """
    threads = torch.get_num_threads()
    # The setting holds for this thread, and for threads that start before it is reset.
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def norms(squares: Sequence[float], total: Callable[[Tensor], Tensor]) -> list[float]:
    """Euclidean norms of tensors from their sums of squares on this rank; `total` sums over the ranks that hold shards."""
    # fp64: decisions depend on norms, and the order of an fp32 sum differs between processors
    return total(torch.tensor(squares, dtype=torch.float64)).sqrt().tolist()


def square(tensor: Tensor) -> float:
    """Sum of squares in fp64, with the same bits for any number of torch threads."""
    return sum(squares_of(tensor.reshape(-1).split(UNSHARED)))


def squares_of(parts: Sequence[Tensor]) -> list[float]:
    """Sum of squares of each part in fp64, with one wait for the device in total."""
    # not a dot product: its library uses its own threads, and its bits depend on their number
    lengths = torch.stack([linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return lengths.square().cpu().tolist()


def square_of_difference(one: Tensor, other: Tensor) -> float:
    """Sum of squares of `one - other` (both flat); on the host without memory for the whole difference."""
    if one.device.type != "cpu":
        return squares_of([one - other])[0]
    room = torch.empty(PIECE, dtype=torch.float32)
    pairs = zip(one.split(PIECE), other.split(PIECE), strict=True)
    with in_this_thread():
        return sum(squares_of([torch.sub(a, b, out=room[: a.numel()])])[0] for a, b in pairs)


def divide(work: Callable[[range], T], count: int, threads: int) -> list[T]:
    """Results of `work` for consecutive parts of range(count), in at most `threads` threads, the calling one included."""
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

    If the model trains on the host, work in the training thread may use the threads that training would use now. Work in the
    link's thread uses one thread while training goes on, and training's threads while training waits for it. If the model
    trains on an accelerator, both use half of this rank's share of the cores; data loading keeps the other half.
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
