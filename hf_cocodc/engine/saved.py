"""What a checkpoint keeps of the engine: saved, checked and loaded; and what a region makes of another one's state."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from ..errors import CheckpointError, LinkError, short
from ..link.base import Arrival, Awaited
from ..link.records import Ending, Trailer, from_numbers
from ..parts.codecs import without_residuals
from ..parts.codecs.base import Result
from ..parts.fragments import Fragment
from ..parts.guard import Ordinary, Verdict
from ..parts.merges import Merge
from ..validation import Count, Number, Size, whole
from .fragment import FragmentState, KeptOfFragment, Trained, Transfer

Judge = Callable[[Ordinary], Callable[[Sequence[Trailer]], Verdict]]
"""By what is ordinary for a transfer: how much each region counts in it, by the trailers of all."""

HISTORIES = ("norms", "paces", "losses")
"""What the norm guard remembers of a fragment's last landings."""


class SavedTransfer(Struct, kw_only=True):
    """A transfer in a checkpoint, and its result."""

    sent_at: Count
    snapshot: Tensor
    global_params: Tensor
    lr_sum: Number
    outer_grad: Tensor | None
    is_own: bool
    is_finite: bool
    norm: Size
    taken: Number | None
    mean: Tensor
    codec: dict[str, Any]
    trailers: list[dict[str, Any]]
    bytes_sent: Count
    seconds: float
    square: float
    members: list[Count]
    reference: Size
    pace: Size
    trained: Trained


@dataclass(kw_only=True)
class SavedFragment(KeptOfFragment):
    """A fragment in a checkpoint, and its transfers in flight, oldest first."""

    in_flight: list[SavedTransfer]


_OF_A_FRAGMENT = [each.name for each in fields(KeptOfFragment)]
_FLATS = ("snapshot", "global_params", "mean", "outer_grad")
_OF_A_TRANSFER = [each.name for each in fields(Transfer) if each.name in SavedTransfer.__struct_fields__]


def saved_fragment(fragment: FragmentState) -> dict[str, Any]:
    """The state of a fragment, without its local params. Waits for transfers and saves their results: nothing lands."""
    kept = {name: getattr(fragment, name) for name in _OF_A_FRAGMENT}
    kept |= {name: list(kept[name]) for name in (*HISTORIES, "trained")}
    return kept | {"in_flight": [_saved(transfer) for transfer in fragment.in_flight]}


