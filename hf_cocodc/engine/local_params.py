"""The local params of one fragment: this rank's own tensors, read and written in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..parts.tensors.flat import copy_all_
from ..parts.tensors.memory import HOST, Home
from ..parts.tensors.slices import Cut, cuts, longest


class LocalParams:
    """The trainable parameters of one fragment (of a sharded model, this rank's shards), slice by slice.

    Attributes:
        cuts: the slices.
        numels: number of values of each parameter, fp64 on the device: brought there once, because training waits for that.
        is_rounded: whether the model stores values with less precision than fp32.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self.device = self.params[0].device
        self.is_rounded = any(param.dtype != torch.float32 for param in self.params)
        numels = [param.numel() for param in self.params]
        self.numels = torch.tensor(numels, dtype=torch.float64, device=HOST).to(self.device)
        # strided ones cannot be cut: they are all in one slice
        is_contiguous = all(param.is_contiguous() for param in self.params)
        most = longest(self.device) if is_contiguous else max(sum(numels), 1)
        self.cuts: list[Cut] = cuts(numels, most)
        self._parts = _parts(self.params, self.cuts)

    def read(self, index: int, into: Tensor | None = None) -> Tensor:
        """The values of a slice in fp32, on their device: written to `into`, or perhaps the parameter's own memory."""
        parts = self._parts[index]
        if into is None:
            if len(parts) == 1 and parts[0].dim() == 1 and parts[0].dtype == torch.float32:
                return parts[0]
            into = torch.empty(self.cuts[index].numel, dtype=torch.float32, device=self.device)
        copy_all_(_shaped(self.cuts[index].views(into), parts), parts)
        return into

    def write(self, index: int, values: Tensor) -> None:
        """Write the values of a slice into the parameters."""
        parts = self._parts[index]
        copy_all_(parts, _shaped(self.cuts[index].views(values), parts))

    def rounded(self, index: int, values: Tensor) -> Tensor:
        """The values of a slice as the model would store them, in fp32."""
        if not self.is_rounded:
            return values
        cut = self.cuts[index]
        views = cut.views(values)
        stored = [view.to(self.params[param].dtype) for view, param in zip(views, cut.params, strict=True)]
        into = torch.empty_like(values)
        copy_all_(cut.views(into), stored)
        return into

    def gather(self, into: Tensor, home: Home) -> Tensor:
        """Copy all values into a flat tensor at rest; returns that tensor."""
        for index, part in enumerate(self.split(into)):
            home.store(part, self.read(index, part if part.device == self.device else None))
        return into

    def show(self, flat: Tensor, home: Home) -> None:
        """Copy a flat tensor into the parameters."""
        for index, part in enumerate(self.split(flat)):
            self.write(index, home.visit(part))

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """A flat tensor of this fragment, slice by slice."""
        if len(self.cuts) == 1:
            return (flat,)
        return flat.split_with_sizes([cut.numel for cut in self.cuts]) if self.cuts else ()


def _parts(params: Sequence[Tensor], slices: Sequence[Cut]) -> list[list[Tensor]]:
    """For each slice the stretches of the parameters that lie in it; one that lies in it as a whole and strided, as it is."""
    starts = [0] * len(params)
    found: list[list[Tensor]] = []
    for cut in slices:
        found.append([])
        for param, size in zip(cut.params, cut.sizes, strict=True):
            own, start = params[param], starts[param]
            found[-1].append(own.view(-1)[start : start + size] if own.is_contiguous() else own)
            starts[param] += size
    return found


def _shaped(views: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """Views of a slice with the shapes of the stretches."""
    return [view.view(part.shape) for view, part in zip(views, parts, strict=True)]
