"""Flat fp32 buffers and the few tensor helpers that everything else stands on."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 1 << 15
"""Values worked on at once: too few for torch to spread over threads, which would cost more than they save."""


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
    torch._foreach_copy_(list(targets), list(sources))


def norms(tensors: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> list[float]:
    """Euclidean norms, summed in fp64: decisions hang on them, and the order of an fp32 sum differs between processors.

    `total` adds up over the ranks that hold shards of the tensors.
    """
    return total(torch.tensor([square(tensor) for tensor in tensors], dtype=torch.float64)).sqrt().tolist()


def square(tensor: Tensor) -> float:
    """Sum of squares in fp64, piece by piece, so that the fp64 copies stay in the cache."""
    return sum(
        float(torch.dot(piece, piece)) for piece in map(Tensor.double, tensor.reshape(-1).split(_PIECE))
    )


def reshard(model: nn.Module) -> None:
    """Let FSDP2 modules forget gathered parameters, so that the next forward pass sees what is written to the shards.

    A forward pass without a backward one (an evaluation) leaves some of them gathered.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def digest(flat: Tensor) -> int:
    """A checksum of the bytes of a flat host tensor: equal bits give equal values (CRC-32, fits a float64)."""
    return zlib.crc32(flat.contiguous().numpy())


def is_finite(flat: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return bool(torch.isfinite(flat.sum()))


def tensors_in(state: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of a nested state, in the order of its keys."""
    found = []
    for value in state.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors_in(value)
    return found
