"""How work on a flat tensor is cut into slices, so that its temporaries stay small; and sums of squares."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ON_HOST = 1 << 18
"""Values in a slice on the host: what is computed from them stays in a cache."""
ON_DEVICE = 1 << 26
"""Values in a slice on an accelerator, where an operation on many values takes little longer than its launch."""
_ROW = 1 << 12
"""Values whose squares are summed in fp32; the sums of rows are summed in fp64."""


def longest(device: torch.device) -> int:
    """Values in a slice of a flat tensor on this device."""
    return ON_HOST if device.type == "cpu" else ON_DEVICE


class Cut(NamedTuple):
    """A slice of a flat vector: the positions of the parameters that have values in it, and how many values each has."""

    params: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Values in the slice."""
        return sum(self.sizes)

    def views(self, part: Tensor) -> Sequence[Tensor]:
        """One view of the slice for each parameter."""
        return part.split_with_sizes(self.sizes) if len(self.sizes) > 1 else (part,)


def cuts(numels: Sequence[int], longest: int) -> list[Cut]:
    """Cut parameters of these lengths into slices of at most `longest` values. Small neighbors share a slice.

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


def square(values: Tensor) -> Tensor:
    """Sum of squares of a flat fp32 tensor: an fp64 scalar on its device. The host does not wait for it.

    >>> square(torch.tensor([3.0, 4.0]))
    tensor(25., dtype=torch.float64)
    """
    # rows in fp32: in fp64 torch would copy all values, and one sum of many values in fp32 loses digits
    whole = values.numel() - values.numel() % _ROW
    rows, rest = values.split_with_sizes([whole, values.numel() - whole])
    norms = torch.cat([rows.view(-1, _ROW).norm(dim=1), rest.norm().view(1)])
    return norms.double().square().sum()


def squares(parts: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each of some tensors: 1-D fp64 on their device."""
    if parts[0].device.type == "cpu":  # there torch's norm of many values loses digits
        return torch.stack([square(part.reshape(-1)) for part in parts])
    return torch.stack(torch._foreach_norm(list(parts))).double().square()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
