"""Faults that came at an unlucky moment: each at many moments, with other delays each time."""

from collections.abc import Iterator
from typing import Any

import pytest

from .schedules import shown
from .world import Fault, Plan, World

_THREE = Plan(seed=0, regions=3, steps=12, interval=4, overlap=2)
_END = 12.5
"""Seconds after which `_THREE` ends, about."""


def _ends(plan: Plan) -> dict[int, list[str]]:
    """How the processes of each region have ended, in order."""
    world = World(plan)
    try:
        world.run()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{shown(plan)}") from error
    found: dict[int, list[str]] = {}
    for process in world.processes:
        assert process.how is not None
        found.setdefault(process.region, []).append(process.how)
    return found


def _moments(first: float, last: float, count: int = 16) -> Iterator[tuple[int, float]]:
    """Pairs of a seed and a moment."""
    for number in range(count):
        yield number, round(first + (last - first) * number / (count - 1), 3)


def _with(plan: Plan, seed: int, *faults: Fault, **news: Any) -> Plan:
    return Plan(**{**vars(plan), **news, "seed": seed, "faults": tuple(sorted(faults))})


@pytest.mark.parametrize("overlap", [0, 2, 4])
def test_a_leave_at_any_step_ends_well_also_in_the_last_round(overlap: int) -> None:
    for seed, at in (*_moments(0.0, 8.0, 8), *_moments(8.0, _END + 3.0, 24)):
        ends = _ends(_with(_THREE, seed, Fault(at, "leave", 2), overlap=overlap))
        assert ends[0] == ends[1] == ["finished"], at
        assert ends[2] in (["left"], ["finished"]), at


def test_two_leave_at_once() -> None:
    for seed, at in _moments(0.0, _END + 1.0, 24):
        ends = _ends(_with(_THREE, seed, Fault(at, "leave", 1), Fault(at + 0.3, "leave", 2)))
        assert ends[0] in (["finished"], ["stopped"]), at
        assert {*ends[1], *ends[2]} <= {"left", "finished"}, at


@pytest.mark.parametrize("is_elastic", [True, False])
def test_a_stop_at_any_step_stops_all_at_one_step(is_elastic: bool) -> None:
    for seed, at in _moments(0.0, _END + 1.0, 24):
        ends = _ends(_with(_THREE, seed, Fault(at, "stop", 1), elastic=is_elastic))
        assert ends[0] == ends[1] == ends[2] and ends[0] in (["stopped"], ["finished"]), at


def test_nobody_trains_on_alone_who_comes_in_while_all_stop() -> None:
    """A newcomer that is announced may be a member by the step at which the others stop: it stops there, too."""
    for seed, at in _moments(2.0, 9.0, 80):
        faults = Fault(2.0, "start", 5, way=1), Fault(at, "stop", 1)
        ends = _ends(_with(_THREE, seed, *faults, steps=40))
        assert ends[0] == ends[1] == ends[2] == ["stopped"], at
        assert ends[5] in (["stopped"], ["over"]), (seed, at, ends[5])


def test_of_two_regions_in_a_storage_either_goes_on_alone() -> None:
    """Also if the other one served as coordinator: whoever goes on with its state decides without it."""
    two = Plan(seed=0, regions=2, steps=12, interval=4, overlap=2, storage=True)
    for seed, at in _moments(2.0, 9.0, 24):
        ends = _ends(_with(two, seed, Fault(at, "kill", seed % 2)))
        assert ends == {seed % 2: ["killed"], 1 - seed % 2: ["finished"]}, (seed, at)


def test_one_that_served_and_stood_still_comes_back_as_a_newcomer() -> None:
    """The other one has gone on alone meanwhile."""
    two = Plan(seed=0, regions=2, steps=60, interval=4, overlap=2, storage=True)
    for seed, at in _moments(2.0, 9.0, 12):
        ends = _ends(_with(two, seed, Fault(at, "freeze", seed % 2, seconds=45.0)))
        assert ends[1 - seed % 2] == ["finished"] and ends[seed % 2] in (["finished"], ["over"]), (
            seed,
            at,
            ends,
        )


def test_joining_a_run_that_is_about_to_end_or_has_ended_ends_at_once() -> None:
    for seed, at in _moments(0.6 * _END, _END + 5.0, 32):
        ends = _ends(_with(_THREE, seed, Fault(at, "start", 5, way=1)))
        assert ends[0] == ends[1] == ends[2] == ["finished"], at
        assert ends[5] in (["over"], ["finished"]), at


def test_a_region_that_is_started_again_after_the_end_hears_so() -> None:
    ends = _ends(_with(_THREE, 1, Fault(30.0, "start", 2, way=1)))
    assert ends[2] == ["finished", "over"]


def test_a_newcomer_comes_in_and_finishes_with_the_others() -> None:
    plan = _with(_THREE, 3, Fault(2.0, "start", 5, way=1), steps=40)
    assert _ends(plan) == {0: ["finished"], 1: ["finished"], 2: ["finished"], 5: ["finished"]}


