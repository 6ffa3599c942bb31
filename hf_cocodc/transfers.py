"""What the engine keeps of each fragment and of each transfer in flight, and how it is saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .codecs.base import Result, State
from .errors import CheckpointError
from .fragments import Fragment
from .links.base import Arrival, Handle, Trailer
from .tensors import copy_all_, flat_zeros, tensors_in


@dataclass
class Transfer:
    """An outer gradient on its way."""

    sent_at: int
    snapshot: Tensor
    outer_grad: Tensor
    global_params: Tensor
    lr_sum: float
    handle: Handle

    def state_dict(self) -> State:
        """The transfer with its result, un-landed: waits for it."""
        arrival = self.handle.wait()
        kept = {name: getattr(self, name) for name in _KEPT_OF_A_TRANSFER}
        return kept | {
            "mean": arrival.result.mean,
            "codec": arrival.result.state,
            "trailers": [trailer._asdict() for trailer in arrival.trailers],
            "bytes_sent": arrival.bytes_sent,
            "seconds": arrival.seconds,
            "square": arrival.square,
        }

    def join(self, local: Tensor) -> None:
        """Make it the transfer of a region that was not there when it left: nothing of it is this region's own."""
        self.snapshot, self.outer_grad = local, torch.zeros_like(local)

    @classmethod
    def from_state(cls, state: State) -> "Transfer":
        """A transfer whose result is here and waits to be landed."""
        mean = state["mean"]
        # who said then that it would leave, and made all stop here, has come back
        trailers = tuple(Trailer(**trailer | {"ending": 0.0}) for trailer in state["trailers"])
        result = Result(mean, lambda: mean, state["codec"])
        handle = Here(
            Arrival(result, trailers, *(state[name] for name in ("bytes_sent", "seconds", "square")))
        )
        return cls(**{name: state[name] for name in _KEPT_OF_A_TRANSFER}, handle=handle)


_KEPT_OF_A_TRANSFER = ("sent_at", "snapshot", "outer_grad", "global_params", "lr_sum")


