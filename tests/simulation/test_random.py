"""Random plans: whatever goes wrong, all regions that land hold the same, and every process ends."""

from dataclasses import replace

import pytest

from .schedules import random_plan, run, shown, shrink
from .world import Plan

PLANS, PORTION = 5000, 500
LANE_PLANS = 200


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


def test_two_regions_of_two_ranks_end_together() -> None:
    plans = [replace(random_plan(seed), regions=2, lanes=2, elastic=False) for seed in range(LANE_PLANS)]
    check(plans)


def test_a_seed_replays() -> None:
    lines: list[list[str]] = [[], []]
    for said in lines:
        run(random_plan(7), said.append)
    assert lines[0] == lines[1] and len(lines[0]) > 3
