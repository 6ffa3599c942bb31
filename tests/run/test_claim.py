"""A model is trained by one outer optimizer at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.lockstep import loopback

TAKEN = r"another OuterOptimizer, or another CoCoDCCallback, trains this Linear: .* End the first one \(finish\(\) or close\(\)\)"


def outer(model: nn.Module, config: OuterConfig | None = None, **more: Any) -> OuterOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return OuterOptimizer(
        Accelerator(cpu=True), model, optimizer, config or OuterConfig(), link=loopback(), **more
    )


@pytest.mark.parametrize("end", ["close", "finish"])
def test_a_second_one_waits_for_the_end_of_the_first(end: str) -> None:
    """Another model may be trained meanwhile; and a constructor that fails leaves the model free."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(InputError, match="overlap_steps"):
        outer(model, OuterConfig(method="streaming", sync_interval=4, overlap_steps=5))
    first = outer(model)
    with pytest.raises(InputError, match=TAKEN):
        outer(model)
    outer(other).close()
    getattr(first, end)()
    outer(model).close()


def test_an_error_in_the_block_ends_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one in the constructor, as late as it may come."""
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="in the loop"), outer(model):
        raise RuntimeError("in the loop")
    with monkeypatch.context() as patch:
        patch.setattr("hf_cocodc.run.outer_optimizer.hook_into_saving", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            outer(model)
    outer(model).close()
