"""A region that comes into a run, with what a script may ask of its Trainer."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.joining import join


def test_plain(tmp_path: Path) -> None:
    join(tmp_path)


def test_evaluation_on_start(tmp_path: Path) -> None:
    """A newcomer evaluates nothing on start: the others have done so, and are at other work."""
    join(tmp_path, eval_on_start=True, eval_strategy="steps", metric_for_best_model="loss")


def test_evaluation_at_every_step(tmp_path: Path) -> None:
    """The base is of a step at which the others evaluate after they have given it: the newcomer hears of that, too."""
    join(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss")
