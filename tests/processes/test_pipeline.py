"""Regions that are pipelines: every stage has an inner and an outer optimizer of its own (recipes/pipeline)."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig, simulate
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.run.connect import connect
from tests.processes import pipeline_worker
from tests.processes.forks import fork_regions, run_recipe
from tests.processes.pipeline_worker import DILOCO, EAGER, MAX_NORM, MICROBATCHES, STEPS, rows_of
from tests.toys import llama

REGIONS = STAGES = 2
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What 2 regions x 2 stages came to in every scenario of the worker, by region and rank."""
    return fork_regions(pipeline_worker.main, STAGES, [folder], folder)


def unpipelined(config: dict[str, Any], max_norm: float) -> list[dict[str, Any]]:
    """The same two regions in one process: the whole Llama with the loss it has from transformers, no stage anywhere."""

    def train(region: int, link: Link) -> dict[str, Any]:
        model = llama(region)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        with OuterOptimizer(
            Accelerator(cpu=True), model, optimizer, OuterConfig(**config), max_steps=STEPS, link=link
        ) as outer:
            while outer.inner_step < STEPS:
                losses.append(0.0)
                for rows in rows_of(region, outer.inner_step + 1).chunk(MICROBATCHES):
                    loss = model(input_ids=rows, labels=rows).loss
                    loss.backward()
                    losses[-1] += float(loss.detach()) / MICROBATCHES
                for param in model.parameters():
                    param.grad.div_(MICROBATCHES)
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                assert norm > MAX_NORM
                optimizer.step()
                optimizer.zero_grad()
                outer.step(losses[-1])
        sent = outer.synchronizer.totals.bytes_sent
        return {"final": model.state_dict(), "losses": losses, "bytes_sent": sent}

    return simulate(train, regions=REGIONS)


def whole(found: Found, scenario: str, region: int = 0) -> dict[str, Tensor]:
    """The model that the stages of a region make up together."""
    parts = [found[f"region{region}-rank{stage}"][scenario]["final"] for stage in range(STAGES)]
    assert not set(parts[0]) & set(parts[1]), "no parameter is in two stages"
    return {**parts[0], **parts[1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "config", "max_norm"),
    [("unclipped", DILOCO, math.inf), ("clipped", DILOCO, MAX_NORM), ("eager", EAGER, math.inf)],
)
def test_stages_train_as_the_whole_model_does(
    scenario: str, config: dict[str, Any], max_norm: float, found: Found
) -> None:
    """2 regions x 2 stages = 2 regions x 1: weights, bit for bit where no gradient is clipped, losses, and bytes sent.

    The norm that gradients are clipped by is summed stage by stage, so that it may differ in its last bit; AdamW passes
    that on. The loss is averaged over logits that lie otherwise in memory.
    """
    for region, reference in enumerate(unpipelined(config, max_norm)):
        stages = [found[f"region{region}-rank{stage}"][scenario] for stage in range(STAGES)]
        final = whole(found, scenario, region)
        assert final.keys() == reference["final"].keys()
        for name, weight in reference["final"].items():
            tolerance = {"atol": 1e-6, "rtol": 1e-5} if scenario == "clipped" else {"atol": 0.0, "rtol": 0.0}
            torch.testing.assert_close(final[name], weight, **tolerance)
        assert stages[-1]["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        assert sum(stage["bytes_sent"] for stage in stages) == reference["bytes_sent"]


@pytest.mark.slow
def test_every_stage_agrees_with_the_same_stage_elsewhere(found: Found) -> None:
    """Whatever the method, low rank of each stage's own included, a stage's global params are equal in all regions."""
    for scenario in pipeline_worker.SCENARIOS:
        if scenario == "alone":
            continue
        for stage in range(STAGES):
            ours, theirs = (found[f"region{region}-rank{stage}"][scenario] for region in range(REGIONS))
            # until their end eager regions have global params of their own
            assert ours["digest"] == theirs["digest"] or scenario == "eager", (scenario, stage)
            assert ours["sends"] == theirs["sends"] > 0
            for name, weight in ours["final"].items():
                assert torch.equal(weight, theirs["final"][name]), (scenario, name)


@pytest.mark.slow
def test_stages_with_schedules_of_their_own_do_not_wait_for_ever(found: Found) -> None:
    """One stage follows a rank that adapts, the next measured times: they send at different steps, and all arrive."""
    first, second = (found[f"region0-rank{stage}"]["different schedules"] for stage in range(STAGES))
    assert first["sends"] != second["sends"]
    assert len(second["losses"]) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", ["resumed streaming", "resumed co2", "resumed dilocox", "resumed cocodc", "alone"]
)
def test_stages_resume_bit_for_bit(scenario: str, found: Found) -> None:
    """From `accelerator.save_state` in the middle of a round, transfers in flight, in every stage; a lone region as well."""
    for name, each in found.items():
        run = each[scenario]
        again = run["again"]
        assert run["in_flight"] > 0
        assert run["start"] == 8
        assert again["digest"] == run["digest"], name
        assert again["losses"] == run["losses"][8:]
        for weight in run["final"]:
            assert torch.equal(again["final"][weight], run["final"][weight]), (name, weight)


