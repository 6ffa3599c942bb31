"""Two bits a value: a sign, and one of two magnitudes that a codebook has for each block of neighboring values."""

import torch
from torch import Tensor

from ..tensors.slices import longest
from .base import Codec, Plain

_PER_BYTE = 4
_BOOK_BYTES = 8


class Codebook:
    """Two bits per value, and a codebook of two fp32 magnitudes per block.

    ::

        border = mean |x| ;  a = mean of the |x| up to the border ;  b = mean of the others ;  x ~ sign(x) a or sign(x) b

    The payload is first one codebook per block, then the codes, four in a byte: bit 0 of a code is set for x < 0, bit 1 for b.
    Error for the 64 largest of 4096 normal values: 0.067 of their norm. A value that is not finite takes its block with it.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def encode(self, values: Tensor) -> Tensor:
        books, codes = zip(*map(_encode, self._rows(values)), strict=True)
        return torch.cat([*books, *codes])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        head = -(-numel // self.block) * _BOOK_BYTES
        books = payload[:head].clone().view(torch.float32).view(-1, 2)  # cloned, because it may be unaligned
        codes = payload[head:]
        for rows in self._rows(values):
            width = -(-rows.shape[1] // _PER_BYTE)
            book, books = books.tensor_split([len(rows)])
            code, codes = codes.tensor_split([len(rows) * width])
            _decode(book, code.view(len(rows), width), rows)
        return values

    def num_bytes(self, numel: int) -> int:
        full, rest = divmod(numel, self.block)
        width = -(-self.block // _PER_BYTE)
        return _BOOK_BYTES * (full + (rest > 0)) + full * width + -(-rest // _PER_BYTE)

    def _rows(self, values: Tensor) -> list[Tensor]:
        """Views of the whole blocks (blocks, block), slice by slice, and of a short last one (1, rest) if there is one."""
        whole = values.numel() - values.numel() % self.block
        full, rest = values.tensor_split([whole])
        slices = full.view(-1, self.block).split(max(1, longest(values.device) // self.block))
        return [*slices, *([rest.view(1, -1)] if rest.numel() else [])]


def _encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The codebooks and the codes of `rows` (blocks, block), as bytes."""
    size = rows.abs()
    is_large = size > size.mean(1, keepdim=True)
    count = is_large.sum(1, keepdim=True)
    # divided before they are summed: the sum of large values may overflow
    small = (size / (rows.shape[1] - count).clamp(min=1)).masked_fill(is_large, 0).sum(1)
    large = (size / count.clamp(min=1)).masked_fill(~is_large, 0).sum(1)
    codes = is_large.to(torch.uint8).mul_(2).add_(rows < 0)
    quads = torch.nn.functional.pad(codes, (0, -rows.shape[1] % _PER_BYTE)).view(-1, _PER_BYTE)
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return torch.stack([small, large], 1).view(-1).view(torch.uint8), packed


def _decode(books: Tensor, codes: Tensor, out: Tensor) -> None:
    """The inverse of `_encode`: write the values to `out` (blocks, block)."""
    quads = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    codes = quads.view(len(codes), 4 * codes.shape[1])[:, : out.shape[1]]
    size = books.gather(1, (codes >> 1).long())
    out.copy_(torch.where((codes & 1).bool(), -size, size))


def codebook_2bit(block: int = 256) -> Codec:
    """Two bits per value, and two fp32 magnitudes per block: 0.281 bytes per value with blocks of 256 (MuLoCo, 2505.23725).

    `Codebook` has the equations. Error for normal values: 0.35 of their standard deviation. Inside
    `feedback(codebook_2bit(), decay=0.9)` what is lost is sent later.

    Differs from the paper, which says two bits and a statistical codebook. Its authors' code has one codebook for a tensor or for
    a row of it, of four bins of 1.5 standard deviations around the mean, each with the mean of what is in it.

    >>> coder = codebook_2bit(block=4).coder
    >>> coder.decode(coder.encode(torch.tensor([7.0, -1.5, 5.0, 0.5])), 4)
    tensor([ 6., -1.,  6.,  1.])
    """
    return Plain(Codebook(block))
