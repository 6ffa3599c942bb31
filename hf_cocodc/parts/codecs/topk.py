"""The largest values of each chunk, with their positions; everything else counts as zero."""

import torch
from torch import Tensor

from ...errors import InputError
from .base import Codec, Coder, Plain
from .block import Integers
from .cast import Cast

_PIECE = 1 << 18
"""Values worked on at once, so that the keys they are sorted by stay small beside the message."""

_POSITIONS = 1 << 12
"""Positions are 12-bit numbers."""


class TopK:
    """The `k` largest magnitudes of every `chunk` values, the lower position first where magnitudes are equal.

    The payload is the kept values, chunk after chunk, through a coder whose scale is the chunk's own, then their
    positions in 12 bits each, two in three bytes. A last chunk that is short is filled up with zeros, which are sent
    like values where it has fewer than `k` of its own.

    Between more than two regions the owner of a shard could keep only k of the up to k M entries of its mean, and what
    it drops would be in nobody's residual; keeping k M of them costs as many bytes as sending everybody's payload to
    everybody, and rounds twice. So that is what happens (`gather`): each region sends M - 1 payloads, in one exchange
    instead of two. So does the paper.

    Args:
        k: values kept in a chunk.
        chunk: values in a chunk, at most 4096.
        values: what kept values travel as.
    """

    gather = True

    def __init__(self, k: int, chunk: int, values: Coder) -> None:
        if not 1 <= k <= chunk <= _POSITIONS:
            raise InputError(
                f"k={k} and chunk={chunk}: 1 <= k <= chunk <= {_POSITIONS} must hold, for k positions inside a chunk "
                "are sent with 12 bits each."
            )
        self.block = chunk
        self.k = k
        self.values = values

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8) if out is None else out
        kept, positions = [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)]
        for piece in values.split(max(1, _PIECE // self.block) * self.block):
            missing = -piece.numel() % self.block
            rows = (torch.cat([piece, piece.new_zeros(missing)]) if missing else piece).view(-1, self.block)
            where = self._largest(rows)
            kept.append(rows.gather(1, where).view(-1))
            positions.append(where.view(-1))
        return torch.cat([self.values.encode(torch.cat(kept)), _pack(torch.cat(positions))], out=payload)

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        num_chunks = -(-numel // self.block)
        num_kept = num_chunks * self.k
        head = self.values.num_bytes(num_kept)
        rows = torch.zeros(num_chunks, self.block, dtype=torch.float32)
        positions = _unpack(payload[head:], num_kept).view(num_chunks, self.k)
        kept = payload[:head].clone()  # the payload may begin where no fp32 number can be read
        rows.scatter_(1, positions, self.values.decode(kept, num_kept).view(num_chunks, self.k))
        values = rows.view(-1)[:numel]
        return values if out is None else out.copy_(values)

    def num_bytes(self, numel: int) -> int:
        num_kept = -(-numel // self.block) * self.k
        return self.values.num_bytes(num_kept) + _packed_bytes(num_kept)

    def _largest(self, rows: Tensor) -> Tensor:
        """Positions (chunks, k) of the largest magnitudes, largest first."""
        # Magnitudes compare as the integers in their bits do. With the position as further bits below, no two keys are
        # equal, so that the choice is everywhere the same; a value that is not finite is above all others.
        magnitude = rows.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64)
        from_end = torch.arange(_POSITIONS - 1, _POSITIONS - 1 - self.block, -1)
        keys = magnitude.mul_(_POSITIONS).add_(from_end).topk(self.k, dim=1).values
        return (_POSITIONS - 1) - (keys % _POSITIONS)


def _packed_bytes(count: int) -> int:
    return count + -(-count // 2)


def _pack(numbers: Tensor) -> Tensor:
    """12-bit numbers as bytes: a's low 8 bits; b's low 4 bits and a's high 4; b's high 8 bits."""
    count = numbers.numel()
    if count % 2:
        numbers = torch.cat([numbers, numbers.new_zeros(1)])
    a, b = numbers.view(-1, 2).unbind(1)
    packed = torch.stack([a & 0xFF, (b & 0xF) << 4 | a >> 8, b >> 4], dim=1)
    return packed.to(torch.uint8).view(-1)[: _packed_bytes(count)]


def _unpack(packed: Tensor, count: int) -> Tensor:
    """The `count` 12-bit numbers that `_pack` made bytes of."""
    missing = -packed.numel() % 3
    if missing:
        packed = torch.cat([packed, packed.new_zeros(missing)])
    low, middle, high = packed.view(-1, 3).to(torch.int64).unbind(1)
    return torch.stack([low | (middle & 0xF) << 8, middle >> 4 | high << 4], dim=1).view(-1)[:count]


def topk(k: int = 64, chunk: int = 4096, bits: int = 8) -> Codec:
    """Only the k largest of every `chunk` values (SparseLoCo, 2508.15706).

    ::

        bytes per chunk = 4 + k bits / 8 + 1.5 k       (no 4 with 16 or 32 bits)

    At k = 64 of 4096 and 8 bits 0.040 bytes a value, sent once to each other region. It leaves out most of the outer
    gradient, so it is of use only inside `feedback(topk(), decay=0.95)`, which brings the rest back later.

    Differs from the paper: chunks are runs of the flat fragment, where the paper cuts matrices into blocks of 64 x 64;
    values have 8 bits and the largest of the chunk as their scale, where the paper has 2 bits and a codebook.

    Args:
        k: values kept in a chunk.
        chunk: values in a chunk, at most 4096.
        bits: of a kept value: 4 or 8 (integers with the chunk's scale), 16 (bf16) or 32 (fp32).
    """
    floats = {16: torch.bfloat16, 32: torch.float32}
    values = Cast(floats[bits]) if bits in floats else Integers(bits, k)
    return Plain(TopK(k, chunk, values))
