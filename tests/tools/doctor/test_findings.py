"""A line of the doctor, as the terminal shows it."""

from __future__ import annotations

from hf_cocodc.tools.doctor.facts import WRONG, Finding, lines


def test_long_lines_are_wrapped() -> None:
    """Within 100 columns, below the words; only a command stays in one piece."""
    found = lines(Finding("region 1", WRONG, "word " * 60, "command " * 30))
    assert len(found) == 5 and found[-1].endswith("command ")
    assert all(len(line) <= 100 for line in found[:-1])
    assert {line[:20] for line in found[1:]} == {" " * 20}
