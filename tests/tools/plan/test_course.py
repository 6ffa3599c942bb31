"""The course of a training: what it costs on a line."""

from __future__ import annotations

import pytest

from hf_cocodc.tools.plan.course import Cargo, Course, Rhythm, Work, course
from hf_cocodc.tools.plan.forecast import SerialLine

STEP_S = 0.1
H = 20


def on(rhythm: Rhythm, transfer_s: float, fragments: int = 1, late: float = 1.0, **costs: float) -> Course:
    """A course on which each fragment's transfer takes this time."""
    works = [Work([Cargo(1000)], **costs) for _ in range(fragments)]
    return course(rhythm, works, SerialLine(1000 / transfer_s if transfer_s else 1e30), STEP_S, late)


def test_without_overlap_training_waits_for_each_transfer() -> None:
    """DiLoCo: H steps, then the transfer; it takes no longer than by itself."""
    for late in (1.0, 1.3):
        found = on(Rhythm(H), 1.0, late=late)
        assert found.utilization == pytest.approx(2 / 3)
        assert found.blocked == pytest.approx(1 / 3)
        assert found.bytes_per_s == pytest.approx(1000 / 3)
        assert (found.staleness, found.needs, found.in_flight) == (0, 10, 1)


def test_overlap_hides_a_transfer_up_to_its_length() -> None:
    """Streaming: tau steps hide tau times their seconds; the rest is waited for."""
    two = Rhythm(H, 2, together=False, overlap=5)
    assert on(two, 0.5, fragments=2).utilization == pytest.approx(1.0)
    late = on(two, 0.8, fragments=2)
    assert late.utilization == pytest.approx(2.0 / 2.6)
    assert (late.staleness, late.needs) == (5, 8)
    assert late.slowest_s == pytest.approx(0.8)
    slower = on(two, 0.8, fragments=2, late=1.5)
    assert slower.utilization == pytest.approx(2.0 / 3.4) and slower.slowest_s == pytest.approx(0.8)


def test_fragments_that_are_sent_together_wait_for_each_other() -> None:
    found = on(Rhythm(H, overlap=5), 0.5, fragments=2)
    assert found.utilization == pytest.approx(2.0 / 2.5)
    assert (found.in_flight, found.needs) == (2, 10)


def test_a_delay_of_one_round_hides_a_round() -> None:
    """CO2, Eager, DiLoCoX: a transfer has H steps; one that takes twice as long halves the speed."""
    assert on(Rhythm(H, overlap=H), 2.0).utilization == pytest.approx(1.0)
    found = on(Rhythm(H, overlap=H), 4.0)
    assert found.utilization == pytest.approx(0.5)
    assert (found.staleness, found.in_flight) == (H, 2)


def test_what_training_does_itself_counts_too() -> None:
    """Sends and landings take the training thread's time, and block on nothing."""
    found = on(Rhythm(H), 0.0, send_s=0.3, land_s=0.2)
    assert found.utilization == pytest.approx(2.0 / 2.5)
    assert found.blocked == 0
