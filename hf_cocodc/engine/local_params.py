"""The local params of one fragment: this rank's own tensors, read and written in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..parts.fragments import Fragment
from ..parts.tensors.flat import copy_all_
from ..parts.tensors.memory import HOST
from ..parts.tensors.pieces import Cut, cuts

STAGED = 1 << 24
"""Values copied between a device and the host at a time: 64 MiB on the device, however long the fragment is."""


class LocalParams:
    """The trainable parameters of one fragment (of a sharded model, this rank's shards); copies them to and from flat fp32.

    Attributes:
        is_rounded: whether the model stores values with less precision than fp32.
        pieces: the parameters themselves, piece by piece; None if they are not on the host or not contiguous.
    """

    def __init__(self, fragment: Fragment, params: Sequence[Tensor], cuts: Sequence[Cut]) -> None:
        self.params = list(params)
        self.device = self.params[0].device
        self.is_rounded = any(param.dtype != torch.float32 for param in self.params)
        on_host = all(param.device == HOST for param in self.params)
        is_contiguous = all(param.is_contiguous() for param in self.params)
        self.pieces = _slices(self.params, cuts) if on_host and is_contiguous else None
        self._fragment, self._cuts = fragment, cuts
        self._stages = _stages(self.params) if is_contiguous and not on_host else None

    def gather(self, into: Tensor) -> Tensor:
        """Copy the parameters into a flat tensor; returns that tensor."""
        if self.device == into.device:
            copy_all_(self._fragment.views(into), self.params)
        elif self._stages is None:
            into.copy_(self.gather(torch.empty_like(into, device=self.device)))
        else:
            cut, own = self._stages
            for stage, params, piece in zip(cut, own, into.split_with_sizes(_lengths(cut)), strict=True):
                staged = torch.empty_like(piece, device=self.device)
                copy_all_(stage.views(staged), params)
                piece.copy_(staged)
        return into

    def show(self, flat: Tensor) -> None:
        """Copy a flat tensor into the parameters."""
        if self.device == flat.device:
            copy_all_(self.params, self._fragment.views(flat))
        elif self._stages is None:
            self.show(flat.to(self.device))
        else:
            cut, own = self._stages
            for stage, params, piece in zip(cut, own, flat.split_with_sizes(_lengths(cut)), strict=True):
                copy_all_(params, stage.views(piece.to(self.device)))

    def rounded(self, piece: Tensor, index: int, into: Tensor) -> Tensor:
        """A piece of the global params as the model would store it; written to `into`."""
        cut = self._cuts[index]
        parts = zip(cut.views(piece), cut.params, strict=True)
        copy_all_(cut.views(into), [part.to(self.params[param].dtype) for part, param in parts])
        return into


def staged_bytes(params: LocalParams, device: torch.device) -> int:
    """Bytes on the parameters' device that a copy to or from flat tensors on `device` needs for a while."""
    return 0 if params.device == device else 4 * min(STAGED, sum(param.numel() for param in params.params))


def _stages(params: Sequence[Tensor]) -> tuple[list[Cut], list[Sequence[Tensor]]]:
    stages = cuts([param.numel() for param in params], STAGED)
    return stages, _slices(params, stages)


def _lengths(stages: Sequence[Cut]) -> list[int]:
    return [sum(stage.sizes) for stage in stages]


def _slices(params: Sequence[Tensor], pieces: Sequence[Cut]) -> list[Sequence[Tensor]]:
    """The stretches of the parameters that form each piece."""
    rest = [param.view(-1) for param in params]
    slices: list[Sequence[Tensor]] = []
    for piece in pieces:
        slices.append([rest[param][:size] for param, size in zip(piece.params, piece.sizes, strict=True)])
        for param, size in zip(piece.params, piece.sizes, strict=True):
            rest[param] = rest[param][size:]
    return slices
