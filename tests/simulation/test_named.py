"""Schedules with names: each fault that has been found once, or that the rules were made for."""

from dataclasses import replace

import pytest

from .schedules import shown
from .world import Fault, Plan, World

SEEDS = 20
"""Each plan happens with so many different delays."""

ENDS_WELL = {"finished", "left", "over", "killed"}

PLANS: dict[str, Plan] = {
    "nothing goes wrong": Plan(seed=0),
    "a region is killed": Plan(seed=0, faults=(Fault(5.0, "kill", 1),)),
    "two are killed at once": Plan(seed=0, regions=4, faults=(Fault(5.0, "kill", 1), Fault(5.2, "kill", 2))),
    "a leave in the last round": Plan(seed=0, steps=20, interval=10, step_s=0.4, faults=(Fault(7.0, "leave", 2),)),
    "a leave at the last step": Plan(seed=0, steps=9, overlap=3, step_s=0.4, faults=(Fault(3.2, "leave", 2),)),
    "all but one leave": Plan(seed=0, faults=(Fault(4.0, "leave", 1), Fault(4.1, "leave", 2))),
    "a leaver is killed": Plan(seed=0, faults=(Fault(4.0, "leave", 1), Fault(6.0, "kill", 1))),
    "a region joins": Plan(seed=0, steps=24, faults=(Fault(3.0, "start", 5, way=1),)),
    "two join at once": Plan(seed=0, steps=24, faults=(Fault(3.0, "start", 4, way=1), Fault(3.1, "start", 5, way=1))),
    "a region joins while another leaves": Plan(
        seed=0, steps=24, faults=(Fault(3.0, "start", 5, way=1), Fault(5.0, "leave", 0))
    ),
    "a region joins while the run is about to end": Plan(seed=0, faults=(Fault(10.5, "start", 5, way=1),)),
    "a region joins after the end": Plan(seed=0, faults=(Fault(40.0, "start", 5, way=1),)),
    "the donor is killed": Plan(
        seed=0, steps=24, faults=(Fault(3.0, "start", 5, way=1), Fault(4.5, "kill", 0))
    ),
    "a newcomer is killed": Plan(seed=0, steps=24, faults=(Fault(3.0, "start", 5, way=1), Fault(7.0, "kill", 5))),
    "a region is started again": Plan(
        seed=0, steps=24, faults=(Fault(4.0, "kill", 1), Fault(5.0, "start", 1, way=0))
    ),
    "a leaver is killed in its last transfer": Plan(
        seed=3445, regions=2, steps=6, interval=2, fragments=2, overlap=2,
        faults=(
            Fault(1.15, "start", 5, way=1), Fault(1.52, "leave", 0), Fault(3.76, "leave", 1), Fault(5.65, "kill", 0)
        ),
    ),
    "a region flaps": Plan(
        seed=0,
        steps=40,
        faults=tuple(Fault(3.0 * n + d, kind, 1, way=1) for n in (1, 2, 3, 4) for d, kind in ((0.0, "kill"), (0.2, "start"))),
    ),
    "the coordinator is killed, and keeps its file": Plan(
        seed=0, faults=(Fault(4.0, "kill_coordinator", seconds=4.0), Fault(5.0, "kill", 1))
    ),
    "the coordinator is killed, and forgets": Plan(
        seed=0, faults=(Fault(4.0, "kill_coordinator", seconds=4.0, way=1), Fault(9.0, "kill", 1))
    ),
    "the coordinator is killed, and forgets a run that needs no decision": Plan(
        seed=0, faults=(Fault(4.0, "kill_coordinator", seconds=4.0, way=1),)
    ),
    "the coordinator is frozen": Plan(
        seed=0, faults=(Fault(4.0, "freeze_coordinator", seconds=20.0), Fault(5.0, "kill", 1))
    ),
    "the coordinator forgets while a region comes in": Plan(
        seed=0, steps=60, step_s=2.0,
        faults=(Fault(3.0, "start", 5, way=1), Fault(4.0, "kill_coordinator", seconds=3.0, way=1)),
    ),
    "an outage, while a region comes in, that one member alone sees": Plan(
        seed=0, steps=60, step_s=2.0, faults=(Fault(2.5, "cut", 1, -1, 12.0), Fault(5.0, "start", 5, way=1))
    ),
    "a decision that one member alone has heard": Plan(
        seed=0,
        regions=4,
        faults=(
            Fault(4.9, "cut", 1, -1, 12.0, 2),
            Fault(5.0, "kill", 3),
            Fault(5.6, "kill_coordinator", seconds=1.0),
        ),
    ),
    "a report is lost in an outage": Plan(
        seed=0, faults=(Fault(5.0, "kill", 1), Fault(5.1, "kill_coordinator", seconds=3.0))
    ),
    "two coordinators at once": Plan(
        seed=0, steps=30, faults=(Fault(4.0, "second_coordinator", seconds=24.0), Fault(14.0, "kill", 1))
    ),
    "two coordinators with copies of one file": Plan(
        seed=0, steps=40, faults=(Fault(4.0, "twins", seconds=30.0), Fault(8.0, "kill", 1))
    ),
    "two coordinators with copies of one file, and two regions": Plan(
        seed=0, regions=2, steps=40, faults=(Fault(4.0, "twins", seconds=30.0), Fault(8.0, "cut", 0, 1, 12.0))
    ),
    "two coordinators with copies of one file, while regions join and leave": Plan(
        seed=0, regions=4, steps=60, step_s=2.0,
        faults=(Fault(4.0, "twins", seconds=30.0), Fault(6.0, "start", 5, way=1), Fault(7.0, "leave", 2))
    ),
    "the decision of a loss names a region that has left meanwhile": Plan(
        seed=3010738,
        steps=60,
        interval=2,
        fragments=2,
        step_s=2.5,
        faults=(
            Fault(0.96, "leave", 0),
            Fault(11.11, "cut", 1, seconds=10.71),
            Fault(16.26, "cut", 1, 2, seconds=7.66, way=1),
        ),
    ),
    "two coordinators, and each announces a change of the same number": Plan(
        seed=1013575,
        regions=3,
        steps=60,
        step_s=2.5,
        interval=4,
        fragments=1,
        overlap=1,
        faults=(
            Fault(4.96, "second_coordinator", 1, seconds=9.81, way=1),
            Fault(8.28, "kill", 1),
            Fault(15.9, "start", 1),
            Fault(19.02, "second_coordinator", 2, 0, 18.26, 2),
            Fault(21.38, "kill", 2),
        ),
    ),
    "a region that has left still had a part in a transfer that loses another": Plan(
        seed=30030245,
        regions=5,
        steps=12,
        step_s=0.4,
        interval=2,
        fragments=2,
        overlap=2,
        faults=(
            Fault(1.29, "leave", 4),
            Fault(3.58, "kill_coordinator", 0, 2, 5.93, 2),
            Fault(4.54, "kill", 1),
            Fault(5.52, "kill_coordinator", 1, seconds=7.87),
        ),
    ),
    "all are killed and started again while a newcomer comes in": Plan(
        seed=0, steps=60, step_s=2.0,
        faults=(Fault(3.0, "start", 5, way=1), *(Fault(9.0, "kill", each) for each in range(3)),
                *(Fault(10.0, "start", each) for each in range(3)))
    ),
    "all are killed and started again": Plan(seed=0, faults=(Fault(5.0, "crash", seconds=2.0),)),
    "a coordinator with the file of an earlier run": Plan(
        seed=0, steps=30, faults=(Fault(5.0, "crash", seconds=2.0), Fault(20.0, "kill_coordinator", seconds=1.0, way=2))
    ),
    "two regions freeze in one transfer": Plan(
        seed=0, regions=4, steps=20, faults=(Fault(5.0, "freeze", 1, seconds=30.0), Fault(5.1, "freeze", 2, seconds=30.0))
    ),
    "reporters die after they have reported": Plan(
        seed=0, regions=4, steps=20,
        faults=(Fault(5.0, "freeze", 3, seconds=7.0), Fault(5.1, "kill", 2), Fault(6.3, "kill", 0), Fault(6.4, "kill", 1))
    ),
    "the coordinator is killed while two regions are cut from each other": Plan(
        seed=0, steps=30, faults=(Fault(5.0, "cut", 0, 1, 20.0), Fault(5.4, "kill_coordinator", seconds=0.5))
    ),
    "a region freezes for a moment": Plan(seed=0, faults=(Fault(5.0, "freeze", 1, seconds=3.0),)),
    "a region freezes for long": Plan(seed=0, steps=40, faults=(Fault(5.0, "freeze", 1, seconds=20.0),)),
    "two regions are cut from each other": Plan(seed=0, steps=40, faults=(Fault(5.0, "cut", 0, 1, 20.0),)),
    "two are cut one way": Plan(seed=0, steps=40, faults=(Fault(5.0, "cut", 0, 1, 20.0, 1),)),
    "all stop": Plan(seed=0, steps=30, faults=(Fault(5.0, "stop", 1),)),
    "a loss while all stop": Plan(seed=0, steps=30, faults=(Fault(5.0, "stop", 1), Fault(5.5, "kill", 2))),
    "a stop while one leaves": Plan(seed=0, steps=12, interval=4, faults=(Fault(8.35, "leave", 1), Fault(9.5, "stop", 0))),
    "a loss in the last transfer": Plan(seed=0, steps=3, interval=4, step_s=0.4, faults=(Fault(2.5, "kill", 1),)),
    "the coordinator is dead from the beginning to the end of a fixed run": Plan(
        seed=0, elastic=False, faults=(Fault(2.0, "kill_coordinator", seconds=30.0),)
    ),
    "a fixed run loses a region": Plan(seed=0, elastic=False, faults=(Fault(5.0, "kill", 1),)),
    "two regions of two ranks lose one": Plan(
        seed=0, regions=2, lanes=2, elastic=False, faults=(Fault(5.0, "kill", 1),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_named_plan(name: str) -> None:
    for seed in {PLANS[name].seed, *range(SEEDS)}:
        plan = replace(PLANS[name], seed=seed)
        said: list[str] = []
        world = World(plan, said.append)
        try:
            world.run()
            # a newcomer begins again with the next run
            ends_all = not (plan.loses_file or "again while a newcomer" in name)
            ends = {each.how for each in world.processes if each.takes_part or ends_all}
            allowed = ENDS_WELL | ({"stopped"} if "stop" in name or "leave" in name else set())
            allowed |= {"undecided"} if plan.loses_file else set()
            # where a loss ends the run, all who are left stop with a checkpoint
            allowed |= set() if plan.elastic else {"stopped"}
            # with two coordinators, or cut in two, nobody can promise more than equal results
            if not any(each.kind in ("second_coordinator", "twins") for each in plan.faults):
                assert ends <= allowed, [(each.region, each.how, each.why) for each in world.processes]
        except AssertionError as error:
            pytest.fail(f"{error}\n{shown(plan)}\n" + "\n".join(said))


def test_a_run_that_needs_no_decision_needs_no_coordinator_with_its_file() -> None:
    world = World(PLANS["the coordinator is killed, and forgets a run that needs no decision"])
    world.run()
    assert {each.how for each in world.processes} == {"finished"}


def test_a_run_that_needs_a_decision_of_a_coordinator_without_its_file_stops_with_checkpoints() -> None:
    world = World(PLANS["the coordinator is killed, and forgets"])
    world.run()
    assert [each.how for each in world.processes] == ["undecided", "killed", "undecided"]


def test_fixed_run_needs_no_coordinator() -> None:
    world = World(PLANS["the coordinator is dead from the beginning to the end of a fixed run"])
    world.run()
    assert {each.how for each in world.processes} == {"finished"}
    assert world.network.now < 60.0


def test_of_two_newcomers_of_a_region_one_comes_in() -> None:
    """The second came while its coordinator, which had just come back, had not heard of the first yet (seed 20014649)."""
    start = Fault(10.04, "start", 4, way=1)
    faults = (start, Fault(10.29, "kill_coordinator", seconds=10.57), start._replace(at=13.3))
    for seed in {20014649, *range(SEEDS)}:
        world = World(Plan(seed=seed, regions=2, steps=60, step_s=2.5, interval=2, faults=faults))
        world.run()
        assert sorted(each.how or "" for each in world.processes) == ["failed", *["finished"] * 3]
