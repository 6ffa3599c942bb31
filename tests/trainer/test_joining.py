"""A region that comes into a run, with what a script may ask of its Trainer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from tests.trainer.joining import CONFIG, TIMEOUT_S, join


def test_plain(tmp_path: Path) -> None:
    join(tmp_path)


def test_evaluation_on_start(tmp_path: Path) -> None:
    """A newcomer evaluates nothing on start: the others have done so, and are at other work."""
    join(tmp_path, eval_on_start=True, eval_strategy="steps", metric_for_best_model="loss")


def test_evaluation_at_every_step(tmp_path: Path) -> None:
    """The base is of a step at which the others evaluate after they have given it: the newcomer hears of that, too."""
    join(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="loss")


class Rows(IterableDataset[Any]):
    """A stream without an end; `meets(number)` is called before each of its rows."""

    def __init__(self, meets: Callable[[int], None] = lambda number: None) -> None:
        self.meets = meets
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            self.meets(number)
            self.read.append(number)
            ids = torch.tensor([number % 60 + 1, 2, 3, 4])
            yield {"input_ids": ids, "labels": ids}


class Signal(TrainerCallback):
    """Says when a Trainer has made some more steps than when it was told to look."""

    def __init__(self, looks: threading.Event, made: threading.Event, steps: int) -> None:
        self._looks, self._made, self._steps = looks, made, steps
        self._from = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._looks.is_set() and self._from < 0:
            self._from = state.global_step
        if self._from >= 0 and state.global_step >= self._from + self._steps:
            self._made.set()


def test_a_stream_skips_nothing_and_lets_nobody_wait(tmp_path: Path) -> None:
    """A newcomer reads its stream from its beginning, and is a member only when its first batch is there: until then the other
    region makes more steps than it could beside a member that does not train.
    """
    looks, made = threading.Event(), threading.Event()

    def waits(number: int) -> None:
        if number == 0:
            looks.set()
            assert made.wait(TIMEOUT_S), "the other region waits"

    streams = [Rows(), Rows(waits)]
    one, other = join(
        tmp_path,
        data=lambda region: streams[region],
        callbacks=lambda region: [] if region else [Signal(looks, made, 5 * CONFIG.sync_interval)],
    )
    trained = 2 * (other.state.global_step - other._initial_global_step)
    assert len(streams[1].read) in range(trained, trained + 5)  # a batch is read ahead
    assert one.state.global_step > other.state.global_step - other._initial_global_step + 5 * 4
