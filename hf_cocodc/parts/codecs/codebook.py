"""Two bits a value: its sign, and which of its block's two magnitudes stands for it."""

import torch
from torch import Tensor

_PER_BYTE = 4
_BOOK_BYTES = 8


class Codebook:
    """Two bits per value, and a codebook of two fp32 magnitudes per block.

    ::

        border = mean |x| ;  a = mean of the |x| up to the border ;  b = mean of the others ;  x ~ sign(x) a or sign(x) b

    The payload is first one codebook per block, then the codes, four in a byte: bit 0 of a code is set for x < 0, bit 1 for b.
    Error for the 64 largest of 4096 normal values: 0.067 of their norm. A value that is not finite takes its block with it.

    Args:
        block: number of values that share a codebook.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8) if out is None else out
        books, codes = zip(*map(_encode, self._rows(values)), strict=True)
        return torch.cat([*books, *codes], out=payload)

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        values = torch.empty(numel, dtype=torch.float32) if out is None else out
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
        """Views of the whole blocks (blocks, block), and of a short last one (1, rest) if there is one."""
        whole = values.numel() - values.numel() % self.block
        full, rest = values.tensor_split([whole])
        return [full.view(-1, self.block), *([rest.view(1, -1)] if rest.numel() else [])]


def _encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The codebooks and the codes of `rows` (blocks, block), as bytes."""
    size = rows.abs()
    is_large = size > size.mean(1, keepdim=True)
    count = is_large.sum(1, keepdim=True)
    # divided before they are summed: the sum of large values may overflow
    small = (size / (rows.shape[1] - count).clamp(min=1)).masked_fill(is_large, 0).sum(1)
    large = (size / count.clamp(min=1)).masked_fill(~is_large, 0).sum(1)
    codes = torch.nn.functional.pad((rows < 0) + 2 * is_large, (0, -rows.shape[1] % _PER_BYTE))
    quads = codes.to(torch.uint8).view(-1, _PER_BYTE)
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return torch.stack([small, large], 1).view(-1).view(torch.uint8), packed


def _decode(books: Tensor, codes: Tensor, out: Tensor) -> None:
    """The inverse of `_encode`: write the values to `out` (blocks, block)."""
    quads = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    codes = quads.view(len(codes), 4 * codes.shape[1])[:, : out.shape[1]]
    size = books.gather(1, (codes >> 1).long())
    out.copy_(torch.where((codes & 1).bool(), -size, size))
