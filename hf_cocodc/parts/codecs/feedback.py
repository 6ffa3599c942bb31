"""Error feedback: the next transfer also carries the values that the codec lost in this one."""

import torch
from torch import Tensor

from ..fragments import Fragment
from ..tensors.flat import flat_zeros
from ..tensors.slices import square
from .base import Codec, CodecState, Conversation, Result


class Feedback:
    """A codec that wraps another codec; see `feedback`."""

    def __init__(self, codec: Codec, decay: float) -> None:
        self.codec = codec
        self.decay = decay

    def init(self, fragment: Fragment) -> CodecState:
        return {"residual": flat_zeros(fragment.numel), "codec": self.codec.init(fragment)}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        meant = torch.add(outer_grad, state["residual"], alpha=self.decay)
        result = yield from self.codec.converse(meant, fragment, state["codec"])
        residual = meant - result.own()  # not in place: fp32 payloads are views of `meant`
        # A non-finite value (the format overflowed) must not return with every later transfer.
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return Result(result.mean, result.own, {"residual": residual, "codec": result.state})

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        return self.codec.wire_bytes(fragment, region, num_regions)


def without_residuals(state: CodecState) -> CodecState:
    """A codec's state with zero residuals, for a region that joins: it has lost nothing in earlier transfers.

    >>> without_residuals({"residual": torch.ones(2), "codec": {}})
    {'residual': tensor([0., 0.]), 'codec': {}}
    """
    return {
        key: torch.zeros_like(value)
        if key == "residual"
        else without_residuals(value)
        if isinstance(value, dict)
        else value
        for key, value in state.items()
    }


def with_residuals_of(state: CodecState, earlier: CodecState) -> CodecState:
    """A codec's state with the residuals of an earlier one: what was sent has counted nowhere, so nothing of it was lost.

    >>> with_residuals_of({"residual": torch.zeros(1), "codec": {"rank": 2}}, {"residual": torch.ones(1), "codec": {"rank": 4}})
    {'residual': tensor([1.]), 'codec': {'rank': 2}}
    """
    return {
        key: earlier[key]
        if key == "residual"
        else with_residuals_of(value, earlier[key])
        if isinstance(value, dict)
        else value
        for key, value in state.items()
    }


def square_of_residuals(state: CodecState) -> Tensor | float:
    """The sum of squares of the residuals in a codec's state: an fp64 scalar on their device, or 0.

    >>> float(square_of_residuals({"codec": {"residual": torch.ones(4)}})), square_of_residuals({"q": torch.ones(2)})
    (4.0, 0.0)
    """
    inner = sum((square_of_residuals(each) for each in state.values() if isinstance(each, dict)), 0.0)
    return inner + square(state["residual"]) if "residual" in state else inner


def feedback(codec: Codec, decay: float = 1.0) -> Codec:
    """Add to each outer gradient the residual e: the values that earlier transfers lost.

    ::

        meant = Delta + decay e ;  sent = decode(encode(meant)) ;  e = meant - sent

    `sent` is the value of this region's own bytes. With more than two regions, the region that averages a shard rounds the mean
    once more. No residual contains this error, nor the outer gradient of a region that is excluded from a transfer.

    Args:
        decay: share of the residual that is sent again, 0 (no feedback) to 1 (all).

    Source: DiLoCoX, 2506.21263 (decay 1); SparseLoCo, 2508.15706 (decay 0.95).

    One region sends [3, 2] three times, but only the larger value fits:

    >>> from hf_cocodc.parts.codecs import topk
    >>> from hf_cocodc.parts.codecs.base import mean_of
    >>> codec, fragment = feedback(topk(k=1, chunk=2, bits=32)), Fragment(0, ("weight",), ((2,),), numel=2)
    >>> state = codec.init(fragment)
    >>> for _ in range(3):
    ...     conversation = codec.converse(torch.tensor([3.0, 2.0]), fragment, state)
    ...     [reply] = mean_of([next(conversation)], weights=[1.0])
    ...     try:
    ...         conversation.send(reply)
    ...     except StopIteration as end:
    ...         mean, _, state = end.value
    ...     print(mean.tolist(), state["residual"].tolist())
    [3.0, 0.0] [0.0, 2.0]
    [0.0, 4.0] [3.0, 0.0]
    [6.0, 0.0] [0.0, 2.0]
    """
    return Feedback(codec, decay)
