"""Random plans: whatever goes wrong, all regions that land hold the same, and every process ends."""

from dataclasses import replace

import pytest

from .schedules import random_plan, run, shown, shrink
from .world import Plan

PLANS, PORTION = 1500, 500
LANE_PLANS = 200
STORAGE_PLANS, MORE = 60, 300


def check(plans: list[Plan]) -> None:
    events, seconds = 0, 0.0
    for plan in plans:
        outcome = run(plan)
        events, seconds = events + outcome.num_events, seconds + outcome.seconds
        if outcome.failure is not None:
            smallest = shrink(plan)
            pytest.fail(f"{outcome.failure[-1000:]}\nThe smallest plan that fails:\n{shown(smallest)}")
    print(f"{len(plans)} plans, {events} events, {events / seconds:.0f} events a second")  # noqa: T201


def test_random_plans() -> None:
    check([random_plan(seed) for seed in range(PORTION)])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(PORTION, PLANS, PORTION))
def test_more_random_plans(first: int) -> None:
    check([random_plan(seed) for seed in range(first, first + PORTION)])


LANE_KINDS = ("kill", "freeze", "cut", "split", "kill_coordinator", "freeze_coordinator")


def lane_plan(seed: int) -> Plan:
    """Two or three regions of two ranks with a shard each."""
    plan = random_plan(seed)
    faults = tuple(fault for fault in plan.faults if fault.kind in LANE_KINDS)
    return replace(plan, regions=min(plan.regions, 3), lanes=2, elastic=seed % 4 > 0, faults=faults)


def test_regions_of_two_ranks_decide_as_one() -> None:
    check([lane_plan(seed) for seed in range(LANE_PLANS)])


def storage_plan(seed: int) -> Plan:
    """One whose regions meet in a storage: one of them serves as coordinator, and others take over from it."""
    return replace(random_plan(seed), storage=True)


def test_whoever_holds_the_lease_decides_alone() -> None:
    check([storage_plan(seed) for seed in range(STORAGE_PLANS)])


@pytest.mark.slow
def test_whoever_holds_the_lease_decides_alone_in_more_plans() -> None:
    check([storage_plan(seed) for seed in range(STORAGE_PLANS, MORE)])


def test_a_seed_replays() -> None:
    lines: list[list[str]] = [[], []]
    for said in lines:
        run(random_plan(7), said.append)
    assert lines[0] == lines[1] and len(lines[0]) > 3
