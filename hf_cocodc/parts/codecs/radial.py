"""Radial-directional averaging: means of norms and of directions, so that updates are as long with many regions as with few."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..fragments import Fragment
from ..tensors.slices import square
from .base import Codec, CodecState, Conversation, Message, Result, message_bytes
from .cast import Cast

_LEAST = 1e-30
"""Below this share of the mean norm, a parameter counts as not moved: fp32 has no number to scale it up by."""


class Radial:
    """A codec that wraps another codec; see `radial`, and `base.copies` for its copy, the directions."""

    copies = 1

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.init = codec.init

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        inside = _inside(fragment)
        if not inside:
            return (yield from self.codec.converse(outer_grad, fragment, state))
        own = _norms(fragment, outer_grad, inside)
        reply = yield Message(own.to(torch.float32), Cast(torch.float32))
        norms = reply.mean.double()
        factors = _ratios(norms, own)
        directions = _scaled(fragment, outer_grad.clone(), inside, factors)
        result = yield from self.codec.converse(directions, fragment, state)
        lengths = _norms(fragment, result.mean, inside)
        _scaled(fragment, result.mean, inside, _ratios(norms, lengths))

        def decoded() -> Tensor:
            return _scaled(fragment, result.own().clone(), inside, _ratios(torch.ones_like(factors), factors))

        return Result(result.mean, decoded, result.state)

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        norms = message_bytes(Cast(torch.float32), len(_inside(fragment)), region, num_regions)
        return norms + self.codec.wire_bytes(fragment, region, num_regions)


def has_radial(codec: object) -> bool:
    """Whether a codec, or one inside it, averages norms and directions apart.

    >>> from hf_cocodc.parts.codecs import bf16, feedback
    >>> has_radial(radial(bf16())), has_radial(feedback(radial(bf16()))), has_radial(bf16())
    (True, True, False)
    """
    inner = getattr(codec, "codec", None)
    return isinstance(codec, Radial) or (inner is not None and has_radial(inner))


def radial(codec: Codec) -> Codec:
    """The mean of the regions' norms times the direction of their mean direction, for each parameter (2604.21428).

    ::

        R = mean_m ||Delta_m|| ;  D = mean_m R Delta_m / ||Delta_m|| ;  result = R D / ||D||

    Both means are weighted by the regions' shares; the result is 0 where D is. The less regions agree, the shorter their plain
    mean is: with cosines c between M outer gradients of one norm, sqrt((1 + (M - 1) c) / M) of that norm. The result keeps it:

    =====  ====  ====  ====  =======
    c      M=2   M=4   M=8   radial
    =====  ====  ====  ====  =======
    0.0    0.71  0.50  0.35  1.00
    0.3    0.81  0.69  0.62  1.00
    0.8    0.95  0.92  0.91  1.00
    =====  ====  ====  ====  =======

    Measured on a tiny Llama (diloco, H = 10, 8 rounds, embeddings and head plain), mean ratio of a round: plain 0.88, 0.83 and
    0.80 with 2, 4 and 8 regions, and 0.79, 0.71 and 0.63 in the last round; radial 0.96, 0.95 and 0.94. Losses were equal to
    0.005. An outer learning rate that was tuned for plain means may be too large.

    Directions travel with the length R, through `codec`, so that they are as large as outer gradients; norms travel before
    them in fp32, which costs one more round trip. Parameters outside the blocks (embeddings, the head) and pieces of
    parameters have a plain mean.

    Args:
        codec: finds the mean of directions. Its error feedback, if any, is about directions. What it sends must be linear in
            each parameter: not low rank, not top-k.

    Source: Decoupled DiLoCo, 2604.21428.
    """
    return Radial(codec)


def _inside(fragment: Fragment) -> list[int]:
    """Positions of the parameters whose norms and directions have means of their own."""
    return [i for i in range(len(fragment.names)) if i not in fragment.outside and i not in fragment.rows]


def _norms(fragment: Fragment, flat: Tensor, places: Sequence[int]) -> Tensor:
    """The norms of parameters in a flat tensor: fp64, one for each place."""
    views = fragment.views(flat)
    return torch.stack([square(views[i].reshape(-1)) for i in places]).sqrt()


def _ratios(wanted: Tensor, found: Tensor) -> Tensor:
    """`wanted` / `found`, element by element; 0 where a parameter has not moved."""
    return torch.where(found > _LEAST * wanted, wanted / found, 0.0)


def _scaled(fragment: Fragment, flat: Tensor, places: Sequence[int], factors: Tensor) -> Tensor:
    """Multiply parameters of a flat tensor by these factors, in place."""
    views = fragment.views(flat)
    torch._foreach_mul_([views[i] for i in places], list(factors.unbind()))
    return flat
