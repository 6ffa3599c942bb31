"""A Trainer that comes into the run of another one, both in this process: a join in a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.coordinator.server import serve_in_thread
from tests.processes.worker import Tokens
from tests.toys import llama

TIMEOUT_S = 90
CONFIG = OuterConfig(sync_interval=4)
BEFORE, AFTER = 6, 8
"""Inner steps of region 0 before the other one starts, and that both make at least once it is a member."""


class Pace(TrainerCallback):
    """Lets region 0 train slowly until the other region is a member, and both end some steps after that."""

    def __init__(self, region: int, starts: threading.Event, is_in: threading.Event) -> None:
        self._region, self._starts, self._is_in = region, starts, is_in
        self._end = 0
        self.first = -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first < 0:
            self.first = state.global_step
        if self._region:
            return
        if state.global_step >= BEFORE:
            self._starts.set()
            if not self._is_in.is_set():
                time.sleep(0.02)
            elif not self._end:
                self._end = state.global_step + AFTER

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._region:
            self._is_in.set()
        if self._end and state.global_step >= self._end:
            control.should_training_stop = True


def join(
    folder: Path,
    kind: type[Trainer] = Trainer,
    config: OuterConfig = CONFIG,
    callbacks: Callable[[int], list[Any]] = lambda region: [],
    data: Callable[[int], Any] = lambda region: Tokens(64, seed=region),
    **arguments: Any,
) -> list[Trainer]:
    """The Trainers of both regions, after a run that region 1 has come into. Fails if one fails, or the models differ."""
    coordinator, starts, is_in = serve_in_thread(), threading.Event(), threading.Event()
    regions = {"count": 1, "max": 2, "min": 1, "run": "join", "timeout_s": 30.0}

    paces = [Pace(region, starts, is_in) for region in range(2)]

    def make(region: int) -> Trainer:
        given = RegionConfig(
            region=region, coordinator=coordinator.address, join=bool(region) or None, **regions
        )
        common = {"max_steps": 4000, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "use_cpu": True}
        common |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "eval_steps": 3}
        common |= {"lr_scheduler_type": "constant", "dataloader_pin_memory": False, "logging_steps": 3}
        return kind(
            model=llama(),
            args=TrainingArguments(output_dir=str(folder), **(common | arguments)),
            train_dataset=data(region),
            eval_dataset=Tokens(4, seed=9),
            callbacks=[paces[region], CoCoDCCallback(config, given), *callbacks(region)],
        )

    def train(trainer: Trainer) -> None:
        try:
            trainer.train()
        finally:
            starts.set()  # nobody waits for a region that has failed
            is_in.set()

    def join_later() -> None:
        assert starts.wait(TIMEOUT_S)
        if not runs[0].done():
            train(other)
        assert paces[1].first > BEFORE - 2, "it did not join"

    one, other = [
        make(region) for region in range(2)
    ]  # TrainingArguments make Accelerate's state anew, for all threads
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(train, one)]
        runs.append(threads.submit(join_later))
        for run in runs:
            run.result(TIMEOUT_S)
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert one.state.global_step == other.state.global_step
    return [one, other]
