"""A region's script for the tests of losses: a plain loop, or Trainer, at a constant pace. It may end itself at a given point.

Argument: a `Task` as JSON. The environment says which region this is, and the name of its DIARY. With FAULT=POINT:NUMBER the
process kills itself when it comes to POINT (see `POINTS`) for the NUMBER-th time since training began.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from tests.processes.coming_worker import HURRY
from tests.processes.worker import Tokens
from tests.toys import batch, llama


def always(*args: Any) -> bool:
    return True


def tells(own: torch.Tensor, what: str) -> bool:
    """Whether a region swaps trailers. (Then it swaps that it has the result.)"""
    return own.dtype is torch.float64


def says_have(own: torch.Tensor, what: str) -> bool:
    return own.dtype is torch.float32


def sends_have(region: int, index: int | None, operation: str, memory: torch.Tensor, *rest: Any) -> bool:
    return (index, operation, memory.numel()) == (None, "send", 4)


POINTS: dict[str, tuple[str, str, str, Callable[..., bool]]] = {
    "before a send": ("hf_cocodc.engine.traffic", "Traffic", "send", always),
    "in a transfer": ("hf_cocodc.net.view", "View", "begin_swap", tells),
    "before its haves": ("hf_cocodc.net.view", "View", "begin_swap", says_have),
    "between its haves": ("hf_cocodc.net.view", "View", "_start", sends_have),
    "after a landing": ("hf_cocodc.engine.traffic", "Traffic", "land", always),
    "in finish": ("hf_cocodc.engine.traffic", "Traffic", "end", always),
    "in a save": ("hf_cocodc.engine.synchronizer", "Synchronizer", "state_dict", always),
    "while it gives its base": ("hf_cocodc.snapshot.donor", "Donation", "_send", always),
    "before it connects to a newcomer": ("hf_cocodc.link.tcp", "TcpLink", "_connect_soon", always),
}
"""Module, class and method, and which of its calls count."""
AFTER = {"in a transfer", "between its haves", "after a landing", "in a save"}
"""Points behind the call; the others lie before it."""
EVAL_ROWS = 32
training = threading.Event()
"""Set once training has begun."""


@dataclass(frozen=True)
class Task:
    """What every region does.

    Attributes:
        folder: for the diaries and journals.
        steps: inner steps of the run.
        pace_s: seconds of an inner step, until HURRY lies in the folder.
        outer: OuterConfig.
        regions: RegionConfig.
        save_every: inner steps between two checkpoints; 0 for none.
        lr: of AdamW.
    """

    folder: str
    steps: int
    pace_s: float = 0.05
    outer: dict[str, Any] = field(default_factory=dict)
    regions: dict[str, Any] = field(default_factory=dict)
    save_every: int = 0
    lr: float = 1e-3

    def line(self) -> str:
        return json.dumps(asdict(self))


def obey(fault: str) -> None:
    """Kill this process at the point that FAULT names."""
    point, _, number = fault.rpartition(":")
    module, owner, name, is_it = POINTS[point]
    target = getattr(importlib.import_module(module), owner)
    call, left = getattr(target, name), [int(number)]

    @functools.wraps(call)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = training.is_set() and is_it(*args)
        if counts:
            left[0] -= 1
        if counts and not left[0] and point not in AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(self, *args, **kwargs)
        if counts and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(target, name, counted)


class Diary:
    """One line of JSON for each event, in the file of this process."""

    def __init__(self, folder: str) -> None:
        path = Path(folder, os.environ["DIARY"])
        self._file = path.open("a")

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps({"t": time.time(), **facts}) + "\n")
        self._file.flush()


class Steps:
    """After every inner step: the pace, and the global params if something landed."""

    def __init__(self, task: Task, diary: Diary) -> None:
        self._task, self._diary = task, diary
        self._due, self._landings = time.monotonic(), -1

    def note(self, outer: OuterOptimizer) -> None:
        landings = outer.synchronizer.totals.landings
        facts: dict[str, Any] = {"step": outer.inner_step}
        if landings != self._landings:
            self._landings = landings
            facts["digest"] = outer.synchronizer.global_digest()
        self._diary.write(**facts)
        if Path(self._task.folder, HURRY).exists():
            return
        self._due = max(self._due + self._task.pace_s, time.monotonic())
        time.sleep(max(self._due - time.monotonic(), 0.0))


def held_out_loss(model: torch.nn.Module) -> float:
    rows = torch.stack([Tokens(EVAL_ROWS, seed=99)[row]["input_ids"] for row in range(EVAL_ROWS)])
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


def with_loop(task: Task, region: int, diary: Diary) -> tuple[OuterOptimizer, torch.nn.Module]:
    accelerator = Accelerator(cpu=True)
    model = llama(seed=region, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    config, regions = OuterConfig(**task.outer), RegionConfig(**task.regions)
    journal = Path(task.folder, f"journal-{region}.jsonl")
    steps = Steps(task, diary)
    with OuterOptimizer(
        accelerator, model, optimizer, config, regions, max_steps=task.steps, journal=journal
    ) as outer:
        diary.write(ready=outer.inner_step)
        training.set()
        while outer.inner_step < task.steps and not outer.should_stop:
            tokens = batch(region, outer.inner_step)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            steps.note(outer)
            if task.save_every and outer.inner_step % task.save_every == 0:
                accelerator.save_state(str(Path(task.folder, f"region-{region}", str(outer.inner_step))))
    return outer, accelerator.unwrap_model(model)


def main(line: str) -> None:
    torch.set_num_threads(1)
    task, region = Task(**json.loads(line)), int(os.environ["HF_COCODC_REGION"])
    if "FAULT" in os.environ:
        obey(os.environ["FAULT"])
    diary = Diary(task.folder)
    outer, model = with_loop(task, region, diary)
    diary.write(end=outer.inner_step, digest=outer.synchronizer.global_digest(), loss=held_out_loss(model))


if __name__ == "__main__":
    main(sys.argv[1])
