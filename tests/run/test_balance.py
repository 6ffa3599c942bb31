"""Regions of different speed share the global batch: what each trains on, how long it takes, and what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.errors import InputError
from hf_cocodc.link.lockstep import LockstepLink, VirtualLink, run_in_lockstep
from hf_cocodc.methods import METHODS
from tests.toys import Blocks

STEPS, INTERVAL, ACCUMULATE, MICRO_BATCH = 24, 4, 4, 2
SLOPES = torch.tensor([1.0, -3.0, 7.0])
"""The gradient of each region."""
LINK = VirtualLink(step_time_s=1.0, latency_s=0.01, bandwidth=1e9, speeds=(3.0, 1.0))


class Trained:
    """What a region did: micro-batches of each inner step, where its parameter was after it, when it ended, and how many batches
    of its own settings it says that it has made.
    """

    def __init__(self) -> None:
        self.micro_batches: list[int] = []
        self.places: list[float] = []
        self.end_s = self.batches_made = 0.0


def train(
    region: int,
    link: LockstepLink,
    config: OuterConfig,
    regions: RegionConfig,
    folder: Path | None = None,
    save_at: int = 0,
    steps: int = STEPS,
) -> Trained:
    """An ordinary loop with `accumulate`: nothing in it knows of the deal. It saves after `save_at` inner steps, and ends; or
    goes on from what is in `folder`.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
    model = Blocks([torch.zeros(1)] * 4)
    loader = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=MICRO_BATCH)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loader
    )
    found, count = Trained(), 0
    loaded = folder if folder is not None and not save_at else None
    if loaded is not None:
        accelerator.load_state(str(loaded / str(region)))
    outer = OuterOptimizer(
        accelerator,
        model,
        optimizer,
        config,
        regions,
        max_steps=steps,
        link=link,
        loaded=None if loaded is None else loaded / str(region),
        journal=None if folder is None else folder / f"region-{region}" / "cocodc" / "journal.jsonl",
    )
    while not outer.should_stop:
        with accelerator.accumulate(model):
            vectors = accelerator.unwrap_model(model).vectors()
            accelerator.backward(sum((each * SLOPES[region]).sum() for each in vectors))
            optimizer.step()
            optimizer.zero_grad()
            count, before = count + 1, outer.inner_step
            outer.step()
        if outer.inner_step > before:
            found.micro_batches.append(count)
            found.places.append(vectors[0].item())
            count = 0
        if save_at and outer.inner_step == save_at:
            accelerator.save_state(str(folder / str(region)))
            outer.close("saved")
            return found
    outer.finish()
    found.batches_made = outer.training.progress.batches_made
    found.places.append(accelerator.unwrap_model(model).vectors()[0].item())
    found.end_s = link.clock()
    return found


def all_of(
    speeds: Sequence[float], config: OuterConfig | None = None, balance: str = "auto", **options: Any
) -> list[Trained]:
    config = config or OuterConfig(sync_interval=INTERVAL, outer_lr=1.0, outer_momentum=0.0)
    link = VirtualLink(step_time_s=1.0, latency_s=0.01, bandwidth=1e9, speeds=tuple(speeds))
    regions = RegionConfig(balance=balance)
    return run_in_lockstep(
        len(speeds), lambda region, own: train(region, own, config, regions, **options), link
    )


def test_each_region_makes_what_it_can_and_all_are_ready_together() -> None:
    """Three to one, after the first landing. The sum of the micro-batches stays."""
    fast, slow = all_of((3.0, 1.0))
    assert fast.micro_batches == [ACCUMULATE] * INTERVAL + [6] * (STEPS - INTERVAL)
    assert slow.micro_batches == [ACCUMULATE] * INTERVAL + [2] * (STEPS - INTERVAL)
    for each in (fast, slow):
        assert each.batches_made == sum(each.micro_batches) / ACCUMULATE
    equal = all_of((3.0, 1.0), balance="equal")
    assert equal[1].micro_batches == [ACCUMULATE] * STEPS
    # until the first landing the slow region sets the pace: 4 s of work at a speed of 1; then 2 s
    assert slow.end_s == pytest.approx(INTERVAL * 1.0 + (STEPS - INTERVAL) * 0.5, rel=0.02)
    assert equal[1].end_s == pytest.approx(STEPS * 1.0, rel=0.02)


def test_a_region_counts_by_the_samples_that_it_has_trained_on() -> None:
    """Against the mean by hand: of the regions' progress in each round, by their micro-batches."""
    found = all_of((3.0, 1.0, 1.0))
    expected = 0.0
    for first in range(0, STEPS, INTERVAL):
        counts = torch.tensor([float(sum(each.micro_batches[first : first + INTERVAL])) for each in found])
        expected -= 0.01 * INTERVAL * float((counts * SLOPES).sum() / counts.sum())
        assert [each.places[first + INTERVAL - 1] for each in found] == pytest.approx(
            [expected] * 3, rel=1e-4
        )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_deals(method: str) -> None:
    """All regions come to the same deal at the same step, also where fragments land at different ones."""
    fast, slow = all_of((3.0, 1.0), OuterConfig(method=method, sync_interval=INTERVAL))
    assert all(
        sum(pair) == 2 * ACCUMULATE for pair in zip(fast.micro_batches, slow.micro_batches, strict=True)
    )
    assert (fast.micro_batches[-1], slow.micro_batches[-1]) == (6, 2)
    assert fast.places[-1] == slow.places[-1]


@pytest.mark.parametrize("save_at", [2, 10, 12])
def test_a_resumed_run_keeps_the_deal(save_at: int, tmp_path: Path) -> None:
    """To the bit, and without measuring anew."""
    whole = all_of((3.0, 1.0))
    all_of((3.0, 1.0), folder=tmp_path, save_at=save_at)
    rest = all_of((3.0, 1.0), folder=tmp_path)
    for region, each in enumerate(rest):
        assert each.micro_batches == whole[region].micro_batches[save_at:]
        assert each.places == whole[region].places[save_at:]


def test_a_loop_that_does_not_count_micro_batches_is_refused() -> None:
    """Accelerate would divide its losses by a number that it does not make."""

    def body(region: int, link: LockstepLink) -> None:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.zeros(1)])
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        outer = OuterOptimizer(
            accelerator, model, optimizer, "diloco", RegionConfig(balance="auto"), link=link, max_steps=4
        )
        optimizer.step()
        outer.step()

    with pytest.raises(InputError, match=r"regions\.balance=auto.*accumulate"):
        run_in_lockstep(2, body)


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(InputError, match=r"regions\.balance_batch=per_region has no meaning"):
        RegionConfig(balance_batch="per_region")