def test_two_joins_at_once() -> None:
    for seed, gap in _moments(0.0, 2.0):
        joins = Fault(2.0, "start", 4, way=1), Fault(2.0 + gap, "start", 5, way=1)
        ends = _ends(_with(_THREE, seed, *joins, steps=40))
        assert ends == {region: ["finished"] for region in (0, 1, 2, 4, 5)}


def test_a_join_while_the_donor_dies_and_while_another_leaves() -> None:
    for seed, at in _moments(2.0, 14.0):
        faults = Fault(2.0, "start", 5, way=1), Fault(at, "kill", 0), Fault(at + 1.0, "leave", 1)
        ends = _ends(_with(_THREE, seed, *faults, steps=60))
        assert ends == {0: ["killed"], 1: ["left"], 2: ["finished"], 5: ["finished"]}


def test_flapping() -> None:
    for seed in range(8):
        flaps = [
            Fault(3.0 + 3.0 * number, kind, 2, way=1) for number in range(5) for kind in ("kill", "start")
        ]
        ends = _ends(_with(_THREE, seed, *flaps, steps=70))
        assert ends == {0: ["finished"], 1: ["finished"], 2: [*["killed"] * 5, "finished"]}


def test_a_kill_at_any_moment_ends_nothing_but_that_region() -> None:
    for seed, at in _moments(1.6, _END + 1.0, 32):
        ends = _ends(_with(_THREE, seed, Fault(at, "kill", 1)))
        assert ends[0] == ends[2] == ["finished"] and ends[1] in (["killed"], ["finished"]), at


def test_a_region_that_freezes_for_long_comes_back() -> None:
    for seed, at in _moments(2.0, 12.0):
        ends = _ends(_with(_THREE, seed, Fault(at, "freeze", 1, seconds=20.0), steps=60))
        assert set(map(tuple, ends.values())) == {("finished",)}, at


@pytest.mark.parametrize("way", [0, 1, 2])
def test_a_cut_between_two_regions_drops_one_of_them(way: int) -> None:
    for seed, at in _moments(2.0, 10.0, 8):
        ends = _ends(_with(_THREE, seed, Fault(at, "cut", 1, 2, 30.0, way), steps=24))
        assert ends[0] == ["finished"], at


@pytest.mark.parametrize("kind", ["kill_coordinator", "freeze_coordinator", "second_coordinator"])
def test_the_coordinators_death_never_ends_a_fixed_run(kind: str) -> None:
    for seed, at in _moments(2.0, _END, 8):
        for way in (0, 1):
            fault = Fault(at, kind, seconds=8.0, way=way)
            ends = _ends(_with(_THREE, seed, fault, elastic=False))
            assert set(map(tuple, ends.values())) == {("finished",)}, at


@pytest.mark.parametrize("kind", ["kill_coordinator", "freeze_coordinator", "second_coordinator", "twins"])
def test_a_loss_while_there_is_no_coordinator_is_decided_later(kind: str) -> None:
    for seed, at in _moments(2.0, 10.0, 12):
        faults = Fault(at, kind, seconds=6.0, way=seed % 2), Fault(at + 1.0, "kill", 2)
        _ends(_with(_THREE, seed, *faults, steps=24))


def test_a_decision_that_one_member_alone_has_heard() -> None:
    """The coordinator dies with its memory while it tells its decision, at every moment of that."""
    for seed, after in _moments(0.0, 1.2, 40):
        faults = Fault(4.0, "kill", 2), Fault(4.0 + after, "kill_coordinator", seconds=2.0, way=1)
        _ends(_with(_THREE, seed, *faults, steps=24))


@pytest.mark.parametrize("overlap", [0, 2, 4])
def test_a_kill_at_any_moment_stops_a_fixed_run_with_equal_checkpoints(overlap: int) -> None:
    for seed, at in _moments(1.6, _END + 1.0, 32):
        ends = _ends(_with(_THREE, seed, Fault(at, "kill", 1), elastic=False, overlap=overlap))
        assert ends[0] == ends[2] and ends[0] in (["stopped"], ["finished"]), at
        assert ends[0] == ["stopped"] or at > 10.0, at


@pytest.mark.parametrize("kind", ["freeze", "cut"])
def test_a_region_that_is_away_for_long_ends_a_fixed_run(kind: str) -> None:
    """It hears so when it is back. Nobody comes in meanwhile."""
    for seed, at in _moments(2.0, 10.0, 8):
        faults = Fault(at, kind, 2, -1 if kind == "freeze" else 1, 25.0), Fault(at + 12.0, "start", 2)
        ends = _ends(_with(_THREE, seed, *faults, elastic=False))
        assert ends[0] == ["stopped"] and ends[2][1] == "failed", at
        # of two that are cut from each other, either one may go on
        either = {("stopped", "over"), *([("over", "stopped")] if kind == "cut" else [])}
        assert (ends[1][0], ends[2][0]) in either, at


