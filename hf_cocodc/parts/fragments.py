"""Which parameters travel together.

A fragment is a flat fp32 vector with a layout. A pattern is a function that splits a model into fragments. The fragments
cover every trainable parameter exactly once: a tied weight is in one fragment, a frozen parameter in none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..tensors.flat import split_views
from ..tensors.sharding import local_shard


@dataclass(frozen=True)
class Fragment:
    """Parameters that are sent and landed together.

    Attributes:
        index: position among the model's fragments.
        names: parameter names, in the order of the flat vector.
        shapes: shape of each parameter. In a sharded model, shape of this rank's shard.
        numel: length of the flat vector.
    """

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numel: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view of the 1-D `flat` (length `numel`) for each parameter."""
        return split_views(flat, self.shapes)


Pattern = Callable[[nn.Module], tuple[Fragment, ...]]


def whole() -> Pattern:
    """The whole model is one fragment (DiLoCo, 2311.08105).

    >>> model = nn.Linear(2, 1)
    >>> whole()(model)
    (Fragment(index=0, names=('weight', 'bias'), shapes=((1, 2), (1,)), numel=3),)
    """
    return lambda model: _build(model, [list(_trainable(model))])


def strided(num_fragments: int) -> Pattern:
    """Fragment f holds the blocks f, f + P, f + 2P, ... (Streaming DiLoCo, 2501.18512; its default).

    If blocks differ in size, P neighbouring blocks still go to P different fragments, but the largest block goes to the
    fragment that is smallest so far. Otherwise a model with experts in every second layer would have all experts in every
    second fragment.

    >>> model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])
    >>> [fragment.names for fragment in strided(2)(model)]
    [('0.weight', '2.weight'), ('1.weight', '3.weight')]
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

    return lambda model: _by_blocks(model, num_fragments, deal)


def sequential(num_fragments: int) -> Pattern:
    """Each fragment holds consecutive blocks (Streaming DiLoCo, 2501.18512).

    >>> model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])
    >>> [fragment.names for fragment in sequential(2)(model)]
    [('0.weight', '1.weight'), ('2.weight', '3.weight')]
    """
    return lambda model: _by_blocks(
        model, num_fragments, lambda sizes: [i * num_fragments // len(sizes) for i in range(len(sizes))]
    )


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the transformer blocks, in order.

    Every `PreTrainedModel` with blocks lists their classes in `_no_split_modules`. The blocks are the outermost modules of
    these classes, compared by the class name before FSDP2 renamed it. If there are fewer than two, the blocks are the children
    of the `ModuleList` with the most parameters.
    """
    classes: set[str] = set()
    for module in model.modules():
        classes.update(getattr(module, "_no_split_modules", None) or ())
    repeated = [
        name
        for name, module in model.named_modules()
        if type(module).__name__.removeprefix("FSDP") in classes
    ]
    blocks = [name for name in repeated if not any(name.startswith(f"{other}.") for other in repeated)]
    if len(blocks) > 1:
        return blocks
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        return blocks
    largest = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    return [f"{largest}.{child}" if largest else child for child, _ in lists[largest].named_children()]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each memory location once.

    `named_parameters` lists a tied weight once. But the adapters of tied layers are different parameters in one memory.
    """
    places: dict[Any, tuple[str, nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            shard = local_shard(param)  # an empty shard has no address
            places.setdefault((shard.data_ptr(), shard.numel()) if shard.data_ptr() else name, (name, param))
    return dict(places.values())


def _by_blocks(
    model: nn.Module, num_fragments: int, place: Callable[[Sequence[int]], list[int]]
) -> tuple[Fragment, ...]:
    """Place each block as `place` decides from the block sizes, then add all other modules to the smallest fragments.

    The other modules follow in order of size, largest first. The paper gives the embedding a fragment of its own. Here it
    joins a fragment: `num_fragments` is then the number of transfers in a round, and the transfers have similar sizes.
    """
    params = _trainable(model)
    inside: dict[str, list[str]] = {block: [] for block in find_blocks(model)}
    outside: dict[str, list[str]] = {}
    for name in params:
        block = next((block for block in inside if name.startswith(f"{block}.")), None)
        if block is None:
            outside.setdefault(name.rpartition(".")[0], []).append(name)
        else:
            inside[block].append(name)
    blocks = [names for names in inside.values() if names]
    if num_fragments > len(blocks):
        raise InputError(
            f"num_fragments={num_fragments} but the model has {len(blocks)} trainable blocks, and each fragment needs "
            "at least one. Use "
            + (f"num_fragments <= {len(blocks)}." if len(blocks) > 1 else "fragment_pattern=whole.")
        )

    def numel(names: Sequence[str]) -> int:
        return sum(params[name].numel() for name in names)

    groups: list[list[str]] = [[] for _ in range(num_fragments)]
    for names, fragment in zip(blocks, place([numel(names) for names in blocks]), strict=True):
        groups[fragment] += names
    for names in sorted(outside.values(), key=numel, reverse=True):
        min(groups, key=numel).extend(names)
    return _build(model, groups)


def _build(model: nn.Module, groups: Sequence[Sequence[str]]) -> tuple[Fragment, ...]:
    params = _trainable(model)
    if not params:
        raise InputError(
            "the model has no trainable parameter (requires_grad=True), so there is nothing to synchronise. Unfreeze "
            "some parameters, or add an adapter (recipe section 'peft')."
        )
    placed = [name for names in groups for name in names]
    assert sorted(placed) == sorted(params), "fragments must cover every trainable parameter exactly once"
    order = {name: position for position, name in enumerate(params)}
    fragments = []
    for index, names in enumerate(groups):
        names = sorted(names, key=order.__getitem__)
        shapes = tuple(tuple(local_shard(params[name]).shape) for name in names)
        numel = sum(local_shard(params[name]).numel() for name in names)
        fragments.append(Fragment(index, tuple(names), shapes, numel))
    return tuple(fragments)
