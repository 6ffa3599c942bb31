"""What a schedule continues from."""

from __future__ import annotations

from typing import Any

import pytest

from hf_cocodc.engine.synchronizer import Agenda
from hf_cocodc.errors import CheckpointError
from hf_cocodc.parts import schedules
from hf_cocodc.parts.schedules import AgreedStats, Land, Schedule, Send

NUM_FRAGMENTS = 3
OURS: dict[str, Schedule] = {
    "every": schedules.every(6, overlap_steps=2),
    "staggered": schedules.staggered(6, overlap_steps=4),
    "rounds": schedules.rounds(4),
    "adaptive": schedules.adaptive(6, overlap_steps=2, sends_per_interval=3),
}


def agenda_of(schedule: Schedule) -> Agenda:
    agenda = Agenda(schedule)
    agenda.begin(NUM_FRAGMENTS, 0)
    return agenda


def run(agenda: Agenda, steps: range) -> list[Any]:
    return [agenda.events(step, AgreedStats()) for step in steps]


@pytest.mark.parametrize("schedule", OURS.values(), ids=OURS)
def test_ours_go_on_from_every_step(schedule: Schedule) -> None:
    """As if nothing had been between; a state of other entries is another schedule's."""
    whole, states = agenda_of(schedule), []
    found = []
    for step in range(1, 20):
        found.append(whole.events(step, AgreedStats()))
        states.append(whole.state)
    for step, state in enumerate(states, 1):
        again = agenda_of(schedule)
        again.load(state)
        assert run(again, range(step + 1, 20)) == found[step:]
        with pytest.raises(CheckpointError, match="the schedule's state"):
            again.load(state | {"more": 1})


class Bursts:
    """A schedule of a user's own: a burst of sends every so often, later and later; it counts in its own way."""

    back_to_back = False
    overlaps = False

    def init(self, num_fragments: int, inner_step: int = 0) -> dict[str, Any]:
        return {
            "sent": 0,
            "num_fragments": "all",
            "pace": 1.5,
            "last": None,
            "is_calm": False,
            "of": {},
            "debt": -1,
        }

    def events(
        self, inner_step: int, stats: AgreedStats, state: dict[str, Any]
    ) -> tuple[tuple[Send | Land, ...], dict[str, Any]]:
        if inner_step > 1000:
            raise AssertionError("no run is as long")
        if inner_step < state["pace"]:
            return (), state
        told = {
            "sent": state["sent"] + 1,
            "pace": 2 * state["pace"],
            "last": [inner_step, None],
            "is_calm": True,
        }
        events = Send(0), Land(0, inner_step)
        return events, state | told | {
            "of": {**state["of"], str(inner_step): -0.5},
            "debt": state["debt"] - 1,
        }

    def next_event(self, inner_step: int, state: dict[str, Any]) -> int:
        return inner_step + 1


def test_a_schedule_of_a_users_own_goes_on_from_any_json() -> None:
    """Its state may hold numbers below zero, fractions, nothing at all and more entries than at first."""
    whole = agenda_of(Bursts())
    found = run(whole, range(1, 10))
    again = agenda_of(Bursts())
    again.load(whole.state)
    assert run(again, range(10, 60)) == run(whole, range(10, 60))
    assert found[1] == (Send(0), Land(0, 2))
    with pytest.raises(CheckpointError, match="the schedule's state"):
        again.load({"sent": 0})
