"""Top-k: the largest values of each chunk with their positions. All other values count as zero."""

import torch
from torch import Tensor

from ...errors import InputError
from ..tensors.slices import longest
from .base import Codec, Coder, Plain
from .block import Integers
from .cast import Cast

_POSITIONS = 1 << 12
"""Number of positions in a chunk: a position has 12 bits."""


class TopK:
    """Keeps the `k` largest magnitudes of every `chunk` values, at most 4096. Of equal magnitudes, the lower position wins.

    The payload is first the kept values of all chunks, through a coder with one scale per chunk; then their positions, 12 bits
    each, two positions in three bytes. Zeros fill up a short last chunk, and are sent if it has fewer than `k` values.

    `gather` is True: with more than two regions, each region sends its payload to the M - 1 others, as in the paper. With
    scattered shards, the mean of a shard has up to k M entries. To keep only k of them would lose values that no residual
    contains. To keep all k M costs as many bytes as `gather`, but needs two exchanges instead of one and rounds twice.
    """

    gather = True

    def __init__(self, k: int, chunk: int, values: Coder) -> None:
        if not 1 <= k <= chunk <= _POSITIONS:
            raise InputError(
                f"k={k} and chunk={chunk}: 1 <= k <= chunk <= {_POSITIONS} must hold, because each position "
                "inside a chunk is sent in 12 bits."
            )
        self.block = chunk
        self.k = k
        self.values = values

    def encode(self, values: Tensor) -> Tensor:
        kept, positions = [values.new_zeros(0)], [values.new_zeros(0, dtype=torch.int64)]
        for part in values.split(max(1, longest(values.device) // self.block) * self.block):
            missing = -part.numel() % self.block
            rows = (torch.cat([part, part.new_zeros(missing)]) if missing else part).view(-1, self.block)
            where = self._largest(rows)
            kept.append(rows.gather(1, where).view(-1))
            positions.append(where.view(-1))
        return torch.cat([self.values.encode(torch.cat(kept)), _pack(torch.cat(positions))])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        num_chunks = -(-numel // self.block)
        num_kept = num_chunks * self.k
        head = self.values.num_bytes(num_kept)
        rows = torch.zeros(num_chunks, self.block, dtype=torch.float32, device=payload.device)
        positions = _unpack(payload[head:], num_kept).view(num_chunks, self.k)
        kept = payload[:head].clone()  # a copy, because the payload may be unaligned for fp32
        rows.scatter_(1, positions, self.values.decode(kept, num_kept).view(num_chunks, self.k))
        return rows.view(-1)[:numel]

    def num_bytes(self, numel: int) -> int:
        num_kept = -(-numel // self.block) * self.k
        return self.values.num_bytes(num_kept) + _packed_bytes(num_kept)

    def _largest(self, rows: Tensor) -> Tensor:
        """Positions (chunks, k) of the largest magnitudes, largest first."""
        # The bits of magnitudes, read as integers, have the order of the magnitudes; non-finite values are the largest.
        # The position fills the low bits of the key. No two keys are equal, and every machine chooses the same values.
        magnitude = rows.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64)
        from_end = torch.arange(_POSITIONS - 1, _POSITIONS - 1 - self.block, -1, device=rows.device)
        keys = magnitude.mul_(_POSITIONS).add_(from_end).topk(self.k, dim=1).values
        return (_POSITIONS - 1) - (keys % _POSITIONS)


def _packed_bytes(count: int) -> int:
    return count + -(-count // 2)


def _pack(numbers: Tensor) -> Tensor:
    """Pack pairs (a, b) of 12-bit numbers into 3 bytes: low 8 bits of a; low 4 bits of b, high 4 of a; high 8 bits of b."""
    count = numbers.numel()
    if count % 2:
        numbers = torch.cat([numbers, numbers.new_zeros(1)])
    a, b = numbers.view(-1, 2).unbind(1)
    packed = torch.stack([a & 0xFF, (b & 0xF) << 4 | a >> 8, b >> 4], dim=1)
    return packed.to(torch.uint8).view(-1)[: _packed_bytes(count)]


def _unpack(packed: Tensor, count: int) -> Tensor:
    """The inverse of `_pack`, for `count` numbers."""
    missing = -packed.numel() % 3
    if missing:
        packed = torch.cat([packed, packed.new_zeros(missing)])
    low, middle, high = packed.view(-1, 3).to(torch.int64).unbind(1)
    return torch.stack([low | (middle & 0xF) << 8, middle >> 4 | high << 4], dim=1).view(-1)[:count]


def topk(k: int = 64, chunk: int = 4096, bits: int = 8) -> Codec:
    """Send only the k largest of every `chunk` values (SparseLoCo, 2508.15706).

    ::

        bytes per chunk = 4 + k bits / 8 + 1.5 k       (without the 4 if bits is 16 or 32)

    With k = 64 of 4096 values and 8 bits, this is 0.040 bytes per value, sent once to each other region. Most of the outer
    gradient is lost: use topk only inside `feedback(topk(), decay=0.95)`, which sends the rest later.

    Differs from the paper (`topk_2bit` is nearer to it): a chunk is a run of values of the flat fragment; in the paper it is a
    64 x 64 block of a matrix. Values have 8 bits and the largest magnitude of the chunk as scale; in the paper they have 2 bits
    and a codebook.

    Args:
        chunk: number of values per chunk, at most 4096.
        bits: bits of a kept value: 4 or 8 (integers with the chunk's scale), 16 (bf16) or 32 (fp32).

    >>> coder = topk(k=1, chunk=4, bits=32).coder
    >>> coder.decode(coder.encode(torch.tensor([1.0, -3.0, 2.0, 0.0])), 4)
    tensor([ 0., -3.,  0.,  0.])
    """
    floats = {16: torch.bfloat16, 32: torch.float32}
    values = Cast(floats[bits]) if bits in floats else Integers(bits, k)
    return Plain(TopK(k, chunk, values))
