"""Top-k by tiles: the largest values of each small block of a matrix, in two bits (SparseLoCo)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..fragments import Fragment
from .base import Codec, CodecState, Coder, Conversation, Message, Result, message_bytes
from .topk import TopK

_SIDE = 64
_CHUNK = _SIDE * _SIDE
"""Most values in a tile: a position in it has 12 bits."""

_PER_BYTE = 4
_BOOK_BYTES = 8


class Tiled:
    """A codec that sends a fragment tile by tile (`topk_2bit`), filled up with zeros; a block of the `coder` holds one tile."""

    copies = 2

    def __init__(self, coder: Coder) -> None:
        self.coder = coder

    def init(self, fragment: Fragment) -> CodecState:
        return {}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        count = sum(each.count for each in _grids(fragment))
        chunks = outer_grad.new_zeros(count, self.coder.block)
        for view, grid, part in _parts(fragment, outer_grad, chunks):
            grid.cut(view, part)
        reply = yield Message(chunks.view(-1), self.coder)
        return Result(self._whole(fragment, reply.mean), lambda: self._whole(fragment, reply.own()), state)

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        numel = sum(each.count for each in _grids(fragment)) * self.coder.block
        return message_bytes(self.coder, numel, region, num_regions)

    def _whole(self, fragment: Fragment, chunks: Tensor) -> Tensor:
        """The flat fragment from its tiles."""
        flat = chunks.new_empty(fragment.numel)
        for view, grid, part in _parts(fragment, flat, chunks.view(-1, self.coder.block)):
            grid.join(part, view)
        return flat


class _Grid:
    """How a parameter is cut into tiles; `count` is their number."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._rows, self._cols = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        rows = max(min(self._rows, _SIDE), 1)
        self._wide = max(min(self._cols, _CHUNK // rows), 1)
        self._high = max(min(self._rows, _CHUNK // self._wide), 1)
        self._down, self._across = -(-self._rows // self._high), -(-self._cols // self._wide)
        self.count = self._down * self._across

    def cut(self, values: Tensor, chunks: Tensor) -> None:
        """Write the tiles to the beginning of `chunks` (count, chunk), which hold zeros."""
        for matrix, tiles in self._stripes(values, chunks):
            tiles.copy_(matrix)

    def join(self, chunks: Tensor, values: Tensor) -> None:
        """The inverse of `cut`."""
        for matrix, tiles in self._stripes(values, chunks):
            matrix.copy_(tiles)

    def _stripes(self, values: Tensor, chunks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views (down, high, across, wide) of values and of their places, for whole tiles and for those at the edges."""
        matrix = values.view(self._rows, self._cols)
        grid = chunks.view(self._down, self._across, chunks.shape[1])[:, :, : self._high * self._wide]
        tiles = grid.unflatten(2, (self._high, self._wide)).transpose(1, 2)
        for down, high, top in _edges(self._rows, self._high):
            for across, wide, left in _edges(self._cols, self._wide):
                part = matrix[top : top + down * high, left : left + across * wide]
                first, second = top // self._high, left // self._wide
                place = tiles[first : first + down, :high, second : second + across, :wide]
                yield part.unflatten(1, (across, wide)).unflatten(0, (down, high)), place


def _edges(length: int, side: int) -> list[tuple[int, int, int]]:
    """(number of tiles, their side, where they begin): the whole ones, and the one at the edge."""
    whole, rest = divmod(length, side)
    return [each for each in ((whole, side, 0), (1, rest, whole * side)) if each[0] and each[1]]


def _grids(fragment: Fragment) -> list[_Grid]:
    return [_Grid(shape) for shape in fragment.shapes]


def _parts(fragment: Fragment, flat: Tensor, chunks: Tensor) -> Iterator[tuple[Tensor, _Grid, Tensor]]:
    """Each parameter of a flat tensor, its grid, and its chunks."""
    grids = _grids(fragment)
    return zip(fragment.views(flat), grids, chunks.split([each.count for each in grids]), strict=True)


def topk_2bit(k: int = 64) -> Codec:
    """The k largest of each tile of a matrix: their positions in 12 bits, their values in 2 (SparseLoCo, 2508.15706).

    ::

        bytes per tile = 1.5 k + k / 4 + 8          (k a multiple of 4)

    A tile is 64 x 64 values of a matrix, or 4096 neighboring values of a vector; a matrix that is narrower has tiles that are
    longer, of at most 4096 values. With k = 64 this is 0.029 bytes per value, sent once to each other region; a tile at an edge
    costs as much as a whole one. Most of the outer gradient is lost: use it only inside `feedback(topk_2bit(), decay=0.95)`,
    which sends the rest later.

    Differs from the paper: its tiles divide a matrix evenly, ours are smaller at its edges. It says that two bits have a
    codebook for each chunk, not which (authors' code: bins of 1.5 standard deviations); ours is `Codebook`. In a sharded model
    tiles are of this rank's shard.

    Args:
        k: number of values kept per tile, at most 4096.

    >>> fragment = Fragment(0, ("matrix", "vector"), ((128, 70), (300,)), 128 * 70 + 300)
    >>> topk_2bit().wire_bytes(fragment, region=0, num_regions=2)  # 2 x 2 tiles, and one
    600
    """
    return Tiled(TopK(k, _CHUNK, Codebook(k)))


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
