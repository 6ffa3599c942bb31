"""Block formats: a few bits per value, and one fp32 scale per block of neighboring values.

Encoding and decoding are element-wise, except for the largest magnitude of a block, which is exact in any order of evaluation:
every machine gets the same bytes, and decodes the same values from them. If a value in a block is not finite, the whole block
decodes to NaN, and cannot be mistaken for large numbers. All other blocks stay finite.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from ...errors import InputError
from ..tensors.memory import HOST
from ..tensors.slices import longest
from .base import Codec, Plain, exactly

_FLOAT = torch.finfo(torch.float32)

_SIGN_AND_EXPONENT = 0x8380 - (1 << 16)
"""Mask on the bits of a bf16 number (as int16): the sign and the lowest three exponent bits."""


class Blocks(ABC):
    """Base of the block coders. The payload is first one fp32 scale per block, then the codes; subclasses define a code.

    Zeros fill up a short last block. Bytes that encode only filling are not sent.

    Args:
        per_byte: codes per byte, 1 or 2. With 2, byte i of a block holds value i in its low half and value i + block / 2 in its
            high half, so that each half is read and written as a run of neighbors.
    """

    def __init__(self, block: int, per_byte: int) -> None:
        if block < 1 or block % per_byte:
            raise InputError(
                f"block={block} must be a positive multiple of {per_byte}, the number of values packed into one "
                "byte. Use 64 or 256."
            )
        self.block = block
        self.per_byte = per_byte

    def encode(self, values: Tensor) -> Tensor:
        payload = torch.empty(self._padded(values.numel()), dtype=torch.uint8, device=values.device)
        heads, codes = self._parts(payload)
        for part, head, code in self._slices(values, heads, codes):
            missing = -part.numel() % self.block
            part = torch.nn.functional.pad(part, (0, missing)) if missing else part
            self._encode_blocks(part.view(-1, self.block), head, code)
        return payload[: self.num_bytes(values.numel())]

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        missing = self._padded(numel) - self.num_bytes(numel)
        heads, codes = self._parts(torch.nn.functional.pad(payload, (0, missing)) if missing else payload)
        values = torch.empty(len(codes) * self.block, dtype=torch.float32, device=payload.device)
        for part, head, code in self._slices(values, heads, codes):
            self._decode_blocks(head, code, part.view(-1, self.block))
        return values[:numel]

    def num_bytes(self, numel: int) -> int:
        full, rest = divmod(numel, self.block)
        width = self.block // self.per_byte
        return 4 * (full + (rest > 0)) + full * width + min(rest, width)

    def _padded(self, numel: int) -> int:
        """Number of bytes for `numel` values if the last block is sent as a whole."""
        return -(-numel // self.block) * (4 + self.block // self.per_byte)

    def _parts(self, padded: Tensor) -> tuple[Tensor, Tensor]:
        """Split a payload of whole blocks: scales (blocks, 4), codes (blocks, block / per_byte)."""
        width = self.block // self.per_byte
        blocks = len(padded) // (4 + width)
        heads, codes = padded.split_with_sizes([4 * blocks, len(padded) - 4 * blocks])
        return heads.view(-1, 4), codes.view(-1, width)

    def _slices(self, values: Tensor, *parts: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """What is computed with at once: a slice of the values, and the same blocks of the parts of a payload."""
        many = max(1, longest(values.device) // self.block)
        if len(parts[0]) <= many:
            return [(values, *parts)]
        return zip(values.split(many * self.block), *(part.split(many) for part in parts), strict=True)

    def _encode_blocks(self, rows: Tensor, heads: Tensor, codes: Tensor) -> None:
        """Write the scales (blocks, 4) and the codes (blocks, block / per_byte) of the values in `rows` (blocks, block)."""
        # faster than the largest of the magnitudes, which would have to be written first
        scale = heads.view(torch.float32)
        torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_(), out=scale)
        is_finite = scale < torch.inf
        self._scale_(scale).masked_fill_(~is_finite, torch.nan)
        code = self._encode(rows, scale)
        if self.per_byte == 2:
            code = torch.add(code[:, : self.block // 2], code[:, self.block // 2 :], alpha=16)
        # the bits of a NaN differ between devices; a CPU fills rows where a column is true slower than it multiplies
        torch.mul(code, is_finite, out=codes)

    def _decode_blocks(self, heads: Tensor, codes: Tensor, rows: Tensor) -> None:
        """The inverse of `_encode_blocks`: write the values to `rows`."""
        # a clone, because a part of a buffer may be unaligned for fp32
        scale = heads.clone().view(torch.float32)
        if self.per_byte == 2:
            codes = torch.cat([codes & 15, codes >> 4], dim=1)
        self._decode(codes, scale, rows)

    @abstractmethod
    def _scale_(self, absmax: Tensor) -> Tensor:
        """Turn the largest magnitude of each block (blocks, 1) into the block's scale, in place."""
        ...

    @abstractmethod
    def _encode(self, rows: Tensor, scale: Tensor) -> Tensor:
        """The codes (uint8, one a value) of `rows` (blocks, block), in memory of their own; any if the scale is NaN."""
        ...

    @abstractmethod
    def _decode(self, codes: Tensor, scale: Tensor, out: Tensor) -> None:
        """Write the values of `codes` (uint8, one a value) to `out` (blocks, block); may overwrite two codes a byte, unpacked."""
        ...


