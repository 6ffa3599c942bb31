"""Norms of flat tensors in fp64, with the same bits on every machine."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, linalg

from .pieces import PIECE, UNSHARED, in_this_thread


def norms(squares: Sequence[float], total: Callable[[Tensor], Tensor]) -> list[float]:
    """Euclidean norms of tensors, from their sums of squares on this rank.

    The norms are fp64, because decisions depend on them and the order of an fp32 sum differs between processors. `total`
    sums over the ranks that hold shards of the tensors.
    """
    return total(torch.tensor(squares, dtype=torch.float64)).sqrt().tolist()


def square(tensor: Tensor) -> float:
    """Sum of squares in fp64, with the same bits for any number of torch threads."""
    return sum(squares_of(tensor.reshape(-1).split(UNSHARED)))


def squares_of(parts: Sequence[Tensor]) -> list[float]:
    """Sum of squares of each part in fp64, with one wait for the device in total.

    This must not be a dot product: the library for dot products uses its own threads, and its bits depend on their number.
    """
    lengths = torch.stack([linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return lengths.square().cpu().tolist()


def square_of_difference(one: Tensor, other: Tensor) -> float:
    """Sum of squares of `one - other` (both flat). On the host, it does not allocate memory for the whole difference."""
    if one.device.type != "cpu":
        return squares_of([one - other])[0]
    room = torch.empty(PIECE, dtype=torch.float32)
    pairs = zip(one.split(PIECE), other.split(PIECE), strict=True)
    with in_this_thread():
        return sum(squares_of([torch.sub(a, b, out=room[: a.numel()])])[0] for a, b in pairs)
