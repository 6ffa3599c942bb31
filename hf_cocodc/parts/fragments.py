"""Which parameters travel together.

A fragment is a flat fp32 vector with a layout. A pattern is a function that splits a model into fragments. The fragments
cover every value of every trainable parameter exactly once: a tied weight is placed once, a frozen parameter nowhere.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from .blocks import Block, find_blocks
from .tensors.flat import local_shard, split_views
from .tensors.memory import HOST

EVEN = 1.1
"""With `split_rows`, what is outside the blocks makes no fragment larger than this multiple of the mean fragment."""


@dataclass(frozen=True)
class Fragment:
    """Parameters, or pieces of parameters, that are sent and landed together.

    Attributes:
        index: position among the model's fragments.
        names: parameter names, in the order of the flat vector.
        shapes: of each parameter or piece; in a sharded model, of what this rank's shard holds of it.
        numel: length of the flat vector.
        rows: of each piece, by its position in `names`: the first row and the one after the last, in this rank's shard.
        outside: positions in `names` of the parameters outside the model's blocks; none if it has no blocks.
    """

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numel: int
    rows: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    outside: frozenset[int] = field(default=frozenset(), repr=False, compare=False)

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view of the 1-D `flat` (length `numel`) for each parameter or piece."""
        return split_views(flat, self.shapes)

    def views_of(self, shards: Mapping[str, Tensor]) -> list[Tensor]:
        """One view of the model's own tensors for each parameter or piece. `shards`: what this rank holds, by name."""
        return [
            shards[name][slice(*self.rows[i])] if i in self.rows else shards[name]
            for i, name in enumerate(self.names)
        ]


Pattern = Callable[[nn.Module], tuple[Fragment, ...]]


def whole() -> Pattern:
    """The whole model is one fragment (DiLoCo, 2311.08105).

    >>> model = nn.Linear(2, 1)
    >>> whole()(model)
    (Fragment(index=0, names=('weight', 'bias'), shapes=((1, 2), (1,)), numel=3, rows={}),)
    """
    return lambda model: _build(model, [[_Piece(name) for name in _trainable(model)]])


def strided(num_fragments: int, split_rows: bool = False) -> Pattern:
    """Fragment f holds the blocks f, f + P, f + 2P, ... (Streaming DiLoCo, 2501.18512; its default).

    If blocks differ in size, P neighboring blocks still go to P different fragments, but the largest goes to the fragment that
    is smallest so far. Otherwise a model with experts in every second layer would have all of them in every second fragment.

    Args:
        split_rows: whether large parameters outside the blocks are split by rows over the fragments; else they make one larger.

    >>> model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])
    >>> [fragment.names for fragment in strided(2)(model)]
    [('0.weight', '2.weight'), ('1.weight', '3.weight')]
    >>> model = nn.ModuleDict({"embed": nn.Embedding(8, 1), "blocks": model})
    >>> [(fragment.numel, fragment.rows) for fragment in strided(2, split_rows=True)(model)]
    [(6, {0: (0, 4)}), (6, {0: (4, 8)})]
    """

    def deal(sizes: Sequence[int]) -> list[int]:
        placed = [0] * len(sizes)
        totals = [0] * num_fragments
        for start in range(0, len(sizes), num_fragments):
            stride = range(start, min(start + num_fragments, len(sizes)))
            uneven = len(set(totals)) > 1
            blocks = sorted(stride, key=lambda block: -sizes[block]) if uneven else stride
            fragments = sorted(range(num_fragments), key=totals.__getitem__)  # ties stay in order
            for block, fragment in zip(blocks, fragments, strict=False):
                placed[block] = fragment
                totals[fragment] += sizes[block]
        return placed

    return lambda model: _by_blocks(model, num_fragments, deal, split_rows)


