"""Few bits a value, and one fp32 scale for each block of neighbouring values.

Encoding and decoding are element-wise but for the largest magnitude of a block, which is exact in any order of
evaluation: every machine finds the same bytes, and the same values in them. A block in which a value is not finite
decodes to NaN as a whole, so that it cannot pass for large numbers; every other block stays finite.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from ...errors import InputError
from ...tensors.pieces import UNSHARED
from .base import Codec, Plain

_GROUP = 1 << 18
"""Values worked on at once, at most: they and what lies between them and their bytes stay in the cache."""

_FLOAT = torch.finfo(torch.float32)

_SIGN_AND_EXPONENT = 0x83800000 - (1 << 32)
"""Of an fp32 number's bits as an int32: the sign and the lowest three of the exponent."""
_BYTES = {n: torch.tensor(n, dtype=torch.uint8) for n in (1, 4, 8, 15, 240)}
_INTS = {n: torch.tensor(n, dtype=torch.int32) for n in (5, 22, 28, 0x3FFFFF, _SIGN_AND_EXPONENT)}
"""Numbers as torch wants them: it would make a tensor of each at every step, for as long as the step takes."""


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
        heads, codes, short = self._parts(payload, numel)
        whole = numel - numel % self.block
        self._encode_blocks(values[:whole].view(-1, self.block), heads[: len(codes)], codes)
        if whole < numel:
            last, full = values.new_zeros(1, self.block), codes.new_empty(1, self.block // self.per_byte)
            last[0, : numel - whole] = values[whole:]
            self._encode_blocks(last, heads[-1:], full)
            short.copy_(full[0, : len(short)])
        return payload

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        values = torch.empty(numel, dtype=torch.float32) if out is None else out
        heads, codes, short = self._parts(payload, numel)
        whole = numel - numel % self.block
        self._decode_blocks(heads[: len(codes)], codes, values[:whole].view(-1, self.block))
        if whole < numel:
            last, full = values.new_empty(1, self.block), codes.new_zeros(1, self.block // self.per_byte)
            full[0, : len(short)] = short
            self._decode_blocks(heads[-1:], full, last)
            values[whole:] = last[0, : numel - whole]
        return values

    def num_bytes(self, numel: int) -> int:
        full, rest = divmod(numel, self.block)
        width = self.block // self.per_byte
        return 4 * (full + (rest > 0)) + full * width + min(rest, width)

    def _steps(self) -> tuple[int, int]:
        """Blocks whose scales are found at once, and blocks for each step of the rest.

        A step on many costs little more than one on few. But it has to stay in this thread, however many torch has: the
        others are training, and waiting for them at every step takes many times longer than doing their share.
        """
        unshared = max(1, UNSHARED // self.block)
        group = unshared * max(1, _GROUP // (unshared * self.block))
        return group, group if torch.get_num_threads() == 1 else unshared

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes of all scales (blocks, 4), of whole blocks' codes (blocks, block / per_byte), and of a short block's."""
        width = self.block // self.per_byte
        head, full = 4 * -(-numel // self.block), numel // self.block * width
        heads, codes, short = payload.split([head, full, len(payload) - head - full])
        return heads.view(-1, 4), codes.view(-1, width), short

    def _encode_blocks(self, rows: Tensor, heads: Tensor, codes: Tensor) -> None:
        """Write the scales' bytes (blocks, 4) and the codes (blocks, block / per_byte) of values (blocks, block)."""
        many, few = self._steps()
        scratch = _Scratch(min(few, len(rows)), self.block)
        for group, head, code in _cut(many, rows, heads, codes):
            scale = torch.empty(len(group), 1, dtype=torch.float32)
            for piece, absmax in _cut(few, group, scale):
                torch.amax(torch.abs(piece, out=scratch.of(piece).floats), dim=1, keepdim=True, out=absmax)
            not_finite = ~(scale < torch.inf)
            self._scale_(scale).masked_fill_(not_finite, torch.nan)
            head.copy_(scale.view(torch.uint8))
            for piece, unit, out in _cut(few, group, scale, code):
                self._encode(piece, unit, scratch.of(piece), out)

    def _decode_blocks(self, heads: Tensor, codes: Tensor, rows: Tensor) -> None:
        """The way back: write the values."""
        many, few = self._steps()
        scratch = _Scratch(min(few, len(rows)), self.block)
        for head, code, group in _cut(many, heads, codes, rows):
            # a part of a buffer may begin where no fp32 number can be read: hence the clone
            scale = head.clone().view(torch.float32)
            for piece, unit, out in _cut(few, code, scale, group):
                self._decode(piece, unit, scratch.of(out), out)

    @abstractmethod
    def _scale_(self, absmax: Tensor) -> Tensor:
        """Turn the blocks' largest magnitudes (blocks, 1) into what their codes are in units of, in place."""
        ...

    @abstractmethod
    def _encode(self, rows: Tensor, scale: Tensor, scratch: "_Scratch", out: Tensor) -> None:
        """Write bytes (blocks, block / per_byte) for values (blocks, block)."""
        ...

    @abstractmethod
    def _decode(self, codes: Tensor, scale: Tensor, scratch: "_Scratch", out: Tensor) -> None:
        """Write values (blocks, block) for bytes (blocks, block / per_byte)."""
        ...


class _Scratch:
    """Memory for what lies between values and bytes, used piece after piece: new memory costs more than work in it.

    Attributes:
        floats, ints: the same memory as fp32 and as int32 (blocks, block).
        codes: a byte a value (blocks, block).
        spare: another.
    """

    def __init__(self, num_blocks: int, block: int) -> None:
        self.floats = torch.empty(num_blocks, block, dtype=torch.float32)
        self.ints = self.floats.view(torch.int32)
        self.codes, self.spare = torch.empty(2, num_blocks, block, dtype=torch.uint8)
        self._low, self._high = self.codes[:, : block // 2], self.codes[:, block // 2 :]

    def of(self, rows: Tensor) -> "_Scratch":
        """Scratch for as many blocks as `rows` are: this one, but where a piece is the last."""
        return self if len(rows) == len(self.codes) else _Scratch(*rows.shape)

    def pack(self, out: Tensor) -> None:
        """Write the codes, two in a byte."""
        torch.add(self._low, self._high, alpha=16, out=out)

    def unpack(self, packed: Tensor) -> Tensor:
        """The codes again."""
        torch.bitwise_and(packed, _BYTES[15], out=self._low)
        torch.bitwise_right_shift(packed, _BYTES[4], out=self._high)
        return self.codes


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
        zero = 8 if bits == 4 else 0  # the code of 0: four bits hold 1..15
        # From 2^23 on fp32 holds nothing but integers: adding this number rounds half to even, and leaves the code in
        # the lowest byte. (torch's `round` is shared out to other threads however small the piece is.)
        self._rounder = torch.tensor(1.5 * 2.0**23 + zero, dtype=torch.float32)
        self._zero = torch.tensor(zero, dtype=torch.float32)

    def _scale_(self, absmax: Tensor) -> Tensor:
        # absmax / top may be rounded up, and top times it may then overflow: hence the upper limit
        return absmax.div_(self.top).clamp_(_FLOAT.tiny, self._limit)

    def _encode(self, rows: Tensor, scale: Tensor, scratch: _Scratch, out: Tensor) -> None:
        torch.div(rows, scale, out=scratch.floats).add_(self._rounder)
        if self.per_byte == 1:
            out.copy_(scratch.ints)
        else:
            scratch.codes.copy_(scratch.ints)
            scratch.pack(out)

    def _decode(self, codes: Tensor, scale: Tensor, scratch: _Scratch, out: Tensor) -> None:
        if self.per_byte == 1:
            out.copy_(codes.view(torch.int8)).mul_(scale)
        else:
            out.copy_(scratch.unpack(codes)).sub_(self._zero).mul_(scale)


class Float4(Blocks):
    """E3M0: a sign and three exponent bits.

    ::

        x ~ sign(x) absmax v,  v in {0, 2^-6, 2^-5, .., 2^0} nearest to |x| / absmax, a tie to the smaller

    Error: at most a third of |x| (half-way between two powers of two), below absmax 2^-6 at most absmax 2^-7; absmax
    counts as 2^-126 where it is smaller.
    """

    def __init__(self, block: int) -> None:
        super().__init__(block, 2)

    def _scale_(self, absmax: Tensor) -> Tensor:
        return absmax.clamp_(min=_FLOAT.tiny)

    def _encode(self, rows: Tensor, scale: Tensor, scratch: _Scratch, out: Tensor) -> None:
        floats, ints, codes, spare = scratch.floats, scratch.ints, scratch.codes, scratch.spare
        torch.div(rows, scale, out=floats)
        # In the bits of a float, adding just under half of the mantissa's range carries into the exponent exactly where
        # the mantissa is above 1.5: that rounds to the nearest power of two, in value. What is kept is a byte of the
        # exponent and the mantissa's first bit: 240 for 2^-7, 254 for 1.
        codes.copy_(ints.add_(_INTS[0x3FFFFF]).bitwise_right_shift_(_INTS[22]))
        torch.maximum(codes, _BYTES[240], out=codes).sub_(_BYTES[240])
        # The lowest step, 0 to 2^-6, is of another width: its border is 2^-7, not 1.5 times 2^-7.
        torch.minimum(codes, _BYTES[1], out=spare)
        torch.maximum(codes.bitwise_right_shift_(_BYTES[1]), spare, out=codes)
        spare.copy_(torch.bitwise_right_shift(rows.view(torch.int32), _INTS[28], out=ints))
        codes.add_(spare.bitwise_and_(_BYTES[8]))
        scratch.pack(out)

    def _decode(self, codes: Tensor, scale: Tensor, scratch: _Scratch, out: Tensor) -> None:
        # As the exponent of a float, code c > 0 reads 2^(c - 127) and code 0 reads 0: as E3M0 does, but for 2^120.
        bits = out.view(torch.int32).copy_(scratch.unpack(codes))
        # the second shift fills up with the sign, which the mask then leaves only where it belongs
        bits.bitwise_left_shift_(_INTS[28]).bitwise_right_shift_(_INTS[5]).bitwise_and_(
            _INTS[_SIGN_AND_EXPONENT]
        )
        out.mul_(2.0**120).mul_(scale)


def _cut(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equal length, `size` rows of each at a time."""
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


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
