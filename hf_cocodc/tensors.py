"""Flat fp32 buffers and the few tensor helpers that everything else stands on."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, linalg, nn

PIECE = 1 << 17
"""Values taken through all of a send or a landing before the next ones, so that they stay in the cache."""
UNSHARED = (1 << 15) - (1 << 10)
"""Values that torch never shares out among its threads."""


def local_shard(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds: its own shard of a DTensor (FSDP2), else the tensor itself."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def flat_zeros(numel: int) -> Tensor:
    """A flat fp32 buffer of `numel` zeros on the host, where the link reads it."""
    return torch.zeros(numel, dtype=torch.float32)


def split_views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of the 1-D `flat`, one for each shape, in order; writing to a view writes to `flat`."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target in place, across dtypes and devices."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(list(targets), list(sources))


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


def norms(squares: Sequence[float], total: Callable[[Tensor], Tensor]) -> list[float]:
    """Euclidean norms of tensors whose sums of squares are given.

    In fp64: decisions hang on them, and the order of an fp32 sum differs between processors. `total` adds up over the
    ranks that hold shards of the tensors.
    """
    return total(torch.tensor(squares, dtype=torch.float64)).sqrt().tolist()


def square(tensor: Tensor) -> float:
    """Sum of squares in fp64, to the same bits however many threads torch has."""
    return sum(squares_of(tensor.reshape(-1).split(UNSHARED)))


def squares_of(parts: Sequence[Tensor]) -> list[float]:
    """Sum of squares of each, in fp64; a device is waited for once, not once a part.

    No dot product: the library behind it has threads of its own, and gives other bits with more of them.
    """
    lengths = torch.stack([linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return lengths.square().cpu().tolist()


def square_of_difference(one: Tensor, other: Tensor) -> float:
    """Sum of squares of `one - other`, flat, on the host without the memory for the difference."""
    if one.device.type != "cpu":
        return squares_of([one - other])[0]
    room = torch.empty(PIECE, dtype=torch.float32)
    pairs = zip(one.split(PIECE), other.split(PIECE), strict=True)
    with in_this_thread():
        return sum(squares_of([torch.sub(a, b, out=room[: a.numel()])])[0] for a, b in pairs)


def reshard(model: nn.Module) -> None:
    """Let FSDP2 modules forget gathered parameters, so that the next forward pass sees what is written to the shards.

    A forward pass without a backward one (an evaluation) leaves some of them gathered.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def digest(*flats: Tensor, start: int = 0) -> int:
    """A checksum of the bytes of flat tensors in a row: equal bits give equal values (CRC-32, fits a float64).

    With the checksum of what comes before them as `start` it is that of all together.
    """
    for flat in flats:
        start = zlib.crc32(flat.cpu().numpy(), start)
    return start


def is_finite(flat: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return math.isfinite(flat.sum())


def tensors_in(state: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of a nested state, in the order of its keys."""
    found = []
    for value in state.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors_in(value)
    return found