def sequential(num_fragments: int, split_rows: bool = False) -> Pattern:
    """Each fragment holds consecutive blocks (Streaming DiLoCo, 2501.18512). `split_rows`: see `strided`.

    >>> model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])
    >>> [fragment.names for fragment in sequential(2)(model)]
    [('0.weight', '1.weight'), ('2.weight', '3.weight')]
    """

    def deal(sizes: Sequence[int]) -> list[int]:
        return [i * num_fragments // len(sizes) for i in range(len(sizes))]

    return lambda model: _by_blocks(model, num_fragments, deal, split_rows)


class _Piece(NamedTuple):
    """A parameter, or its rows start .. stop - 1, counted in the whole parameter also if it is sharded."""

    name: str
    rows: tuple[int, int] | None = None


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each memory once: adapters of tied layers are different parameters in one memory."""
    places: dict[Any, tuple[str, nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            shard = local_shard(param)  # an empty shard has no address
            places.setdefault((shard.data_ptr(), shard.numel()) if shard.data_ptr() else name, (name, param))
    return dict(places.values())


class _Filling:
    """Fragments while they are filled: their pieces so far, and their sizes in values."""

    def __init__(self, params: Mapping[str, Tensor], num_fragments: int) -> None:
        self.pieces: list[list[_Piece]] = [[] for _ in range(num_fragments)]
        self.sizes = [0] * num_fragments
        self._params = params
        self._limit = EVEN * self.numel(list(params)) / num_fragments

    def numel(self, names: Sequence[str]) -> int:
        return sum(self._params[name].numel() for name in names)

    def fits(self, names: Sequence[str]) -> bool:
        """Whether these parameters keep the smallest fragment even, or at least not the largest."""
        return min(self.sizes) + self.numel(names) <= max(self._limit, *self.sizes)

    def add(self, names: Sequence[str], fragment: int | None = None) -> None:
        """Add whole parameters to a fragment; by default to the smallest."""
        fragment = self.sizes.index(min(self.sizes)) if fragment is None else fragment
        self.pieces[fragment] += map(_Piece, names)
        self.sizes[fragment] += self.numel(names)

    def spread(self, name: str) -> None:
        """Fill up the smallest fragments to one level with the rows of a parameter, from its first row on."""
        param = self._params[name]
        num_rows = param.shape[0] if param.dim() else 1
        for count in range(len(self.sizes), 0, -1):
            smallest = sorted(self.sizes)[:count]
            level = (sum(smallest) + param.numel()) / count
            if level >= smallest[-1]:
                break
        room = accumulate(max(level - size, 0.0) for size in self.sizes)
        ends = [round(num_rows * numel / param.numel()) for numel in room]
        for fragment, rows in enumerate(pairwise([0, *ends])):
            if rows == (0, num_rows):
                self.add([name], fragment)
            elif rows[0] < rows[1]:
                self.pieces[fragment].append(_Piece(name, rows))
                self.sizes[fragment] += (rows[1] - rows[0]) * (param.numel() // num_rows)


def _by_blocks(
    model: nn.Module, num_fragments: int, place: Callable[[Sequence[int]], list[int]], split_rows: bool
) -> tuple[Fragment, ...]:
    """Place each block as `place` decides from their sizes, then all other modules, largest first, in the smallest fragments.

    The paper gives the embedding a fragment of its own, and so does `num_fragments` = blocks + 1. With fewer it joins a
    fragment, or with `split_rows` all that have room: `num_fragments` is then the number of transfers in a round, and the
    transfers have similar sizes.
    """
    params = _trainable(model)
    inside: dict[Block, list[str]] = {block: [] for block in find_blocks(model)}
    outside: dict[str, list[str]] = {}
    for name in params:
        block = _block_of(name, list(inside))
        if block is None:
            outside.setdefault(name.rpartition(".")[0], []).append(name)
        else:
            inside[block].append(name)
    filling = _Filling(params, num_fragments)
    blocks = [names for names in inside.values() if filling.numel(names)]
    outside |= {names[0]: names for names in inside.values() if names and names not in blocks}
    # one more than there are blocks: that is empty until the largest module outside them comes into it
    most = len(blocks) + any(map(filling.numel, outside.values()))
    if num_fragments > most:
        raise InputError(
            f"outer.num_fragments={num_fragments} (methods have defaults) but the model has {len(blocks)} trainable blocks "
            f"with values{' and one fragment for what is outside them' if most > len(blocks) else ''}, and each fragment needs "
            "something. Use " + (f"num_fragments <= {most}." if most > 1 else "fragment_pattern=whole.")
        )
    for names, fragment in zip(blocks, place(list(map(filling.numel, blocks))), strict=True):
        filling.add(names, fragment)
    for names in sorted(outside.values(), key=filling.numel, reverse=True):
        if not split_rows or filling.fits(names):
            filling.add(names)
            continue
        for name in names:
            if filling.fits([name]):
                filling.add([name])
            else:
                filling.spread(name)
    return _build(model, filling.pieces)


def _block_of(name: str, blocks: Sequence[Block]) -> Block | None:
    """The block that has the parameter called `name`."""
    return next((block for block in blocks if name.startswith(tuple(f"{each}." for each in block))), None)


def _build(model: nn.Module, groups: Sequence[Sequence[_Piece]]) -> tuple[Fragment, ...]:
    params = _trainable(model)
    if not any(param.numel() for param in params.values()):
        raise InputError(
            "the model has no trainable parameter with a value (requires_grad=True), so there is nothing to synchronize. "
            "Unfreeze some parameters, or add an adapter (recipe section 'peft')."
        )
    refuse_overlaps({name: local_shard(param) for name, param in params.items()})
    _check_cover([piece for group in groups for piece in group], params)
    order = {name: position for position, name in enumerate(params)}
    blocks, fragments = find_blocks(model), []
    for index, group in enumerate(groups):
        pieces = sorted(group, key=lambda piece: order[piece.name])
        shards = {piece.name: local_shard(params[piece.name]) for piece in pieces}
        rows = {
            i: _local_rows(piece.rows, params[piece.name], shards[piece.name])
            for i, piece in enumerate(pieces)
            if piece.rows is not None
        }
        names = tuple(piece.name for piece in pieces)
        outside = [i for i, name in enumerate(names) if blocks and _block_of(name, blocks) is None]
        bare = Fragment(index, names, (), 0, rows, frozenset(outside))
        views = bare.views_of(shards)
        shapes = tuple(tuple(view.shape) for view in views)
        fragments.append(replace(bare, shapes=shapes, numel=sum(view.numel() for view in views)))
    return tuple(fragments)


def _local_rows(rows: tuple[int, int], param: Tensor, shard: Tensor) -> tuple[int, int]:
    """Where a shard is cut, if its whole parameter is cut at `rows`: each rank holds the same share of a piece."""
    start, stop = (row * len(shard) // len(param) for row in rows)
    return start, stop


def _check_cover(placed: Sequence[_Piece], params: Mapping[str, Tensor]) -> None:
    """Assert that every value of every trainable parameter is placed exactly once."""
    placed_rows: dict[str, list[tuple[int, int] | None]] = {name: [] for name in params}
    for piece in placed:
        placed_rows[piece.name].append(piece.rows)
    for name, rows in placed_rows.items():
        if rows != [None]:
            cut = [row for each in sorted(each or (-1, -1) for each in rows) for row in each]
            assert cut[:1] == [0] and cut[-1:] == [len(params[name])] and cut[1:-1:2] == cut[2:-1:2], (
                f"fragments must cover every value of {name} exactly once, not {rows}"
            )


def refuse_overlaps(shards: Mapping[str, Tensor]) -> None:
    """Raise InputError, which names the parameters, if two places in `shards`, what this rank holds by name, are one in memory.

    Regions would move such a value once for each of its places.
    """
    way_out = "give it memory of its own before the run (param.data = param.data.clone())"
    for name, shard in shards.items():
        if shard.numel() > _extent(shard):
            raise InputError(
                f"{name} {list(shard.shape)} is expanded: several of its values are one place in memory, which cannot be trained "
                f"apart. Train the tensor that it expands, or {way_out}."
            )
    placed = sorted(
        (each for each in shards.items() if each[1].data_ptr()), key=lambda each: each[1].data_ptr()
    )
    for i, (name, shard) in enumerate(placed):
        end = shard.data_ptr() + _extent(shard) * shard.element_size()
        for other, its_shard in placed[i + 1 :]:
            if its_shard.data_ptr() >= end:
                break
            if _overlap(shard, its_shard):
                raise InputError(
                    f"{name} {list(shard.shape)} and {other} {list(its_shard.shape)} share a part of their memory, which would "
                    f"be synchronized twice. Tie them as a whole, or {way_out} for one of them."
                )


def _extent(tensor: Tensor) -> int:
    """Places in memory from the first value to the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


def _overlap(tensor: Tensor, later: Tensor) -> bool:
    """Whether two tensors share a value, given that the later one begins before the end of the other."""
    sizes = {tensor.element_size(), later.element_size()}
    if len(sizes) > 1 or all(each.numel() == _extent(each) for each in (tensor, later)):
        return True
    # columns of one matrix lie between each other, and share nothing
    start = (later.data_ptr() - tensor.data_ptr()) // sizes.pop()
    is_taken = torch.zeros(max(_extent(tensor), start + _extent(later)), dtype=torch.bool, device=HOST)
    is_taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return bool(is_taken.as_strided(later.shape, later.stride(), start).any())


@contextmanager
def only_trainable(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside the block exactly these parameters are trainable."""
    changed = [param for name, param in model.named_parameters() if param.requires_grad != (name in names)]
    for param in changed:
        param.requires_grad_(not param.requires_grad)
    try:
        yield
    finally:
        for param in changed:
            param.requires_grad_(not param.requires_grad)


def names_of(fragments: Sequence[Fragment]) -> frozenset[str]:
    """Names of the parameters in these fragments."""
    return frozenset(name for fragment in fragments for name in fragment.names)


def names_in(layout: list) -> frozenset[str]:
    """Names of the parameters in a saved layout. Raises TypeError or ValueError if it is none."""
    names = [name for fragment in layout for name, *_ in fragment]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("the layout has a parameter without a name")
    return frozenset(names)
