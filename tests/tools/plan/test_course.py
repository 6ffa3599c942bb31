"""The course of a training: real schedules, and what they cost on a line."""

from __future__ import annotations

import pytest

from hf_cocodc.parts.schedules import Schedule, adaptive, every, rounds, staggered
from hf_cocodc.tools.plan.course import Cargo, Course, Work, course
from hf_cocodc.tools.plan.forecast import SerialLine

STEP_S = 0.1
H = 20


def on(schedule: Schedule, transfer_s: float, fragments: int = 1, **costs: float) -> Course:
    """A course on which each fragment's transfer takes this time."""
    works = [Work([Cargo(1000)], **costs) for _ in range(fragments)]
    return course(schedule, H, works, SerialLine(1000 / transfer_s if transfer_s else 1e30), STEP_S)


def test_without_overlap_training_waits_for_each_transfer() -> None:
    """DiLoCo: H steps, then the transfer."""
    found = on(every(H), 1.0)
    assert found.utilization == pytest.approx(2 / 3)
    assert found.blocked == pytest.approx(1 / 3)
    assert found.bytes_per_s == pytest.approx(1000 / 3)
    assert (found.staleness, found.needs, found.in_flight, found.sends) == (0, 10, 1, 1)


def test_overlap_hides_a_transfer_up_to_its_length() -> None:
    """Streaming: tau steps hide tau times their seconds; the rest is waited for."""
    assert on(staggered(H, 5), 0.5, fragments=2).utilization == pytest.approx(1.0)
    late = on(staggered(H, 5), 0.8, fragments=2)
    assert late.utilization == pytest.approx(2.0 / 2.6)
    assert (late.staleness, late.needs, late.sends) == (5, 8, 2)


@pytest.mark.parametrize("schedule", [every(H, H), every(H, H, primed=True), rounds(H)])
def test_a_delay_of_one_round_hides_a_round(schedule: Schedule) -> None:
    """CO2, Eager, DiLoCoX: a transfer has H steps; one that takes twice as long halves the speed."""
    assert on(schedule, 2.0).utilization == pytest.approx(1.0)
    found = on(schedule, 4.0)
    assert found.utilization == pytest.approx(0.5)
    assert (found.staleness, found.in_flight) == (H, 2)


def test_what_training_does_itself_counts_too() -> None:
    """Sends and landings take the training thread's time, and block on nothing."""
    found = on(every(H), 0.0, send_s=0.3, land_s=0.2)
    assert found.utilization == pytest.approx(2.0 / 2.5)
    assert found.blocked == 0


def test_an_adaptive_schedule_follows_the_line() -> None:
    """CoCoDC: tau and the number of sends come from the times that the line gives, as in a run."""
    slow, fast = (on(adaptive(H, utilization=0.4), seconds, fragments=2) for seconds in (0.4, 0.1))
    assert slow.staleness == slow.needs == 4
    assert slow.sends == pytest.approx(2, rel=0.15)
    assert fast.staleness == 1
    assert fast.sends == pytest.approx(8, rel=0.3)  # 0.4 x 20 x 0.1 / 0.1, every second step
    assert fast.utilization == pytest.approx(1.0)
