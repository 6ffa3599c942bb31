"""Codecs as the authors of SparseLoCo and MuLoCo have them, to measure what our differences from their code cost.

They are for studies alone: each region encodes and decodes by itself, and what it decoded travels as fp32, so the bytes of these
arms are not those of the methods. `specs/sparseloco.yaml` and `specs/muloco.yaml` compare them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_cocodc.methods import Method
from hf_cocodc.newer import muloco, sparseloco
from hf_cocodc.parts.codecs.base import (
    Codec,
    CodecState,
    Conversation,
    Message,
    Plain,
    Result,
    message_bytes,
)
from hf_cocodc.parts.codecs.block import Integers
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.codecs.codebook import Codebook
from hf_cocodc.parts.codecs.feedback import feedback
from hf_cocodc.parts.fragments import Fragment

_FP32 = Cast(torch.float32)
_SIDE, _KEPT = 64, 64
_BINS, _LEAST, _MOST = 8192, -40.0, 24.0
"""Of the histogram in which regions see each other's norms: powers of two, in steps of half a percent."""

Lossy = Callable[[Fragment, Tensor], Tensor]
"""From the outer gradient of a fragment to what its bytes decode to; both flat."""


class Local:
    """A codec whose loss is made in the region.

    Args:
        lossy: makes the loss.
        clipped: whether each parameter of a region is scaled down to the median norm of the regions.
        senders: whether a value's mean is over the regions that have sent it, not over all.
    """

    def __init__(self, lossy: Lossy, clipped: bool = False, senders: bool = False) -> None:
        self._lossy, self._clipped, self._senders = lossy, clipped, senders

    def init(self, fragment: Fragment) -> CodecState:
        return {}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        own = sent = self._lossy(fragment, outer_grad)
        if self._clipped:
            norms = [float(view.norm()) for view in fragment.views(own)]
            reply = yield Message(_histograms(norms), _FP32)
            medians = _medians(reply.mean)
            sent = own.clone()
            for view, norm, median in zip(fragment.views(sent), norms, medians, strict=True):
                view.mul_(min(1.0, median / (norm + 1e-8)))
        reply = yield Message(sent, _FP32)
        mean = reply.mean
        if self._senders:
            shares = yield Message((own != 0).float(), _FP32)
            mean = mean / shares.mean.clamp(min=1e-6)
        return Result(mean, lambda: own, state)

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        numels = [fragment.numel, *([fragment.numel] if self._senders else [])]
        numels += [len(fragment.names) * _BINS] if self._clipped else []
        return sum(message_bytes(_FP32, numel, region, num_regions) for numel in numels)


def _histograms(norms: Sequence[float]) -> Tensor:
    counts = torch.zeros(len(norms), _BINS)
    for row, norm in zip(counts, norms, strict=True):
        row[_bin(norm)] = 1
    return counts.view(-1)


def _bin(norm: float) -> int:
    power = math.log2(norm) if norm > 0 else _LEAST
    return min(max(round((power - _LEAST) / (_MOST - _LEAST) * _BINS), 0), _BINS - 1)


def _medians(mean: Tensor) -> list[float]:
    """For each parameter, the lower middle one of the regions' norms.

    >>> three = sum(_histograms([norm]) for norm in (1.0, 2.0, 8.0)) / 3
    >>> [round(each, 3) for each in _medians(three)]
    [2.0]
    """
    places = (mean.view(-1, _BINS).cumsum(1) >= 0.5 - 1e-4).int().argmax(1).tolist()
    return [2.0 ** (_LEAST + place / _BINS * (_MOST - _LEAST)) for place in places]


def sides(length: int) -> int:
    """How many rows or columns a tile of the authors has: the largest divisor up to 64, so that tiles are whole.

    >>> sides(4096), sides(100), sides(8), sides(127)
    (64, 50, 8, 1)
    """
    return max(side for side in range(1, _SIDE + 1) if length % side == 0)


def _tiles(view: Tensor) -> Tensor:
    """The tiles (tiles, values) of a vector or matrix, cut as the authors cut them."""
    if view.ndim < 2:
        return view.reshape(-1, sides(view.numel()))
    matrix = view.reshape(view.shape[0], -1)
    high, wide = sides(matrix.shape[0]), sides(matrix.shape[1])
    blocks = matrix.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)
    return blocks.reshape(-1, high * wide)


