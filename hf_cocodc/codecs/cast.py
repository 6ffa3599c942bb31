"""Floating-point formats as they are: fp32 loses nothing, bf16 and fp16 round to nearest."""

import torch
from torch import Tensor

from .base import Codec, Plain


class Cast:
    """Values in another floating-point type, one by one."""

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return values.to(self.dtype).contiguous().view(torch.uint8)
        out.view(self.dtype).copy_(values)
        return out

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        values = payload.view(self.dtype)
        return values.to(torch.float32) if out is None else out.copy_(values)

    def num_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize


def fp32() -> Codec:
    """Four bytes a value, nothing lost."""
    return Plain(Cast(torch.float32))


def bf16() -> Codec:
    """Two bytes a value, the range of fp32, 8 bits of precision."""
    return Plain(Cast(torch.bfloat16))


def fp16() -> Codec:
    """Two bytes a value, 11 bits of precision, values beyond 65504 become infinite."""
    return Plain(Cast(torch.float16))
