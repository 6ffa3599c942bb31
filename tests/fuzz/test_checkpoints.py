"""A short run of the program that damages checkpoints: 6 cases, and 40 more that are marked slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.checkpoints import run_cases


@pytest.mark.parametrize(("first", "count"), [(0, 3), pytest.param(3, 43, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_refused_skipped_or_resumed_exactly(
    first: int, count: int, tmp_path: Path
) -> None:
    outcomes, faults = run_cases(range(first, first + count), tmp_path)
    assert faults == {}
    assert outcomes["resumed exactly"] >= count // 2, outcomes