def _untiled(tiles: Tensor, like: Tensor) -> Tensor:
    if like.ndim < 2:
        return tiles.reshape(like.shape)
    rows, cols = like.shape[0], like.numel() // like.shape[0]
    high, wide = sides(rows), sides(cols)
    return tiles.view(rows // high, cols // wide, high, wide).transpose(1, 2).reshape(like.shape)


def _largest(rows: Tensor) -> Tensor:
    """Which values of each row are among its largest (bool)."""
    if rows.shape[1] <= _KEPT:
        return torch.ones_like(rows, dtype=torch.bool)
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(1, rows.abs().topk(_KEPT).indices, True)


def _by_chunk(rows: Tensor, kept: Tensor) -> Tensor:
    """Our two bits: a codebook for each tile."""
    values = rows[kept].view(len(rows), -1)
    coder = Codebook(values.shape[1])
    decoded = coder.decode(coder.encode(values.reshape(-1)), values.numel())
    return torch.zeros_like(rows).masked_scatter_(kept, decoded)


def _by_tensor(rows: Tensor, kept: Tensor) -> Tensor:
    """The authors' two bits: four bins of 1.5 standard deviations for a whole parameter, each with the mean of what is in it."""
    values = rows[kept]
    shift = values.mean()
    centered = values - shift
    scale = centered.std() * 6 / 4 if values.numel() > 1 else torch.tensor(1.0)
    scale = scale if scale > 0 else torch.tensor(1.0)
    codes = (centered / scale + 2).round().clamp(0, 3).long()
    sums = torch.zeros(4).index_add_(0, codes, centered)
    means = sums / torch.bincount(codes, minlength=4).clamp(min=1)
    return torch.zeros_like(rows).masked_scatter_(kept, means[codes] + shift)


def _sparse(two_bits: Callable[[Tensor, Tensor], Tensor]) -> Lossy:
    def lossy(fragment: Fragment, flat: Tensor) -> Tensor:
        found = torch.empty_like(flat)
        for view, out in zip(fragment.views(flat), fragment.views(found), strict=True):
            rows = _tiles(view)
            out.copy_(_untiled(two_bits(rows, _largest(rows)), view))
        return found

    return lossy


def _sparseloco(codec: Codec, sync_interval: int, outer_lr: float) -> Method:
    base = sparseloco(sync_interval=sync_interval, outer_lr=outer_lr)
    return dataclasses.replace(base, codec=feedback(codec, 0.95))


def tiles(*, sync_interval: int = 30, outer_lr: float = 1.0) -> Method:
    """SparseLoCo with the authors' tiles: 64 values of each, also where a tile is small (LoRA, vectors)."""
    return _sparseloco(Local(_sparse(_by_chunk)), sync_interval, outer_lr)


def codebook(*, sync_interval: int = 30, outer_lr: float = 1.0) -> Method:
    """`tiles`, and the authors' two bits."""
    return _sparseloco(Local(_sparse(_by_tensor)), sync_interval, outer_lr)


def clipped(*, sync_interval: int = 30, outer_lr: float = 1.0) -> Method:
    """`tiles`, with each region's parameter scaled down to the median norm of the regions."""
    return _sparseloco(Local(_sparse(_by_chunk), clipped=True), sync_interval, outer_lr)


def senders(*, sync_interval: int = 30, outer_lr: float = 1.0) -> Method:
    """`tiles`, with the mean of a value over the regions that have sent it."""
    return _sparseloco(Local(_sparse(_by_chunk), senders=True), sync_interval, outer_lr)


def authors(*, sync_interval: int = 30, outer_lr: float = 1.0) -> Method:
    """SparseLoCo as in the authors' code: tiles, two bits, norms, means."""
    return _sparseloco(Local(_sparse(_by_tensor), clipped=True, senders=True), sync_interval, outer_lr)


def blocks_only(
    *, sync_interval: int = 30, outer_lr: float = 0.7, outer_momentum: float = 0.6, decay: float = 0.9
) -> Method:
    """MuLoCo with four bits for matrices in blocks alone, and error feedback of `decay`."""
    coder = Integers(4, 256)

    def lossy(fragment: Fragment, flat: Tensor) -> Tensor:
        found = flat.clone()
        for i, view in enumerate(fragment.views(found)):
            if view.ndim > 1 and i not in fragment.outside:
                view.copy_(coder.decode(coder.encode(view.reshape(-1)), view.numel()).view_as(view))
        return found

    base = muloco(sync_interval=sync_interval, outer_lr=outer_lr, outer_momentum=outer_momentum)
    return dataclasses.replace(base, codec=feedback(Local(lossy), decay))


class Again:
    """A codec that quantizes the mean of two regions, too, as the mean of more is (`base.mean_of`)."""

    def __init__(self, codec: Plain) -> None:
        self._codec = codec
        self.init, self.wire_bytes = codec.init, codec.wire_bytes

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        result = yield from self._codec.converse(outer_grad, fragment, state)
        coder = self._codec.coder
        return result._replace(mean=coder.decode(coder.encode(result.mean), fragment.numel))


def mean_again(
    *,
    sync_interval: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    decay: float = 0.9,
    bits: int = 4,
) -> Method:
    """MuLoCo in `bits` (4 or 2), with the mean of two regions quantized a second time."""
    base = muloco(sync_interval=sync_interval, outer_lr=outer_lr, outer_momentum=outer_momentum)
    coder = Integers(4, 256) if bits == 4 else Codebook(256)
    return dataclasses.replace(base, codec=feedback(Again(Plain(coder)), decay))