def load(fragment: FragmentState, state: dict[str, Any], judge: Judge) -> None:
    """Continue from what `saved_fragment` returned; `judge` as for new transfers (`Guarding.judge`).

    Raises CheckpointError if the state is of another optimizer or codec, or damaged.
    """
    saved = _checked(fragment, state)
    moved: dict[int, Tensor] = {}  # tensors that were shared stay shared

    def here(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: here(each) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        if id(value) not in moved:
            moved[id(value)] = fragment.home.keep(value)
        return moved[id(value)]

    # these belong to steps that are undone
    while fragment.in_flight:
        transfer = fragment.in_flight.pop()
        transfer.handle.wait()
        fragment.drop(transfer)
    for name in _OF_A_FRAGMENT:
        setattr(fragment, name, saved.codec if name == "codec" else here(getattr(saved, name)))
    for each in saved.in_flight:
        for name in _FLATS:
            setattr(each, name, here(getattr(each, name)))
        fragment.in_flight.append(_loaded(each, judge))


def _checked(fragment: FragmentState, state: dict[str, Any]) -> SavedFragment:
    """The saved state of this fragment. Raises CheckpointError for what no engine saves."""
    index = fragment.fragment.index
    forms = {"outer": fragment.outer, "codec": fragment.codec, "global_params": fragment.global_params}
    for part, form in forms.items():
        same_structure(state[part], form, f"the {part} state of fragment {index}")
    try:
        saved = whole(SavedFragment, state)
        steps = [each.sent_at for each in saved.in_flight]
        if steps != sorted(steps) or max(steps, default=0) > saved.sent_at:
            raise ValueError(f"transfers of the steps {steps}, the last send at step {saved.sent_at}")
        for each in saved.in_flight:
            if not len(each.members) == len(each.trailers) > 0 or each.members != sorted(set(each.members)):
                raise ValueError(f"the members {each.members} of a transfer")
    except ValueError as error:
        raise CheckpointError(
            f"fragment {index}: the checkpoint has what no run saves ({short(error, 200)}). It is damaged: use another."
        ) from error
    for each in saved.in_flight:
        for name in _FLATS:
            flat = getattr(each, name)
            if name != "outer_grad" or flat is not None:
                same_structure(flat, fragment.global_params, f"fragment {index}, {name} of a transfer")
    return saved


@torch.no_grad()
def take_over(fragments: Sequence[FragmentState], takes_part: bool) -> None:
    """Adapt a state loaded from another region: this region has lost nothing.

    If it takes part, it counts in the transfers in flight with an outer gradient of zero. Else they land as in the other
    region, from whose global params these ones are: the part that it has taken in before is taken back.
    """
    begin_anew(fragments)
    for fragment in fragments:
        fragment.codec = without_residuals(fragment.codec)
        for transfer in fragment.in_flight:
            transfer.is_own = takes_part
            if takes_part:
                transfer.outer_grad = torch.zeros_like(transfer.global_params)


@torch.no_grad()
def begin_anew(fragments: Sequence[FragmentState]) -> None:
    """Give up the local params for the global ones, and count anew the rounds that do not count."""
    for fragment in fragments:
        take_global(fragment)
        fragment.nonfinite_rounds = 0


@torch.no_grad()
def take_global(fragment: FragmentState) -> None:
    """Give up the local params for the global ones, also for the transfers in flight when they land."""
    fragment.show(fragment.global_params)
    for transfer in fragment.in_flight:
        if transfer.snapshot is not None:  # else the local params are it
            fragment.local.gather(transfer.snapshot, fragment.home)


@dataclass(frozen=True)
class Unsent:
    """Inner steps of a fragment in no landed transfer: minus their sum, flat, and what was `trained` before them."""

    outer_grad: Tensor
    trained: Trained


@torch.no_grad()
def give_up(fragments: Sequence[FragmentState], merge: Merge) -> list[Unsent]:
    """Drop all transfers in flight, because the others have gone on without this region; returns its unsent steps.

    A transfer that has its mean has brought this region's steps to the others, and lands there; any other was sent again
    without this region. Waiting for a handle cannot block: the link has failed.
    """
    kept = [_unsent(fragment, merge) for fragment in fragments]
    for fragment in fragments:
        while fragment.in_flight:
            fragment.drop(fragment.in_flight.pop())
    return kept


def _unsent(fragment: FragmentState, merge: Merge) -> Unsent:
    base, trained = fragment.base(), fragment.trained
    _, outer_grad, square = fragment.prepare(base)
    fragment.home.settle()
    # after a landing since their send, local params have the steps of other transfers, or no longer
    has_them = base is fragment.global_params and merge.keeps_local_steps
    for transfer in reversed(fragment.in_flight):
        if _has_arrived(transfer):
            break
        trained = transfer.trained
        if (
            transfer.is_own
            and not has_them
            and transfer.square is not None
            and transfer.outer_grad is not None
        ):
            outer_grad.add_(transfer.outer_grad)
    return Unsent(outer_grad if math.isfinite(square) else outer_grad.zero_(), trained)


def _has_arrived(transfer: Transfer) -> bool:
    try:
        transfer.handle.wait()
    except LinkError:
        return False
    return True


@torch.no_grad()
def bring_back(fragments: Sequence[FragmentState], kept: Sequence[Unsent]) -> None:
    """Add the steps of `kept` to the local params, which are the global ones. The next sends carry them."""
    for fragment, unsent in zip(fragments, kept, strict=True):
        local = fragment.gather()
        fragment.home.settle()
        fragment.show(local.sub_(unsent.outer_grad))
        fragment.home.give(local)
        fragment.trained = unsent.trained


def _saved(transfer: Transfer) -> dict[str, Any]:
    """A transfer and its result."""
    arrival = transfer.handle.wait()
    return {name: getattr(transfer, name) for name in _OF_A_TRANSFER} | {
        "mean": arrival.result.mean,
        "codec": arrival.result.state,
        "trailers": [trailer._asdict() for trailer in arrival.trailers],
        "bytes_sent": arrival.bytes_sent,
        "seconds": arrival.seconds,
        "square": arrival.square,
        "members": list(arrival.members),
        "taken": None if transfer.taken is None else float(transfer.taken),
        "reference": transfer.ordinary.norm,
        "pace": transfer.ordinary.pace,
        "trained": list(transfer.trained),
    }


def _loaded(saved: SavedTransfer, judge: Judge) -> Transfer:
    """A transfer whose result is here and waits for its landing."""
    # without the announcement of an end: the region that stopped the run has come back
    trailers = tuple(from_numbers(Trailer, each)._replace(ending=Ending.NO) for each in saved.trailers)
    ordinary = Ordinary(saved.reference, saved.pace)
    # without `changes`: what its trailers say of regions that come and go was said in another run, or before this region came
    arrival = Arrival(
        Result(saved.mean, lambda: saved.mean, saved.codec),
        trailers,
        bytes_sent=saved.bytes_sent,
        seconds=saved.seconds,
        square=saved.square,
        members=tuple(saved.members),
        verdict=judge(ordinary)(trailers),
    )
    kept = {name: getattr(saved, name) for name in _OF_A_TRANSFER}
    transfer = Transfer(**kept, ordinary=ordinary)
    transfer.handle = Awaited(lambda: arrival)
    return transfer


def layout(fragments: Sequence[Fragment]) -> list[list[Any]]:
    """Per fragment a list of [name, shape] for parameters, [name, shape, [first row, row after the last]] for pieces."""
    return [
        [
            [name, list(shape), *([list(f.rows[i])] if i in f.rows else [])]
            for i, (name, shape) in enumerate(zip(f.names, f.shapes, strict=True))
        ]
        for f in fragments
    ]


def laid_out(layout: Sequence[Sequence[Sequence[Any]]]) -> tuple[Fragment, ...]:
    """The fragments of which `layout` has told."""
    return tuple(
        Fragment(
            index,
            tuple(name for name, *_ in params),
            tuple(tuple(shape) for _, shape, *_ in params),
            sum(math.prod(shape) for _, shape, *_ in params),
            {i: tuple(rows[0]) for i, (_, _, *rows) in enumerate(params) if rows},
        )
        for index, params in enumerate(layout)
    )


def same_layout(saved: list, fragments: Sequence[Fragment]) -> None:
    """Check a saved layout against `fragments`. Raises CheckpointError, which names the first parameter that differs."""
    expected = layout(fragments)
    if len(saved) != len(expected):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} fragments, this run {len(expected)}. Resume with the outer.num_fragments "
            "and outer.fragment_pattern that wrote it."
        )
    for index, (theirs, ours) in enumerate(zip(saved, expected, strict=True)):
        for their_param, our_param in zip_longest(theirs, ours):
            if their_param != our_param:
                raise CheckpointError(
                    f"fragment {index}: the checkpoint has the parameter {_show(their_param)}, this run {_show(our_param)}. "
                    "Resume with the model, outer.fragment_pattern and outer.split_rows that wrote it."
                )


def _show(param: list | None) -> str:
    if param is None:
        return "no more"
    name, shape, *rows = param
    return f"{name} {shape}" + "".join(f" (rows {start} to {stop - 1})" for start, stop in rows)


def same_structure(saved: Any, expected: Any, what: str) -> None:
    """Check that a saved state has the keys and tensor shapes of a fresh one. Raises CheckpointError, which names the place."""
    if isinstance(expected, dict):
        if not isinstance(saved, dict) or saved.keys() != expected.keys():
            names = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
            raise CheckpointError(
                f"{what}: the checkpoint has {names}, this run {sorted(expected)}. Resume with the method, codec and "
                "merge that wrote it."
            )
        for key, value in expected.items():
            same_structure(saved[key], value, f"{what}, {key}")
    elif isinstance(expected, Tensor) and (
        not isinstance(saved, Tensor) or saved.shape != expected.shape or saved.dtype != expected.dtype
    ):
        seen = f"{list(saved.shape)} {saved.dtype}" if isinstance(saved, Tensor) else type(saved).__name__
        raise CheckpointError(
            f"{what}: the checkpoint has {seen}, this run {list(expected.shape)} {expected.dtype}. Resume with the model "
            "and settings that wrote it."
        )
