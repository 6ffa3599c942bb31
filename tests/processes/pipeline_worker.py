"""A region of the pipeline tests: its ranks are the stages of the toy Llama, and what came out of each scenario.

The stages and their inner step are those of recipes/pipeline/train_stages.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from recipes.pipeline.train_stages import Stage, add_to_checkpoints, gradients, pipeline, save_model
from tests.toys import batch, llama

STEPS = 11
MICROBATCHES = 2
MAX_NORM = 0.1  # every gradient of these is longer
DILOCO = {"method": "diloco", "sync_interval": 4, "outer_lr": 0.7}
STREAMING = {"method": "streaming", "sync_interval": 6, "num_fragments": 2, "overlap_steps": 3}
EAGER = {"method": "eager", "sync_interval": 3, "outer_lr": 0.7}
CO2 = {"method": "co2", "sync_interval": 3}
DILOCOX = {"method": "dilocox", "sync_interval": 3, "rank": 4, "outer_lr": 0.3}
COCODC = {"method": "cocodc", "sync_interval": 4, "num_fragments": 2, "utilization": 0.9}
COCODC_FIXED = {
    "method": "cocodc",
    "sync_interval": 4,
    "num_fragments": 2,
    "sends_per_interval": 2,
    "overlap_steps": 3,
}


@functools.cache
def own_region() -> int:
    """The region of this process: it stays so where a scenario is one of a lone region."""
    return int(os.environ["HF_COCODC_REGION"])


def rows_of(region: int, step: int) -> Tensor:
    """The token ids of inner step `step` (from 1)."""
    return batch(region, step, size=2 * MICROBATCHES)


class Run:
    """This rank's stage in training."""

    def __init__(self, config: dict[str, Any], max_norm: float = 1.0) -> None:
        self.accelerator = Accelerator()
        rank, num_stages = self.accelerator.process_index, self.accelerator.num_processes
        config_of_llama = llama().config
        torch.manual_seed(own_region())  # different seeds: region 0's parameters have to reach the others
        self.stage = Stage(config_of_llama, rank, num_stages)
        self.schedule = pipeline(self.accelerator, self.stage, MICROBATCHES)
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-3)
        self.max_norm = max_norm
        self.losses: list[float | None] = []
        self.outer = OuterOptimizer(
            self.accelerator,
            self.stage,
            self.optimizer,
            OuterConfig(**config),
            RegionConfig(timeout_s=30.0),
            max_steps=STEPS,
            stage=(rank, num_stages),
        )
        add_to_checkpoints(self.accelerator, self.stage, self.optimizer)

    def train(self, until: int = STEPS) -> Run:
        while self.outer.inner_step < until:
            rows = rows_of(own_region(), self.outer.inner_step + 1)
            self.losses.append(gradients(self.schedule, self.stage, rows, self.max_norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.outer.step(self.losses[-1])
        return self

    def finish(self) -> dict[str, Any]:
        self.outer.finish()
        synchronizer = self.outer.synchronizer
        return {
            "final": {name: param.clone() for name, param in self.stage.state_dict().items()},
            "digest": synchronizer.global_digest(),
            "losses": self.losses,
            "sends": synchronizer.totals.sends,
            "bytes_sent": synchronizer.totals.bytes_sent,
        }


def clipped(folder: Path) -> dict[str, Any]:
    """DiLoCo with gradients clipped by the norm over all stages, and the global model saved."""
    run = Run(DILOCO, max_norm=MAX_NORM).train()
    found = run.finish()
    save_model(run.accelerator, run.stage, folder / f"model{own_region()}")
    return found


def different_schedules(folder: Path) -> dict[str, Any]:
    """Stages that send and land at different steps, after measured times and ranks of their own."""
    return Run(COCODC if int(os.environ["RANK"]) else DILOCOX).train().finish()


def resumed(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A run that goes on from a checkpoint in the middle of a round, transfers in flight, and the one that wrote it."""
    first = Run(config).train(until=8)
    checkpoint = folder / f"{config['method']}{own_region()}"
    first.accelerator.save_state(str(checkpoint))
    saved_in_flight = sum(len(state.in_flight) for state in first.outer.synchronizer.fragments)
    found = first.train().finish()
    again = Run(config)
    again.accelerator.load_state(str(checkpoint))
    start = again.outer.inner_step
    return found | {"in_flight": saved_in_flight, "start": start, "again": again.train().finish()}


def alone(folder: Path) -> dict[str, Any]:
    """A run of one region only, at the place of each."""
    with mock.patch.dict(os.environ, HF_COCODC_REGION="0", HF_COCODC_REGIONS="1"):
        return resumed(folder / f"alone{own_region()}", STREAMING)


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "clipped": clipped,
    "unclipped": lambda folder: Run(DILOCO, max_norm=float("inf")).train().finish(),
    "eager": lambda folder: Run(EAGER, max_norm=float("inf")).train().finish(),
    "different schedules": different_schedules,
    "resumed co2": lambda folder: resumed(folder, CO2),
    "resumed cocodc": lambda folder: resumed(folder, COCODC_FIXED),
    "resumed streaming": lambda folder: resumed(folder, STREAMING),
    "resumed dilocox": lambda folder: resumed(folder, DILOCOX),
    "alone": alone,
}


def main(folder: Path) -> None:
    found = {name: scenario(folder) for name, scenario in SCENARIOS.items()}
    torch.save(found, folder / f"region{own_region()}-rank{os.environ['RANK']}.pt")
    dist.destroy_process_group()
