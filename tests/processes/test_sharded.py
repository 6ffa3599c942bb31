"""Regions whose model is sharded over their ranks (FSDP2): every rank has a lane of its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from hf_cocodc.errors import InputError
from hf_cocodc.run.connect import connect
from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import folders
from tests.processes import sharded_worker
from tests.processes.forks import fork_regions
from tests.toys import llama, params_of

CONFIG = {
    "method": "cocodc",
    "sync_interval": 4,
    "num_fragments": 2,
    "overlap_steps": 2,
    "sends_per_interval": 4,
    "outer_lr": 0.7,
}
STEPS = 11


def regions(
    folder: Path, kind: str, how: str = "FULL", stop: int = 0, **settings: Any
) -> dict[str, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    config = json.dumps({**CONFIG, **settings})
    return fork_regions(sharded_worker.main, 2, [kind, folder, config, how, STEPS, stop], folder)


@pytest.mark.slow
def test_lanes_of_shards_train_as_a_leader_of_replicas_does(tmp_path: Path) -> None:
    """2 regions x 2 ranks, FSDP2 against DDP: the same weights and held-out losses, evaluations in between included.

    Not bitwise: FSDP2 sums gradients and norms in another order. Strengths of the compensation, change rates and the
    choice of fragments are those of the whole tensors, or the two would part.
    """
    sharded = regions(tmp_path / "fsdp", "fsdp")
    replicas = regions(tmp_path / "ddp", "ddp")
    reference = replicas["region0-rank0"]
    for name, found in sharded.items():
        assert torch.equal(found["final"], sharded["region0-rank0"]["final"]), name
        torch.testing.assert_close(found["final"], reference["final"], atol=2e-5, rtol=1e-4)
        assert found["evaluations"] == pytest.approx(reference["evaluations"], abs=1e-4)
        assert found["change"] == pytest.approx(reference["change"], rel=1e-3)
        assert found["sends"] == reference["sends"]
        assert found["num_params"] == reference["numel"]
        leader = replicas[name.partition("-")[0] + "-rank0"]  # region 0 sends the first parameters, too
        assert found["bytes_sent"] == leader["bytes_sent"], "the lanes of a region together"
    for lane in range(2):
        assert sharded[f"region0-rank{lane}"]["digest"] == sharded[f"region1-rank{lane}"]["digest"]
        assert sharded[f"region0-rank{lane}"]["numel"] < reference["numel"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["FULL", "SHARDED"])
def test_a_sharded_region_resumes_bit_for_bit(how: str, tmp_path: Path) -> None:
    """Stopped mid-round with transfers in flight, and resumed; the global model is whole. With 4 fragments its embedding and its
    head are split by rows, in every shard."""
    cut = {"num_fragments": 4 if how == "SHARDED" else 2}
    expected = regions(tmp_path / "whole", "fsdp", how, **cut)
    final = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole" / "region-1"
    )  # what save_model has written
    assert torch.equal(params_of(final), expected["region1-rank0"]["final"])
    assert [found["pieces"] for found in expected.values()] == [8 if how == "SHARDED" else 0] * 4
    stopped = regions(tmp_path / "run", "fsdp", how, stop=4, **cut)
    assert "region 0 was interrupted" in stopped["region0-rank0"]["stopped"]
    [step] = {max(folders.checkpoints(tmp_path / "run" / f"region-{region}")) for region in range(2)}
    assert step < STEPS
    resumed = regions(tmp_path / "run", "fsdp", how, **cut)
    for name, found in resumed.items():
        assert torch.equal(found["final"], expected[name]["final"]), name
    folder = tmp_path / "run" / "region-1" / f"checkpoint-{step}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert params_of(model).numel() == expected["region0-rank0"]["num_params"]
    assert (folder / state.tensors_file(1)).is_file()


@pytest.mark.slow
def test_frozen_shards_of_every_rank_are_compared(tmp_path: Path) -> None:
    """They differ only where rank 0, which meets the others for its region, holds nothing of them."""
    for found in fork_regions(sharded_worker.meet, 2, [tmp_path], tmp_path).values():
        assert "disagree on frozen parameters and buffers (digest)" in found["said"]


@pytest.mark.slow
def test_what_is_frozen_stays_synchronized_shard_by_shard(tmp_path: Path) -> None:
    """What is unfrozen is refused by every rank, by the name of the parameter."""
    first, *others = fork_regions(sharded_worker.change, 2, ["freeze", tmp_path], tmp_path).values()
    assert not first["said"]
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], dict(llama().named_parameters())[name])
    for other in others:
        assert [name for name in first if name != "said" and not torch.equal(first[name], other[name])] == []
    assert first["seen"].tolist() == [5.0, 5.0]
    for found in fork_regions(sharded_worker.change, 2, ["unfreeze", tmp_path], tmp_path).values():
        assert found["said"].startswith("model.layers.0.") and "is trainable now" in found["said"]


@pytest.mark.parametrize(("shape", "refused"), [((2, 2), True), ((1, 4), False)])
def test_shards_that_several_ranks_hold_are_refused(
    shape: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HSDP inside a region: the parameter, the setting and both ways out are named. Replicas of one rank are none."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
        accelerator: Any = SimpleNamespace(
            process_index=0,
            num_processes=4,
            device=torch.device("cpu"),
            distributed_type=DistributedType.FSDP,
        )
        regions = RegionConfig(region=0, count=1)
        if refused:
            with pytest.raises(
                InputError, match=r"weight is sharded .* \(dp_replicate_size=1\), or make each replica"
            ):
                connect(accelerator, model, OuterConfig(), regions, None)
        else:
            monkeypatch.setattr("hf_cocodc.run.connect.ranks_of_region", lambda: None)
            assert connect(accelerator, model, OuterConfig(), regions, None).num_lanes == 4
    finally:
        dist.destroy_process_group()
