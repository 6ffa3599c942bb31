"""Saves and loads the state of a fragment and of its transfers, or gives the transfers up."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, LinkError
from ..link.base import Arrival, ArrivedHandle
from ..link.records import Ending, Trailer, checked, from_numbers
from ..parts.codecs import without_residuals
from ..parts.codecs.base import Result
from ..parts.guard import Ordinary, Verdict
from ..parts.merges import Merge
from ..parts.tensors.memory import HOST
from .compatibility import HISTORIES, same_structure, sound_fragment
from .fragment import FragmentState
from .transfer import Trained, Transfer

_OF_A_FRAGMENT = (
    "global_params",
    "outer",
    "codec",
    "num_sends",
    "settled_at",
    "sent_at",
    "lr_sum",
    "nonfinite_rounds",
    *HISTORIES,
    "voids",
    "far_losses",
)
_LATER: dict[str, Any] = {"voids": 0, "far_losses": 0} | {name: [] for name in HISTORIES}
"""What the first checkpoints of format 2 lack."""
_OF_A_TRANSFER = ("sent_at", "snapshot", "global_params", "lr_sum")
_SAID_OF_A_TRANSFER = ("is_own", "is_finite", "norm", "taken")
"""Earlier versions lack some of these."""
Judge = Callable[[Ordinary], Callable[[Sequence[Trailer]], Verdict]]
"""By what is ordinary for a transfer: how much each region counts in it, by the trailers of all."""


def saved(fragment: FragmentState) -> dict[str, Any]:
    """The state of a fragment, without its local params. Waits for transfers and saves their results: nothing lands."""
    kept = {name: getattr(fragment, name) for name in _OF_A_FRAGMENT}
    kept |= {"trained": list(fragment.trained)} | {name: list(kept[name]) for name in HISTORIES}
    return kept | {"in_flight": [_saved(transfer) for transfer in fragment.in_flight]}


def load(fragment: FragmentState, state: dict[str, Any], judge: Judge) -> None:
    """Continue from what `saved` returned; `judge` as for new transfers (`Guarding.judge`).

    Raises CheckpointError if the state is of another optimizer or codec, or damaged.
    """
    index = fragment.fragment.index
    state = {**state, "outer": _with_scalars(state["outer"], fragment.outer)}
    forms = {"outer": fragment.outer, "codec": fragment.codec, "global_params": fragment.global_params}
    for part, form in forms.items():
        same_structure(state[part], form, f"the {part} state of fragment {index}")
    sound_fragment(state, fragment.fragment.numel, f"fragment {index}")
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
    state = {**_LATER, **state}
    for name in _OF_A_FRAGMENT:
        setattr(fragment, name, state[name] if name == "codec" else here(state[name]))
    # what an earlier version wrote has trained every inner step, on an unknown number of tokens
    fragment.trained = Trained.of(state.get("trained", (state["sent_at"], 0)))
    for each in state["in_flight"]:
        flats = {name: here(each[name]) for name in (*_OF_A_TRANSFER, "outer_grad", "mean")}
        fragment.in_flight.append(_loaded({**each, **flats}, judge))


def _with_scalars(saved: Any, form: Any) -> Any:
    """A saved outer state whose numbers are scalar tensors where those of this version are: format 2 had Python's numbers."""
    if isinstance(saved, dict) and isinstance(form, dict):
        return {name: _with_scalars(value, form.get(name)) for name, value in saved.items()}
    if isinstance(form, Tensor) and not form.dim() and isinstance(saved, int | float):
        return torch.tensor(saved, dtype=form.dtype, device=HOST)
    return saved


def wait_for_transfers(fragments: Sequence[FragmentState]) -> None:
    """Wait until the transfers in flight have ended, here and thus in other regions, which may be about to save them."""
    for fragment in fragments:
        for transfer in fragment.in_flight:
            transfer.handle.wait()


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
                transfer.outer_grad = torch.zeros_like(transfer.snapshot)


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
    snapshot, outer_grad, square = fragment.prepare(base)
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
    fragment.home.give(snapshot)
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
        "outer_grad": transfer.outer_grad,
        "mean": arrival.result.mean,
        "codec": arrival.result.state,
        "trailers": [trailer._asdict() for trailer in arrival.trailers],
        "bytes_sent": arrival.bytes_sent,
        "seconds": arrival.seconds,
        "square": arrival.square,
        "members": list(arrival.members),
        **{name: getattr(transfer, name) for name in _SAID_OF_A_TRANSFER},
        "taken": None if transfer.taken is None else float(transfer.taken),
        "reference": transfer.ordinary.norm,
        "pace": transfer.ordinary.pace,
        "trained": list(transfer.trained),
    }


def _loaded(state: dict[str, Any], judge: Judge) -> Transfer:
    """A transfer whose result is here and waits for its landing."""
    mean = state["mean"]
    members = tuple(
        state.get("members", range(len(state["trailers"])))
    )  # earlier versions had regions 0, 1, ...
    trailers = tuple(map(_trailer, state["trailers"], members))
    result = Result(mean, lambda: mean, state["codec"])
    numbers = {name: state[name] for name in ("bytes_sent", "seconds", "square")}
    # without `changes`: what its trailers say of regions that come and go was said in another run, or before this region came
    ordinary = Ordinary(state.get("reference", 0.0), state.get("pace", 0.0))
    arrival = Arrival(result, trailers, **numbers, members=members, verdict=judge(ordinary)(trailers))
    kept = {name: state[name] for name in (*_OF_A_TRANSFER, "outer_grad")}
    numbers_of_transfer = {name: state[name] for name in _SAID_OF_A_TRANSFER if name in state}
    trained = Trained.of(state.get("trained", ()))
    transfer = Transfer(**kept, **numbers_of_transfer, ordinary=ordinary, trained=trained)
    transfer.handle = ArrivedHandle(arrival)
    return transfer


def _trailer(numbers: Mapping[str, float], region: int) -> Trailer:
    """A saved trailer, without the announcement of an end: the region that stopped the run has come back."""
    try:
        return checked(from_numbers(Trailer, numbers), region)._replace(ending=Ending.NO)
    except (ValueError, LinkError) as error:
        raise CheckpointError(
            f"the checkpoint has a transfer in flight that no region can have sent: {error}. It is damaged: go back "
            "to an earlier one."
        ) from error
