"""A region that comes into a run, with what a script may ask of its Trainer."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.joining import join


def test_plain(tmp_path: Path) -> None:
    join(tmp_path)


def test_evaluation_on_start(tmp_path: Path) -> None:
    """A newcomer evaluates nothing on start: the others have done so, and are at other work."""
    join(tmp_path, eval_on_start=True, eval_strategy="steps", metric_for_best_model="loss")
