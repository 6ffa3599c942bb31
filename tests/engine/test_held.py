"""Honest figures: what holds the training thread counts as blocked, and a region that does not count loses nothing."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback, run_in_lockstep
from hf_cocodc.parts.info import MergeInfo, MergeSlice
from hf_cocodc.parts.merges import Merge
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.toys import Blocks


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_all_time_at_events_counts_as_blocked(overlap_steps: int) -> None:
    """A landing that computes for long holds training as a slow link does: the sum is that of a clock around all steps."""

    def slow(here: MergeSlice, info: MergeInfo) -> Tensor:
        time.sleep(0.05)
        return here.new_global

    config = OuterConfig(method="diloco", sync_interval=4, merge="additive", overlap_steps=overlap_steps)
    method = dataclasses.replace(from_config(config), merge=Merge(slow, keeps_local_steps=True))
    synchronizer = Synchronizer(Blocks([torch.ones(10)]), method, loopback())
    around = 0.0
    for _ in range(12):
        began = time.perf_counter()
        synchronizer.step(1e-3)
        around += time.perf_counter() - began
    assert synchronizer.totals.landings >= 2
    assert 0.9 * around < synchronizer.totals.blocked_s <= around
    assert synchronizer.account.report["blocked_s"] == synchronizer.totals.blocked_s


@pytest.mark.parametrize("codec", ["int4", "topk", "lowrank"])
def test_a_region_that_does_not_count_keeps_its_residual(codec: str) -> None:
    """What it sent was in no mean: its error feedback loses nothing, and sends it again when it counts."""
    config = OuterConfig(method="diloco", sync_interval=2, codec=codec, error_feedback=True)

    def live(region: int, link: Link) -> list[Tensor]:
        model = Blocks([torch.linspace(-1, 1, 300).view(20, 15)])
        synchronizer = Synchronizer(model, from_config(config), link)
        residuals = []
        for step in range(1, 7):
            counts = region == 0 or step not in (3, 4)
            if counts:
                noise = torch.Generator().manual_seed(10 * step + region)
                for param in model.parameters():
                    param.detach().add_(torch.randn(param.shape, generator=noise))
            synchronizer.step(1e-3, trained=counts)
            if step % 2 == 0:
                residuals.append(synchronizer.fragments[0].codec["residual"].clone())
        return residuals

    always, sometimes = run_in_lockstep(2, live)
    assert all(residual.any() for residual in (*always, *sometimes))
    assert torch.equal(sometimes[0], sometimes[1]), "it did not count in the second round"
    assert not torch.equal(sometimes[1], sometimes[2])
    assert not torch.equal(always[0], always[1])
