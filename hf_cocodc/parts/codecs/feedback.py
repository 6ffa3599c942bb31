"""Error feedback: what a codec could not send this time is sent the next time."""

import torch
from torch import Tensor

from ...tensors.flat import flat_zeros
from ..fragments import Fragment
from .base import Codec, Conversation, Result, State


class Feedback:
    """A codec around another; see `feedback`."""

    def __init__(self, codec: Codec, decay: float) -> None:
        self.codec = codec
        self.decay = decay

    def init(self, fragment: Fragment) -> State:
        return {"residual": flat_zeros(fragment.numel), "codec": self.codec.init(fragment)}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: State) -> Conversation:
        meant = torch.add(outer_grad, state["residual"], alpha=self.decay)
        result = yield from self.codec.converse(meant, fragment, state["codec"])
        residual = meant - result.own()  # not in place: fp32 payloads are views of `meant`
        # A value that is not finite (a format overflowed) must not come back with every later transfer.
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return Result(result.mean, result.own, {"residual": residual, "codec": result.state})

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        return self.codec.wire_bytes(fragment, region, num_regions)


def forget(state: State) -> State:
    """A codec's state without this region's residuals: a region that joins has nothing to make up for."""
    return {
        key: torch.zeros_like(value)
        if key == "residual"
        else forget(value)
        if isinstance(value, dict)
        else value
        for key, value in state.items()
    }


def feedback(codec: Codec, decay: float = 1.0) -> Codec:
    """Add to each outer gradient what the transfers before it left out.

    ::

        meant = Delta + decay e ;  sent = decode(encode(meant)) ;  e = meant - sent

    `sent` is what this region's own bytes stand for. Between more than two regions the mean is rounded once more by
    whoever averages it; that part is in nobody's residual. Nor is what a region meant while it sat a transfer out.

    Source: DiLoCoX, 2506.21263 (decay 1); SparseLoCo, 2508.15706 (decay 0.95).

    Args:
        codec: what sends.
        decay: share of the residual that comes back, 0 (no feedback) to 1 (all of it).
    """
    return Feedback(codec, decay)
