"""Regions that others cannot call, in real processes: training, and joining, over connections that the other end has made."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.coming_worker import loop
from tests.processes.test_coming_and_going import Run

STEPS = 200
NOWHERE = "127.0.0.1:1"


def behind_a_router(hidden: int, *arguments: Any, **regions: Any) -> None:
    """A region; the one with the number `hidden` announces an address that answers nobody."""
    is_hidden = os.environ["HF_COCODC_REGION"] == str(hidden)
    loop(*arguments, announce=NOWHERE if is_hidden else None, max=3, **regions)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [0, 2])
def test_a_region_that_nobody_can_call_trains_and_joins(hidden: int, tmp_path: Path) -> None:
    """It gives a base to the newcomer, or is the newcomer: all end equal."""
    run = Run(tmp_path, 2, partial(behind_a_router, hidden), STEPS, 0.2, "streaming", 1)
    run.wait_for_step(0, 3)
    run.start(2, join=True)
    run.wait_for_join(2)
    found = run.results(0, 1, 2)
    for other in found[1:]:
        assert torch.equal(found[0]["weights"], other["weights"])