class Integers(Blocks):
    """Signed integers of `bits` bits, 8 or 4.

    ::

        scale = absmax / top ;  q = round_half_even(x / scale) in -top..top ;  x ~ q scale      top = 2^(bits-1) - 1

    Error: at most scale / 2. The scale is at least 2^-126; a smaller scale would lose some or all of its bits.
    """

    def __init__(self, bits: int, block: int) -> None:
        if bits not in (4, 8):
            raise InputError(f"bits={bits} is not offered for block integers. Use 4 or 8.")
        super().__init__(block, 8 // bits)
        self.top = 2 ** (bits - 1) - 1
        self._limit = _below(_FLOAT.max / self.top)
        self._zero = 8 if bits == 4 else 0  # the code of q = 0; 4-bit codes are 1..15

    def _scale_(self, absmax: Tensor) -> Tensor:
        # The upper limit: absmax / top may be rounded up, and top times this scale could overflow.
        return absmax.div_(exactly(self.top, absmax)).clamp_(_FLOAT.tiny, self._limit)

    def _encode(self, rows: Tensor, scale: Tensor) -> Tensor:
        # From 2^23 on, fp32 numbers are integers: the addition rounds half to even, and leaves the code in the lowest byte.
        rounded = torch.div(rows, scale).add_(1.5 * 2.0**23 + self._zero)
        return rounded.view(torch.int32).to(torch.uint8)

    def _decode(self, codes: Tensor, scale: Tensor, out: Tensor) -> None:
        signed = codes if self.per_byte == 1 else codes.sub_(self._zero)
        torch.mul(signed.view(torch.int8), scale, out=out)


class Float4(Blocks):
    """E3M0: a sign and three exponent bits.

    ::

        x ~ sign(x) absmax v,  v in {0, 2^-6, 2^-5, .., 2^0} nearest to |x| / absmax, the smaller of two nearest

    Error: at most |x| / 3 (half-way between two powers of two); for |x| below absmax 2^-6 at most absmax 2^-7. An absmax
    below 2^-126 counts as 2^-126.
    """

    def __init__(self, block: int) -> None:
        super().__init__(block, 2)

    def _scale_(self, absmax: Tensor) -> Tensor:
        return absmax.clamp_(min=_FLOAT.tiny)

    def _encode(self, rows: Tensor, scale: Tensor) -> Tensor:
        # Round to the nearest power of two: adding just under half of the mantissa's range to the bits of a float carries
        # into the exponent exactly if the mantissa is above 1.5. The byte kept here is the low exponent bits and the first
        # mantissa bit: 240 for 2^-7, 254 for 1.
        bits = torch.div(rows, scale).view(torch.int32).add_(0x3FFFFF).bitwise_right_shift_(22)
        codes = bits.to(torch.uint8).clamp_(min=240).sub_(240)
        # The lowest step, from 0 to 2^-6, has another width: its border is 2^-7, not 1.5 * 2^-7.
        codes = torch.maximum(codes >> 1, codes.clamp(max=1))
        return codes.add_(rows.signbit(), alpha=8)

    def _decode(self, codes: Tensor, scale: Tensor, out: Tensor) -> None:
        # As the exponent of a float, a code c > 0 means 2^(c - 127), and code 0 means 0. E3M0 is this times 2^120. A bf16 number
        # has the same exponents as an fp32 one, in half the memory.
        bits = codes.to(torch.int16)
        # The right shift copies the sign into the free bits; the mask keeps only the sign bit itself.
        bits.bitwise_left_shift_(12).bitwise_right_shift_(5).bitwise_and_(_SIGN_AND_EXPONENT)
        torch.mul(bits.view(torch.bfloat16).mul_(2.0**120), scale, out=out)


def _below(number: float) -> float:
    """The largest fp32 number that is at most `number`."""
    rounded = torch.tensor(number, dtype=torch.float32, device=HOST)
    return (rounded if rounded.item() <= number else torch.nextafter(rounded, -rounded)).item()


def int8(block: int = 256) -> Codec:
    """One byte per value and one fp32 scale per block: 1.016 bytes per value with blocks of 256.

    Error: at most absmax / 254, with the block's absmax; for normal values 0.007 of their standard deviation.

    >>> coder = int8(block=4).coder
    >>> coder.decode(coder.encode(torch.tensor([127.0, -1.4, 63.6, 0.0])), 4)
    tensor([127.,  -1.,  64.,   0.])
    """
    return Plain(Integers(8, block))


def int4(block: int = 256) -> Codec:
    """Half a byte per value and one fp32 scale per block: 0.516 bytes per value with blocks of 256 (DiLoCoX, 2506.21263).

    Error: at most absmax / 14, with the block's absmax; for normal values 0.126 of their standard deviation. Differs from the
    paper, which does not say which values share a scale.

    Args:
        block: number of values that share a scale; even.

    >>> coder = int4(block=4).coder
    >>> coder.decode(coder.encode(torch.tensor([7.0, -1.4, 3.6, 0.0])), 4)
    tensor([ 7., -1.,  4.,  0.])
    """
    return Plain(Integers(4, block))


def fp4(block: int = 64) -> Codec:
    """E3M0, half a byte per value and one fp32 scale per block: 0.5625 bytes per value with blocks of 64 (2501.18512).

    Small values keep their order of magnitude; `int4` keeps large values more exactly. Error for normal values: 0.19 of their
    standard deviation. Source: Streaming DiLoCo, 2501.18512. Differs from the paper, which does not say which values share a
    scale, nor which code is zero.

    Args:
        block: number of values that share a scale; even.

    >>> coder = fp4(block=4).coder
    >>> coder.decode(coder.encode(torch.tensor([8.0, -1.4, 3.6, 0.01])), 4)
    tensor([ 8., -1.,  4.,  0.])
    """
    return Plain(Float4(block))
