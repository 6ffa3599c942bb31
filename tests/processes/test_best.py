"""The best model in real processes over real sockets: regions of one rank, of replicas and of shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_cocodc.run.journal import read
from tests.processes import sharded_worker
from tests.processes.ending_worker import STEPS
from tests.processes.forks import fork_regions
from tests.processes.test_endings import (
    assert_finished_together,
    complete,
    outcomes,
    run,
    serve_in_thread,
    start,
)
from tests.toys import params_of

BEST = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "load_best_model_at_end": True}
RATE = 0.1
"""Far too high: a later model is worse."""


def best_of(folder: Path, region: int) -> tuple[int, torch.Tensor]:
    """The step that a region chose, and the global weights in its checkpoint."""
    journal = folder / f"region-{region}" / "cocodc" / "journal.jsonl"
    [event] = [event for event in read(journal) if event["kind"] == "best"]
    checkpoint = folder / f"region-{region}" / f"checkpoint-{event['step']}"
    return event["step"], params_of(AutoModelForCausalLM.from_pretrained(checkpoint))


@pytest.mark.parametrize("ranks", [1, pytest.param([2, 1], marks=pytest.mark.slow)])
def test_regions_end_with_the_best_model(ranks: Any, tmp_path: Path) -> None:
    """All ranks hold the global weights of the step that all regions have chosen."""
    common = {"learning_rate": RATE, "may_differ": "batch", **BEST}
    coordinator = serve_in_thread()
    found = outcomes(tmp_path, start(tmp_path, coordinator, ranks=ranks, **common), ranks)
    assert_finished_together(found[0], found[-1])
    (step, weights), (other_step, other_weights) = (best_of(tmp_path, region) for region in range(2))
    assert step == other_step < STEPS
    assert torch.equal(weights, other_weights)
    for each in found:
        assert torch.equal(each["weights"], weights)


@pytest.mark.slow
def test_an_error_where_the_other_region_evaluates(tmp_path: Path) -> None:
    """A region that fails takes part in what the other decides by its evaluations, until both stop with a checkpoint."""
    more = {**BEST, "eval_steps": 1, "step_s": 0.05}
    ours, theirs = run(tmp_path, {}, {"action": "fail"}, **more)
    assert theirs["error"] == "ValueError: the data is broken"
    assert ours["error"].startswith("RunStopped") and "the data is broken" in ours["error"]
    assert ours["step"] in complete(tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["FULL", "SHARDED"])
def test_shards_of_the_best_model(how: str, tmp_path: Path) -> None:
    """FSDP2: every lane loads its own shards."""
    outer = json.dumps({"method": "streaming", "sync_interval": 4, "num_fragments": 2, "overlap_steps": 1})
    more = json.dumps({"save_steps": 3, "load_best_model_at_end": True, "learning_rate": RATE})
    arguments = ["fsdp", tmp_path, outer, how, 12, 0, more]
    found = fork_regions(sharded_worker.main, 2, arguments, tmp_path)
    step, weights = best_of(tmp_path, 0)
    assert step < 12
    for name, each in found.items():
        assert torch.equal(each["final"], weights), name
