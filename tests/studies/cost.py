"""How long the runs of a study take, before they are made."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from .conduct import compare_runs, sweep_runs
from .spec import Changes, Settings, Study

STEPS = 3
"""Inner steps that are timed for each model and batch, after one that is not."""
OVERHEAD = 1.15
"""Of evaluations and outer steps."""


def all_runs(study: Study) -> list[Settings]:
    """The runs of a study at its full size. The best of the sweep is not known yet: the first combination stands for it."""
    first: dict[tuple[str, str], Changes] = {
        (cell, arm): study.combinations(arm)[0] for cell in study.cells for arm in study.arms
    }
    return [*sweep_runs(study), *compare_runs(study, first)]


def core_hours(runs: Iterable[Settings]) -> float:
    """An estimate of what runs take on one core like this one: a few inner steps of each model and batch are timed."""
    timed: dict[str, float] = {}

    def step_s(settings: Settings, batches: int) -> float:
        training = settings["training"]
        shape = [settings["model"], settings["data"]["block_size"], training["per_device_train_batch_size"]]
        name = json.dumps([*shape, settings.get("peft"), training.get("optim"), batches])
        if name not in timed:
            timed[name] = _step_s(settings, batches)
        return timed[name]

    total = 0.0
    for settings in runs:
        study, steps, regions = (
            settings["study"],
            settings["training"]["max_steps"],
            settings["regions"]["count"],
        )
        together = steps if study.get("data_parallel", False) else study.get("trained_steps", 0)
        if together:
            total += together * step_s(settings, regions)
        if alone := (steps - together) * regions + study.get("base_steps", 0):
            total += alone * step_s(settings, 1)
    return OVERHEAD * total / 3600


def _step_s(settings: Settings, batches: int) -> float:
    import torch

    from .training import Run

    this = Run({**settings, "study": {}})
    inner, batch = this.inner(), torch.cat([this.text.batch(0, step) for step in range(1, batches + 1)])
    inner.train(batch)
    began = time.process_time()
    for _ in range(STEPS):
        inner.train(batch)
    return (time.process_time() - began) / STEPS
