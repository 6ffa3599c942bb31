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
COMMON: dict[str, Any] = {
    "max_steps": 4000,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 3,
    "eval_steps": 3,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "use_cpu": True,
}
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
        if not self._region and state.global_step >= BEFORE:
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
    coordinator = serve_in_thread()
    starts, is_in, has_ended = threading.Event(), threading.Event(), threading.Event()
    regions = {"count": 1, "max": 2, "min": 1, "run": "join", "timeout_s": 60.0, "start_timeout_s": 20.0}

    def build(region: int) -> tuple[Trainer, Pace]:
        own = RegionConfig(
            region=region, coordinator=coordinator.address, join=bool(region) or None, **regions
        )
        pace = Pace(region, starts, is_in)
        trainer = kind(
            model=llama(),
            args=TrainingArguments(output_dir=str(folder), **(COMMON | arguments)),
            train_dataset=data(region),
            eval_dataset=Tokens(4, seed=9),
            callbacks=[pace, CoCoDCCallback(config, own), *callbacks(region)],
        )
        return trainer, pace

    def train(region: int) -> None:
        assert region == 0 or (starts.wait(TIMEOUT_S) and not has_ended.is_set()), "region 0 has failed"
        try:
            made[region][0].train()
        finally:
            has_ended.set()  # nobody waits for a region that has failed
            starts.set()
            is_in.set()

    # both before one of them trains: TrainingArguments reset Accelerate's state of the process
    made = [build(0), build(1)]
    with ThreadPoolExecutor(2) as threads:
        for run in [threads.submit(train, 0), threads.submit(train, 1)]:
            run.result(TIMEOUT_S)
    (one, _), (other, pace) = made
    assert pace.first > BEFORE - 2, "it did not join"
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    steps = one.state.global_step, other.state.global_step
    assert steps[0] == steps[1], steps
    return [one, other]
