"""What `hf-cocodc train` shows of a run while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_cocodc.cli.display import Display
from hf_cocodc.run.journal import Journal


def test_a_new_run_does_not_show_the_journal_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file stays in its place until the new run has begun."""
    path = tmp_path / "journal.jsonl"
    Journal(path).write("log", step=90, loss=1.0)
    display = Display([0], [path], 100)
    display.update()
    assert display.step == 0
    assert not display.has_trained
    Journal(path).write("log", step=20, loss=2.0)
    display.update()
    assert display.step == 20
    assert display.has_trained
    assert "loss region 0: 1.000" not in capsys.readouterr().out
