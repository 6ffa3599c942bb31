"""Settings whose landings throw inner steps away are said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.newer import known
from hf_cocodc.resolve import lost_steps

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
