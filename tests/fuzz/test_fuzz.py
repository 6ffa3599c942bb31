"""A short run of the fuzzers; `python -m tests.fuzz` is the full one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.fuzz import harness
from tests.fuzz.inputs import KINDS

SHORT = {"recipes": 60, "sets": 40, "arguments": 60}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("default")
def test_wrong_inputs_are_refused_in_one_paragraph(kind: str) -> None:
    """Recipes that are damaged, values for --set and arguments: exit code 2 and one paragraph, or they work."""
    cases, _ = KINDS[kind]
    faults = harness.run(cases, range(SHORT[kind]))
    assert not faults, f"python -m tests.fuzz {kind} --case {min(faults)}\n{faults[min(faults)]}"


def says(*lines: str, code: int) -> Callable[[Any], int]:
    def main(words: Any) -> int:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        return code

    return main


def fails(words: Any) -> int:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("main", "fault"),
    [
        (says("error: no.", code=2), None),
        (says("error: no.", code=1), "exit code 1"),
        (says("no.", code=2), "did not say one paragraph"),
        (says("error: no.", "and why.", code=2), "did not say one paragraph"),
        (says("error: " + "x" * 5000, code=2), "characters"),
        (fails, "KeyError: 'x'"),
    ],
)
def test_the_fuzzers_see_faults(main: Callable[[Any], int], fault: str | None) -> None:
    """Tracebacks, other exit codes, silence, several lines and endless ones."""
    with mock.patch("hf_cocodc.cli.main.main", main), harness.stubbed():
        found = harness.fault([], {})
    assert found is None if fault is None else fault in str(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_made_from_its_number(kind: str) -> None:
    """The same case again, or a fault that was found could not be found again."""
    cases, _ = KINDS[kind]
    with harness.stubbed():
        assert cases(3) == cases(3) != cases(4)
