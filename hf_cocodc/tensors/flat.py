"""Flat fp32 tensors: how parameters lie in them, the checksum of their bytes, and whether they are finite."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def flat_zeros(numel: int) -> Tensor:
    """A flat fp32 tensor of `numel` zeros on the host, where the link reads it."""
    return torch.zeros(numel, dtype=torch.float32)


def split_views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of the 1-D `flat`, one for each shape, in order. Writing to a view writes to `flat`.

    >>> [view.tolist() for view in split_views(torch.arange(5), [(2,), (1, 3)])]
    [[0, 1], [[2, 3, 4]]]
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target in place, across dtypes and devices."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(list(targets), list(sources))


def digest(*flats: Tensor, start: int = 0) -> int:
    """A checksum of the bytes of flat tensors in a row: equal bits give equal values (CRC-32, exact in a float64).

    With the checksum of earlier tensors as `start`, the result is the checksum of all of them together.
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
