"""Floating-point formats: fp32 loses nothing, bf16 and fp16 round to nearest."""

import torch
from torch import Tensor

from .base import Codec, Conversation, Message, Plain, Result


class Cast:
    """Casts each value to another floating-point type. In fp16 the largest value stands for any beyond it.

    A NaN stays one, but a GPU writes it with other bits than a CPU.
    """

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # bf16 has the range of fp32
        self._largest = torch.finfo(dtype).max if dtype == torch.float16 else None

    def encode(self, values: Tensor) -> Tensor:
        encoded = values.contiguous().to(self.dtype)
        if self._largest is not None:
            encoded.clamp_(-self._largest, self._largest)
        return encoded.view(torch.uint8)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return payload.view(self.dtype).to(torch.float32)

    def num_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize


def fp32() -> Codec:
    """Four bytes per value, nothing lost."""
    return Plain(Cast(torch.float32))


def bf16() -> Codec:
    """Two bytes per value, range of fp32, 8 bits of precision."""
    return Plain(Cast(torch.bfloat16))


def fp16() -> Codec:
    """Two bytes per value, 11 bits of precision; values beyond 65504 count as 65504."""
    return Plain(Cast(torch.float16))


def unrounded(values: Tensor) -> Conversation:
    """The conversation for the mean of flat fp32 values as they are."""
    reply = yield Message(values, Cast(torch.float32))
    return Result(reply.mean, reply.own, {})
