"""Pieces: stretches of a flat tensor that fit into a processor's cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 17
"""Number of values in a piece. A send or a landing finishes one piece before the next, while the piece is in the cache."""
UNSHARED = (1 << 15) - (1 << 10)
"""Number of values up to which torch never splits an operation over its threads."""


class Cut(NamedTuple):
    """A stretch of a flat vector, which holds values of one or more parameters.

    Attributes:
        params: positions of these parameters.
        sizes: number of values of each parameter in the stretch.
    """

    params: tuple[int, ...]
    sizes: tuple[int, ...]

    def views(self, piece: Tensor) -> Sequence[Tensor]:
        """One view of `piece` for each parameter."""
        return piece.split_with_sizes(self.sizes) if len(self.sizes) > 1 else (piece,)


def cuts(numels: Sequence[int], longest: int) -> list[Cut]:
    """Cut parameters of these lengths into pieces of at most `longest` values. Small neighbours share a piece.

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

    For pieces in the cache, threads cost more than they save: after every operation all threads wait for the slowest one.
    If other processes use the same cores, they cost much more. One core alone reaches most of the memory bandwidth.
    """
    threads = torch.get_num_threads()
    # The setting holds for this thread, and for threads that start before it is reset.
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
