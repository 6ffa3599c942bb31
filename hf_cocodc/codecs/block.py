"""Few bits a value, and one fp32 scale for each block of neighbouring values.

Encoding and decoding are element-wise but for the largest magnitude of a block, which is exact in any order of
evaluation: every machine finds the same bytes, and the same values in them. A block in which a value is not finite
decodes to NaN as a whole, so that it cannot pass for large numbers; every other block stays finite.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..errors import InputError
from .base import Codec, Plain

_PIECE = 1 << 18
"""Values worked on at once: the intermediate tensors stay in the cache, and small beside the payload."""

_FLOAT = torch.finfo(torch.float32)


class Blocks(ABC):
    """A payload of one fp32 scale a block, then the blocks' codes; the coders below say what a code is.

    A last block that is short is filled up with zeros; codes that would stand only for filling are not sent.

    Args:
        block: values that share a scale.
        per_byte: codes in a byte, 1 or 2. Byte i of a block holds value i in its low half and value i + block / 2 in
            its high half: both are then read and written as runs of neighbours, never value by value.
    """

    def __init__(self, block: int, per_byte: int) -> None:
        if block < 1 or block % per_byte:
            raise InputError(
                f"block={block} must be a positive multiple of {per_byte}, the number of values packed into one "
                "byte. Use 64 or 256."
            )
        self.block = block
        self.per_byte = per_byte

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        numel = values.numel()
        payload = torch.empty(self.num_bytes(numel), dtype=torch.uint8) if out is None else out
        scales, codes = self._parts(payload, numel)
        width = self.block // self.per_byte
        for first, piece in enumerate(values.split(self._piece)):
            rows = self._rows(piece)
            scale = self._scale(rows.abs().amax(dim=1, keepdim=True))
            start = first * self._piece // self.block
            scales[4 * start : 4 * (start + len(rows))] = scale.view(-1).view(torch.uint8)
            part = codes[start * width : (start + len(rows)) * width]  # shorter where the last block is
            part.copy_(self._codes(rows, scale).view(-1)[: part.numel()])
        return payload

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        values = torch.empty(numel, dtype=torch.float32) if out is None else out
        scales, codes = self._parts(payload, numel)
        width = self.block // self.per_byte
        for first, piece in enumerate(values.split(self._piece)):
            start = first * self._piece // self.block
            num_rows = -(-piece.numel() // self.block)
            got = codes[start * width : (start + num_rows) * width]
            if got.numel() < num_rows * width:
                got = torch.cat([got, got.new_zeros(num_rows * width - got.numel())])
            # a part of a buffer may begin where no fp32 number can be read: hence the clone
            scale = scales[4 * start : 4 * (start + num_rows)].clone().view(torch.float32)
            rows = self._values(got.view(num_rows, width), scale[:, None])
            piece.copy_(rows.view(-1)[: piece.numel()])
        return values

    def num_bytes(self, numel: int) -> int:
        full, rest = divmod(numel, self.block)
        width = self.block // self.per_byte
        return 4 * (full + (rest > 0)) + full * width + min(rest, width)

    @property
    def _piece(self) -> int:
        return max(1, _PIECE // self.block) * self.block

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Bytes of the scales and of the codes, as views of the payload."""
        head = 4 * -(-numel // self.block)
        return payload[:head], payload[head:]

    def _rows(self, piece: Tensor) -> Tensor:
        """The values, one block a row, with zeros behind a short last one."""
        missing = -piece.numel() % self.block
        return (torch.cat([piece, piece.new_zeros(missing)]) if missing else piece).view(-1, self.block)

    @abstractmethod
    def _scale(self, absmax: Tensor) -> Tensor:
        """What codes are in units of (blocks, 1), from the blocks' largest magnitudes."""
        ...

    @abstractmethod
    def _codes(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Bytes (blocks, block / per_byte) for values (blocks, block)."""
        ...

    @abstractmethod
    def _values(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Values (blocks, block) for bytes (blocks, block / per_byte)."""
        ...


class Integers(Blocks):
    """Signed integers of `bits` bits, 8 or 4.

    ::

        scale = absmax / top ;  q = round_half_even(x / scale) in -top..top ;  x ~ q scale      top = 2^(bits-1) - 1

    Error: at most scale / 2, where the scale is at least 2^-126 (a smaller one would lose bits, or all of them).
    """

    def __init__(self, bits: int, block: int) -> None:
        if bits not in (4, 8):
            raise InputError(f"bits={bits} is not offered for block integers. Use 4 or 8.")
        super().__init__(block, 8 // bits)
        self.top = 2 ** (bits - 1) - 1
        self._limit = _below(_FLOAT.max / self.top)

    def _scale(self, absmax: Tensor) -> Tensor:
        # absmax / top may be rounded up, and top times it may then overflow: hence the upper limit
        scale = (absmax / self.top).clamp_(_FLOAT.tiny, self._limit)
        return torch.where(absmax.isfinite(), scale, torch.nan)

    def _codes(self, rows: Tensor, scale: Tensor) -> Tensor:
        q = (rows / scale).round_()
        if self.per_byte == 1:
            return q.to(torch.int8).view(torch.uint8)
        low, high = q.chunk(2, dim=1)
        return torch.add(low, high, alpha=16).add_(8 + 16 * 8).to(torch.uint8)  # 4 bits hold q + 8, 1..15

    def _values(self, codes: Tensor, scale: Tensor) -> Tensor:
        if self.per_byte == 1:
            return codes.view(torch.int8) * scale
        q = torch.cat([codes & 15, codes >> 4], dim=1).to(torch.float32)
        return q.sub_(8).mul_(scale)


class Float4(Blocks):
    """E3M0: a sign and three exponent bits.

    ::

        x ~ sign(x) absmax v,  v in {0, 2^-6, 2^-5, .., 2^0} nearest to |x| / absmax, a tie to the smaller

    Error: at most a third of |x| (half-way between two powers of two), below absmax 2^-6 at most absmax 2^-7; absmax
    counts as 2^-126 where it is smaller.
    """

    def __init__(self, block: int) -> None:
        super().__init__(block, 2)

    def _scale(self, absmax: Tensor) -> Tensor:
        return torch.where(absmax.isfinite(), absmax.clamp(min=_FLOAT.tiny), torch.nan)

    def _codes(self, rows: Tensor, scale: Tensor) -> Tensor:
        ratio = (rows / scale).abs_()
        # In the bits of a float, adding just under half of the mantissa's range carries into the exponent exactly where
        # the mantissa is above 1.5: that rounds to the nearest power of two, in value.
        code = ratio.view(torch.int32).add(0x3FFFFF).bitwise_right_shift_(23).sub_(120).clamp_(0, 7)
        # The lowest step, 0 to 2^-6, is of another width: its border is 2^-7, not 1.5 times 2^-7.
        code = torch.maximum(code, (ratio > 2.0**-7).to(torch.int32))
        code.add_(rows.signbit().to(torch.int32), alpha=8)
        low, high = code.chunk(2, dim=1)
        return torch.add(low, high, alpha=16).to(torch.uint8)

    def _values(self, codes: Tensor, scale: Tensor) -> Tensor:
        code = torch.cat([codes & 15, codes >> 4], dim=1).to(torch.int32)
        # As the exponent of a float, code c > 0 reads 2^(c - 127) and code 0 reads 0: as E3M0 does, but for 2^120.
        bits = ((code & 7) << 23).bitwise_or_((code & 8) << 28)
        return bits.view(torch.float32).mul_(2.0**120).mul_(scale)


def _below(number: float) -> float:
    """The largest fp32 number that is not above `number`."""
    rounded = torch.tensor(number, dtype=torch.float32)
    return (rounded if rounded.item() <= number else torch.nextafter(rounded, -rounded)).item()


def int8(block: int = 256) -> Codec:
    """A byte a value and an fp32 scale a block: 1.016 bytes a value at 256.

    Error: at most absmax / 254 of the block; 0.007 of the standard deviation of normal values.

    Args:
        block: values that share a scale.
    """
    return Plain(Integers(8, block))


def int4(block: int = 256) -> Codec:
    """Half a byte a value and an fp32 scale a block: 0.516 bytes a value at 256 (DiLoCoX, 2506.21263).

    Error: at most absmax / 14 of the block; 0.126 of the standard deviation of normal values.
    Differs from the paper: it does not say what shares a scale.

    Args:
        block: values that share a scale; even.
    """
    return Plain(Integers(4, block))


def fp4(block: int = 64) -> Codec:
    """E3M0, half a byte a value and an fp32 scale a block: 0.5625 bytes a value at 64 (Streaming DiLoCo, 2501.18512).

    Keeps the order of magnitude of small values, where `int4` keeps large ones better: 0.19 of the standard deviation
    of normal values. Differs from the paper: it does not say what shares a scale, nor which code is zero.

    Args:
        block: values that share a scale; even.
    """
    return Plain(Float4(block))