def test_a_fixed_run_whose_coordinator_dies_with_a_region_ends_soon() -> None:
    for seed, at in _moments(2.0, 9.0, 8):
        faults = Fault(at, "kill", 0), Fault(at, "kill_coordinator", seconds=1000.0)
        world = World(_with(_THREE, seed, *faults, elastic=False))
        world.last_fault_at = at
        world.run()
        assert [each.how for each in world.processes] == ["killed", "undecided", "undecided"], at
        assert world.network.now < at + 60.0


@pytest.mark.parametrize("kind", ["kill", "freeze", "kill_coordinator"])
def test_two_regions_of_two_lanes_end_together(kind: str) -> None:
    """FSDP2: a rank that fails ends its region."""
    for seed, at in _moments(1.6, _END, 16):
        fault = Fault(at, kind, 1, seconds=20.0 if kind == "freeze" else 3.0)
        ends = _ends(_with(_THREE, seed, fault, elastic=False, regions=2, lanes=2))
        assert all(len(each) == 2 for each in ends.values())
        if kind == "kill_coordinator":
            assert ends == {0: ["finished"] * 2, 1: ["finished"] * 2}, at


def test_a_second_process_claims_no_place_of_a_member_that_is_about_to_call_again() -> None:
    """All wait for a frozen region while a coordinator with its file is started again."""
    for seed in (202239, *range(24)):
        faults = (
            Fault(6.69, "freeze", 2, seconds=15.41),
            Fault(7.13, "kill_coordinator", seconds=17.28),
            Fault(9.55, "start", 0),
        )
        news: dict[str, Any] = {"regions": 4, "steps": 6, "interval": 2, "fragments": 2, "overlap": 0}
        ends = _ends(_with(_THREE, seed, *faults, **news))
        assert ends[0][0] == "finished", seed


def test_a_leaver_that_dies_while_earlier_calls_need_it() -> None:
    """It is in nobody's roster any more: whoever misses it says so, or it would be missed for ever."""
    for seed, at in ((500958, 9.02), *_moments(5.0, 11.0, 24)):
        faults = Fault(2.75, "leave", 3), Fault(7.53, "kill", 2), Fault(at, "kill", 3)
        coordinator = Fault(6.26, "kill_coordinator", seconds=9.12)
        news: dict[str, Any] = {"regions": 4, "steps": 9, "interval": 3, "fragments": 2, "overlap": 1}
        for each in (faults, (*faults, coordinator)):
            assert _ends(_with(_THREE, seed, *each, **news))[0] in (["finished"], ["stopped"]), at


def test_a_newcomer_that_has_gone_for_the_others_begins_again() -> None:
    """Its connection to the coordinator ends for a while, and another newcomer hears that it has gone."""
    for seed in (700381, *range(12)):
        faults = (
            Fault(20.54, "start", 4, way=1),
            Fault(21.79, "kill", 0),
            Fault(22.11, "start", 0),
            Fault(23.33, "freeze_coordinator", seconds=12.43),
        )
        news: dict[str, Any] = {"steps": 60, "interval": 2, "fragments": 2, "overlap": 0, "step_s": 2.5}
        ends = _ends(_with(_THREE, seed, *faults, **news))
        assert ends[4] == ["finished"] and ends[0] == ["killed", "finished"], seed


def _lost(plan: Plan) -> set[int]:
    """Regions that were lost, once or more often."""
    world = World(plan)
    world.run()
    (run,) = world.coordinators[-1].runs.values()
    return {each.region for decided in run.decisions for each in decided.decision.lost}


@pytest.mark.parametrize("is_auto", [False, True])
def test_regions_that_stand_still_together_call_each_other_late_by_no_second_of_that(is_auto: bool) -> None:
    """As on one host. An interval of two steps takes 1 to 3 s: awake, each waits for the other one for less than 3 s."""
    two = Plan(seed=0, regions=2, steps=12, interval=2, overlap=0, grace_s=4.0, grace_is_auto=is_auto)
    for seed, at in _moments(2.0, 8.0, 24):
        freezes = Fault(at, "freeze", 0, seconds=6.0), Fault(at + 0.5, "freeze", 1, seconds=6.0)
        assert not _lost(_with(two, seed, *freezes)), (seed, at)


def test_whoever_has_waited_for_one_that_is_lost_counts_nobody_else_late() -> None:
    three = Plan(seed=0, regions=3, steps=12, interval=2, overlap=0, grace_s=4.0, grace_is_auto=True)
    for seed, at in _moments(2.0, 8.0, 24):
        assert _lost(_with(three, seed, Fault(at, "freeze", 2, seconds=15.0))) <= {2}, (seed, at)


def test_a_region_that_leaves_loses_nobody() -> None:
    """It makes its last steps without training, so the others come to each transfer an interval later: 2 to 6 s."""
    three = Plan(seed=0, regions=3, steps=16, interval=4, overlap=0, grace_s=3.0)
    for seed, at in _moments(2.0, 9.0, 24):
        assert not _lost(_with(three, seed, Fault(at, "leave", 2))), (seed, at)