@dataclass
class FragmentState:
    """What the engine keeps of one fragment; `params` are this rank's own tensors, written in place.

    Only `move` writes to `global_params`, and never while a transfer holds on to them.
    """

    fragment: Fragment
    params: list[Tensor]
    global_params: Tensor
    outer: State
    codec: State
    codec_remembers: bool
    in_flight: list[Transfer] = field(default_factory=list)
    num_sends: int = 0
    settled_at: int = 0
    """Inner step up to which local steps have entered the global params (or were thrown away by a merge)."""
    sent_at: int = 0
    """Inner step of the last send."""
    lr_sum: float = 0.0
    """Sum of learning rates at the last send."""
    _spare: list[Tensor] = field(default_factory=list)

    def take(self) -> Tensor:
        """A flat buffer of the fragment's length with anything in it; new memory costs more than what is done with it."""
        return self._spare.pop() if self._spare else flat_zeros(self.fragment.numel)

    def give(self, *buffers: Tensor) -> None:
        """Hand back buffers that nobody will look at any more."""
        self._spare += buffers

    def move(self, update: Tensor) -> None:
        """Subtract from the global params; into another buffer where a transfer in flight holds on to them."""
        held = any(transfer.global_params is self.global_params for transfer in self.in_flight)
        target = self.take() if held else self.global_params
        self.global_params = torch.sub(self.global_params, update, out=target)

    def retire(self, transfer: Transfer) -> None:
        """Take back the buffers of a transfer that has landed."""
        self.give(transfer.snapshot, transfer.outer_grad)
        in_use = [self.global_params, *(other.global_params for other in self.in_flight)]
        if not any(kept is transfer.global_params for kept in in_use):
            self.give(transfer.global_params)

    def gather(self) -> Tensor:
        """The local params as one flat buffer of their own."""
        return gather(self.fragment, self.params, self.take())

    def outer_grad(self, local: Tensor) -> Tensor:
        """Global minus local, the global params rounded as the model stores them.

        Against unrounded fp32 a bf16 model that does not move would seem to, and idle regions would drift.
        """
        shown = self.take()
        if all(param.dtype == torch.float32 for param in self.params):
            return torch.sub(self.global_params, local, out=shown)
        pieces = zip(self.fragment.views(self.global_params), self.params, strict=True)
        copy_all_(self.fragment.views(shown), [piece.to(param.dtype) for piece, param in pieces])
        return shown.sub_(local)

    def state_dict(self) -> State:
        """Everything but the local params, which are the model's; waits for what is in flight."""
        kept = {name: getattr(self, name) for name in _KEPT_OF_A_FRAGMENT}
        return kept | {"in_flight": [transfer.state_dict() for transfer in self.in_flight]}

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: it belongs to another outer optimizer or codec.
        """
        index = self.fragment.index
        for part in ("outer", "codec", "global_params"):
            same_structure(state[part], getattr(self, part), f"the {part} state of fragment {index}")
        for name in _KEPT_OF_A_FRAGMENT:
            setattr(self, name, state[name])
        self.in_flight = [Transfer.from_state(transfer) for transfer in state["in_flight"]]


_KEPT_OF_A_FRAGMENT = (
    *("global_params", "outer", "codec"),
    *("num_sends", "settled_at", "sent_at", "lr_sum"),
)


def gather(fragment: Fragment, params: Sequence[Tensor], into: Tensor) -> Tensor:
    """Parameters in the flat host buffer `into`; from a device in one transfer, not in one a parameter."""
    device = params[0].device
    flat = into if device.type == "cpu" else torch.empty_like(into, device=device)
    copy_all_(fragment.views(flat), params)
    return into if flat is into else into.copy_(flat)


def scatter(flat: Tensor, fragment: Fragment, params: Sequence[Tensor]) -> None:
    """Write a flat buffer into the parameters; to a device in one transfer."""
    copy_all_(params, fragment.views(flat.to(params[0].device)))


def layout(fragments: Sequence[Fragment]) -> list[list[Any]]:
    """[name, shape] of every parameter, one list a fragment."""
    return [[[name, list(shape)] for name, shape in zip(f.names, f.shapes, strict=True)] for f in fragments]


def same_layout(found: list, fragments: Sequence[Fragment]) -> None:
    """Check that a saved layout is that of `fragments`.

    Raises:
        CheckpointError: names the first parameter that differs.
    """
    expected = layout(fragments)
    if len(found) != len(expected):
        raise CheckpointError(
            f"the checkpoint has {len(found)} fragments, this run {len(expected)}. Resume with the num_fragments and "
            "fragment_pattern that wrote it."
        )
    for index, (theirs, ours) in enumerate(zip(found, expected, strict=True)):
        for their_param, our_param in zip_longest(theirs, ours):
            if their_param != our_param:
                raise CheckpointError(
                    f"fragment {index}: the checkpoint has the parameter {_show(their_param)}, this run {_show(our_param)}. "
                    "Resume with the model and fragment_pattern that wrote it."
                )


def _show(param: list | None) -> str:
    return "no more" if param is None else f"{param[0]} {param[1]}"


def same_structure(found: Any, expected: Any, what: str) -> None:
    """Check that a saved state has the keys of a fresh one, and tensors of its shapes.

    Raises:
        CheckpointError: names the first place where they differ.
    """
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            names = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise CheckpointError(
                f"{what}: the checkpoint has {names}, this run {sorted(expected)}. Resume with the method, codec and "
                "merge that wrote it."
            )
        for key, value in expected.items():
            same_structure(found[key], value, f"{what}, {key}")
    elif isinstance(expected, Tensor) and (
        not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype
    ):
        seen = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise CheckpointError(
            f"{what}: the checkpoint has {seen}, this run {list(expected.shape)} {expected.dtype}. Resume with the model "
            "and settings that wrote it."
        )


def memory(fragments: Sequence[FragmentState]) -> tuple[int, int]:
    """Bytes on the host: of global params, outer state and residuals; and of the largest transfer while it is in flight."""
    kept = [[each.global_params, *tensors_in(each.outer), *tensors_in(each.codec)] for each in fragments]
    copies = 4  # snapshot, outer gradient, payload and mean
    return (
        sum(tensor.nbytes for tensors in kept for tensor in tensors),
        copies * max(each.global_params.nbytes for each in fragments),
    )


@dataclass
class Totals:
    """Counters of a run on this rank."""

    sends: int = 0
    landings: int = 0
    bytes_sent: int = 0
    blocked_s: float = 0.0


class Here:
    """The handle of an arrival that needs no waiting."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival

    def done(self) -> bool:
        return True

    def wait(self) -> Arrival:
        return self._arrival
