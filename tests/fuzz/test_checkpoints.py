"""A short run of the program that damages checkpoints: 3 cases, and more that are marked slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.checkpoints import run_cases


@pytest.mark.parametrize(
    ("cases", "least"),
    [
        (range(3), 1),
        pytest.param(range(3, 24), 8, marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_damaged_checkpoints_are_refused_skipped_or_resumed_exactly(
    cases: range, least: int, tmp_path: Path
) -> None:
    outcomes, faults = run_cases(cases, tmp_path)
    assert faults == {}
    assert outcomes["resumed exactly"] >= least, outcomes
