"""Pieces: stretches of a flat tensor that are short enough for a processor's cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 17
"""Values taken through all of a send or a landing before the next ones, so that they stay in the cache."""
UNSHARED = (1 << 15) - (1 << 10)
"""Values that torch never shares out among its threads."""


class Cut(NamedTuple):
    """Some values of parameters that lie one behind the other in a flat vector.

    Attributes:
        params: which parameters these values are of.
        sizes: how many of each.
    """

    params: tuple[int, ...]
    sizes: tuple[int, ...]

    def views(self, piece: Tensor) -> Sequence[Tensor]:
        """One view of the piece for each parameter."""
        return piece.split_with_sizes(self.sizes) if len(self.sizes) > 1 else (piece,)


def cuts(numels: Sequence[int], longest: int) -> list[Cut]:
    """Cut parameters of these lengths into pieces of at most `longest` values; small neighbours share one."""
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
    """Inside the block torch does not spread operations over its threads.

    On pieces that stay in the cache its threads cost more than they save, for after every operation all wait for the
    slowest, and very much more where other processes want the cores too; one core alone moves most of what memory gives.
    """
    threads = torch.get_num_threads()
    # holds for the thread that says so, and for threads that begin before it is taken back
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
