"""Saves and loads the state of a fragment and of its transfers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..links.base import Arrival, Here
from ..links.records import from_numbers
from ..links.trailer import Ending, Trailer
from ..parts.codecs import without_residuals
from ..parts.codecs.base import Result
from .compatibility import same_structure
from .fragment import FragmentState
from .shares import Trained
from .transfer import Transfer

_OF_A_FRAGMENT = (
    "global_params",
    "outer",
    "codec",
    "num_sends",
    "settled_at",
    "sent_at",
    "lr_sum",
    "nonfinite_rounds",
)
_SINCE_FORMAT_1 = {"nonfinite_rounds": 0}
"""What a checkpoint without them has."""
_OF_A_TRANSFER = ("sent_at", "snapshot", "global_params", "lr_sum")


def saved(fragment: FragmentState) -> dict[str, Any]:
    """The whole state of a fragment, except the local params, which belong to the model.

    Waits for the transfers in flight, and saves their results without landing them: saving changes no number.
    """
    kept = {name: getattr(fragment, name) for name in _OF_A_FRAGMENT}
    kept["trained"] = list(fragment.trained)
    return kept | {"in_flight": [_saved(transfer) for transfer in fragment.in_flight]}


def load(fragment: FragmentState, state: dict[str, Any]) -> None:
    """Continue from what `saved` returned. Transfers in flight belong to steps that are undone; they are dropped.

    Raises:
        CheckpointError: the state belongs to another outer optimizer or codec.
    """
    index = fragment.fragment.index
    forms = {"outer": fragment.outer, "codec": fragment.codec_form, "global_params": fragment.global_params}
    for part, form in forms.items():
        same_structure(state[part], form, f"the {part} state of fragment {index}")
    moved: dict[int, Tensor] = {}  # tensors that were shared stay shared

    def here(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: here(each) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        if id(value) not in moved:
            moved[id(value)] = value.to(fragment.pool.device)
        return moved[id(value)]

    while fragment.in_flight:
        transfer = fragment.in_flight.pop()
        _arrival(transfer)
        fragment.drop(transfer)
    state = {**_SINCE_FORMAT_1, **state}
    for name in _OF_A_FRAGMENT:
        setattr(fragment, name, state[name] if name == "codec" else here(state[name]))
    # what an earlier version wrote has trained every inner step, on an unknown number of tokens
    fragment.trained = Trained(*state.get("trained", (state["sent_at"], 0)))
    for each in state["in_flight"]:
        flats = {name: here(each[name]) for name in (*_OF_A_TRANSFER, "outer_grad", "mean")}
        fragment.in_flight.append(_loaded({**each, **flats}))


def wait_for_transfers(fragments: Sequence[FragmentState]) -> None:
    """Wait until the transfers in flight have ended, here and thus in the other regions, which may be about to save them."""
    for fragment in fragments:
        for transfer in fragment.in_flight:
            _arrival(transfer)


@torch.no_grad()
def take_over(fragments: Sequence[FragmentState], takes_part: bool) -> None:
    """Adapt a state loaded from another region: this region has lost nothing.

    Args:
        fragments: as loaded.
        takes_part: whether this region counts in the transfers in flight, with an outer gradient of zero. Else they land as in
            the other region, from whose global params these ones are: the part that it has taken in before is taken back.
    """
    begin_anew(fragments)
    for fragment in fragments:
        fragment.codec = without_residuals(fragment.codec)
        for transfer in fragment.in_flight:
            transfer.is_own = takes_part
            if takes_part:
                transfer.outer_grad = (
                    None if transfer.outer_grad is None else torch.zeros_like(transfer.snapshot)
                )


@torch.no_grad()
def begin_anew(fragments: Sequence[FragmentState]) -> None:
    """Give up the local params for the global ones, also for the transfers in flight when they land."""
    for fragment in fragments:
        fragment.local.show(fragment.global_params)
        fragment.nonfinite_rounds = 0
        for transfer in fragment.in_flight:
            fragment.local.gather(transfer.snapshot)


def _arrival(transfer: Transfer) -> Arrival:
    transfer.outcome.awaited = True
    return transfer.handle.wait()


def _saved(transfer: Transfer) -> dict[str, Any]:
    """A transfer and its result."""
    arrival = _arrival(transfer)
    return {name: getattr(transfer, name) for name in _OF_A_TRANSFER} | {
        "outer_grad": transfer.outer_grad,
        "mean": arrival.result.mean,
        "codec": arrival.result.state,
        "trailers": [trailer._asdict() for trailer in arrival.trailers],
        "bytes_sent": arrival.bytes_sent,
        "seconds": arrival.seconds,
        "square": arrival.square,
        "members": list(arrival.members),
        "is_own": transfer.is_own,
        "taken": transfer.taken,
        "trained": list(transfer.trained),
    }


def _loaded(state: dict[str, Any]) -> Transfer:
    """A transfer whose result is here and waits for its landing."""
    mean = state["mean"]
    # the region that announced its end here, and stopped the run, has come back
    trailers = tuple(
        from_numbers(Trailer, trailer)._replace(ending=Ending.NO) for trailer in state["trailers"]
    )
    result = Result(mean, lambda: mean, state["codec"])
    members = tuple(state.get("members", range(len(trailers))))  # earlier versions had regions 0, 1, ...
    numbers = {name: state[name] for name in ("bytes_sent", "seconds", "square")}
    # without `changes`: what its trailers say of regions that come and go was said in another run, or before this region came
    arrival = Arrival(result, trailers, **numbers, members=members)
    kept = {name: state[name] for name in (*_OF_A_TRANSFER, "outer_grad")}
    is_own, taken = state.get("is_own", True), state.get("taken")  # earlier versions did not say it
    trained = Trained(*state.get("trained", ()))
    return Transfer(**kept, handle=Here(arrival), is_own=is_own, taken=taken, trained=trained)
