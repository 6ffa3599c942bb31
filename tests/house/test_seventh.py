"""A seventh method needs no row in any table of the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = (
    "equalities",
    "engine",
    "snapshot/test_checkpoints.py",
    "parts/test_own.py",
    "trainer/test_matrix.py",
    "training/test_starter.py",
    "tools/plan/test_choice.py",
    "cli/test_plan.py",
)
CHOSEN = "(seventh and not readme) or every_method_is_tried or ten_rows_are_shown"
"""The tests of each method with it, and those that go through all methods."""


@pytest.mark.slow
def test_tests_of_all_methods_take_one_more() -> None:
    """`tests.seventh` adds a function to METHODS; the tests then run with it, and pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "tests.seventh",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-k", CHOSEN, *(f"tests/{each}" for each in TESTS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed and int(passed[1]) >= 62
