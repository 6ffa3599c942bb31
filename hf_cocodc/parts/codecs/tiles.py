"""Top-k by tiles: the largest values of each small block of a matrix, in two bits (SparseLoCo)."""

import math
from collections.abc import Iterator

from torch import Tensor

from ..fragments import Fragment
from .base import Codec, CodecState, Coder, Conversation, Message, Result, message_bytes
from .codebook import Codebook
from .topk import TopK

_SIDE = 64
_CHUNK = _SIDE * _SIDE
"""Most values in a tile: a position in it has 12 bits."""


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
