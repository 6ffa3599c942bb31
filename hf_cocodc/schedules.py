"""When a fragment is sent and when it lands. Integers only; no torch.

A schedule is two pure functions. Every region calls them with the same arguments, so every region gets the same events:
a region that sent while another did not would wait for ever. Sends come before landings of the same step: with a delay
of one round both fall on one step, and landing first would reset the local params, making every outer gradient zero.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

State = dict[str, Any]
"""A schedule's state: JSON-able, equal in all regions, saved in checkpoints."""


class Send(NamedTuple):
    """Take a snapshot of `fragment` and start the mean of its outer gradient over the regions."""

    fragment: int


class Land(NamedTuple):
    """Wait for the transfer of `fragment` that left after inner step `sent_at`, and apply it."""

    fragment: int
    sent_at: int


class AgreedStats(NamedTuple):
    """Measurements that every region holds with equal value, because they rode on earlier transfers.

    Attributes:
        step_time_s: seconds of an inner step, the slowest region's; 0 until known.
        sync_time_s: seconds to synchronise one fragment, the slowest region's; 0 until known.
    """

    step_time_s: float = 0.0
    sync_time_s: float = 0.0


class Schedule(Protocol):
    """Decides the events of an inner step from values all regions share."""

    def init(self, num_fragments: int) -> State:
        """State before inner step 1. Called once, at the start of training."""
        ...

    def events(
        self, inner_step: int, stats: AgreedStats, state: State
    ) -> tuple[tuple[Send | Land, ...], State]:
        """Events after inner step `inner_step` (from 1), all sends before all landings, and the next state."""
        ...


class _Periodic:
    """Fragments sent at fixed steps and landed `overlap_steps` later."""

    def __init__(self, due: Callable[[int, int], Iterable[int]], overlap_steps: int) -> None:
        self._due = due
        self._overlap_steps = overlap_steps

    def init(self, num_fragments: int) -> State:
        return {"num_fragments": num_fragments, "in_flight": []}

    def events(
        self, inner_step: int, stats: AgreedStats, state: State
    ) -> tuple[tuple[Send | Land, ...], State]:
        due = [Send(fragment) for fragment in self._due(inner_step, state["num_fragments"])]
        if not due and not state["in_flight"]:
            return (), state
        in_flight = state["in_flight"] + [[send.fragment, inner_step] for send in due]
        landing = [Land(*entry) for entry in in_flight if entry[1] + self._overlap_steps == inner_step]
        flying = [entry for entry in in_flight if entry[1] + self._overlap_steps > inner_step]
        return (*due, *landing), {**state, "in_flight": flying}


def every(sync_interval: int, overlap_steps: int = 0) -> Schedule:
    """Every fragment is sent each `sync_interval` (H) inner steps and lands `overlap_steps` (tau) later.

    DiLoCo (2311.08105) has tau = 0; a delay of one round (CO2, DiLoCoX, Eager updates) has tau = H.
    """

    def due(step: int, num_fragments: int) -> Iterable[int]:
        return range(num_fragments) if step % sync_interval == 0 else ()

    return _Periodic(due, overlap_steps)


def staggered(sync_interval: int, overlap_steps: int) -> Schedule:
    """Fragment p of P is sent when (t - p H // P) mod H = 0, first at t = H + p H // P (Streaming DiLoCo, 2501.18512).

    Example of the paper, H = 100, P = 2: fragment 0 at 100, 200, ... and fragment 1 at 150, 250, ...
    """

    def due(step: int, num_fragments: int) -> list[int]:
        offsets = ((p, p * sync_interval // num_fragments) for p in range(num_fragments))
        return [
            p
            for p, offset in offsets
            if step >= sync_interval + offset and (step - offset) % sync_interval == 0
        ]

    return _Periodic(due, overlap_steps)