@pytest.mark.slow
def test_the_saved_parts_are_one_model(found: Found, folder: Path) -> None:
    """`from_pretrained` loads what the stages of a region saved, the same in both regions."""
    for region in range(REGIONS):
        saved = AutoModelForCausalLM.from_pretrained(folder / f"model{region}").state_dict()
        expected = whole(found, "clipped", region)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.parametrize("stage", [(1, 2), (0, 2), (1, 1)])
def test_a_stage_without_its_rank_is_refused(stage: tuple[int, int]) -> None:
    """The launcher's processes are the stages, or a stage would wait for one that no region has."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    alone = RegionConfig(region=0, count=1)
    with pytest.raises(InputError, match=r"must be \(0, 1\)"):
        OuterOptimizer(Accelerator(cpu=True), model, optimizer, OuterConfig(**DILOCO), alone, stage=stage)


def test_tensor_parallel_ranks_are_not_taken_for_replicas() -> None:
    """The leader's shard would be handed to every rank: refused."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        parallelize_module(model, init_device_mesh("cpu", (1,)), ColwiseParallel())
        two_ranks = SimpleNamespace(
            process_index=0,
            num_processes=2,
            is_main_process=True,
            device=torch.device("cpu"),
            distributed_type=DistributedType.MULTI_CPU,
        )
        with pytest.raises(InputError, match="weight is sharded"):
            connect(two_ranks, model, OuterConfig(**DILOCO), RegionConfig(region=0, count=1), STEPS)
    finally:
        dist.destroy_process_group()


def launch(output: Path, *flags: str, unpipelined: bool = False) -> list[dict[str, Tensor]]:
    """Run the recipe by the lines of its docstring, with flags of ours; the model that each region ends with."""
    stages, stage = "--multi_gpu --num_processes 2", "--cpu --num_processes 1"

    def change(line: str) -> str:
        assert stages in line
        return line.replace(stages, stage) if unpipelined else line

    output.mkdir(exist_ok=True)
    run_recipe("recipes/pipeline/train_stages.py", ["--output_dir", str(output), *flags], output, change)
    found = [AutoModelForCausalLM.from_pretrained(output / f"region-{region}") for region in range(REGIONS)]
    return [model.state_dict() for model in found]


@pytest.mark.slow
def test_the_recipe_trains_pipelined_and_not_and_resumes(tmp_path: Path) -> None:
    """By its docstring's lines: both regions end with one model, and two stages a region with that of one; once more from a
    checkpoint, in new processes, with the same bits."""
    flags = ["--max_steps", "7", "--outer_sync_interval", "3", "--save_steps", "4"]
    first, second = launch(tmp_path / "two", *flags)
    alone, _ = launch(tmp_path / "one", *flags, unpipelined=True)
    for region in range(REGIONS):
        checkpoint = Path(f"region-{region}", "checkpoint-4")
        shutil.copytree(tmp_path / "two" / checkpoint, tmp_path / "again" / checkpoint)
    again, _ = launch(tmp_path / "again", *flags, "--resume_step", "4")
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        assert torch.equal(weight, again[name]), name
        torch.testing.assert_close(weight, alone[name], atol=2e-4, rtol=0)
