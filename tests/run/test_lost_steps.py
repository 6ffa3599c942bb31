"""Settings whose landings throw inner steps away are said, and steps that a region has not trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback, run_in_lockstep
from hf_cocodc.newer import known
from hf_cocodc.resolve import lost_steps
from hf_cocodc.run.journal import read
from tests.toys import Blocks

LONG = {"method": "streaming", "sync_interval": 20, "overlap_steps": 13}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**LONG, "mixing_alpha": 0.0}, "outer.overlap_steps=13 with outer.mixing_alpha=0.0: each landing"),
        ({**LONG, "merge": "replace"}, "outer.overlap_steps=13 with outer.merge=replace: each landing"),
        ({"method": "cocodc", "merge": "replace"}, "outer.overlap_steps=auto with outer.merge=replace"),
        ({"method": "cocodc", "merge": "mix", "mixing_alpha": 0.0}, "with outer.mixing_alpha=0.0"),
        (LONG, None),
        ({"method": "streaming", "mixing_alpha": 0.0}, None),
        ({**LONG, "merge": "additive"}, None),
        *(({"method": method}, None) for method in known()),
    ],
)
def test_more_than_one_lost_step_is_said(given: dict[str, Any], said: str | None) -> None:
    """No method loses more than one by default; those that are a round late send before they land, and lose none."""
    found = lost_steps(OuterConfig(**given))
    assert (found is None) if said is None else (found is not None and said in found)


@pytest.mark.parametrize(("alpha", "warns"), [(0.0, True), (None, False)])
def test_a_run_warns_of_them(alpha: float | None, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With its first line, as the run would end with exit code 0."""
    config = OuterConfig(**LONG, num_fragments=1, fragment_pattern="whole", mixing_alpha=alpha)  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "hf_cocodc"):
        OuterOptimizer(Accelerator(cpu=True), model, optimizer, config, link=loopback()).close()
    assert ("each landing throws away" in caplog.text) == warns


def test_all_regions_know_what_one_has_trained_that_only_keeps_step(tmp_path: Path) -> None:
    """Region 1 has come to its end after step 3; its transfer of step 4 says so."""

    def body(region: int, link: Link) -> None:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.ones(3)])
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        config, journal = OuterConfig(sync_interval=2), tmp_path / f"{region}.jsonl"
        with OuterOptimizer(accelerator, model, optimizer, config, link=link, journal=journal) as outer:
            while outer.inner_step < (3 if region else 6) and not outer.should_stop:
                accelerator.backward(model.vectors()[0].sum())
                optimizer.step()
                optimizer.zero_grad()
                outer.step()

    run_in_lockstep(2, body)
    for region in (0, 1):
        landings = [event for event in read(tmp_path / f"{region}.jsonl") if event["kind"] == "land"]
        assert [(event["sent_at"], event.get("coasted")) for event in landings] == [(2, None), (4, {"1": 3})]
