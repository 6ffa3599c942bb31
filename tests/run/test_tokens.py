"""The weight of a region is the number of tokens that it has trained on."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.run.inner_optimizer import Tokens
from tests.toys import Blocks

STEPS = 6
SLOPES = torch.tensor([[1.0, -2.0, 0.5], [4.0, 1.0, -1.0]])
"""The gradient of each region: constant, so that an inner step of SGD moves the params by it."""


class Ranks(NamedTuple):
    """An accelerator of two ranks: the other one has 100 tokens."""

    num_processes: int = 2
    device: torch.device = torch.device("cpu")

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        assert own.dtype == torch.int64
        return torch.cat([own, torch.tensor([[0, 100]])])


def test_micro_batches_and_ranks_add_up() -> None:
    """Numbers and tensors; a stage's ranks train on the same samples, and count them once."""
    for alike, others in ((False, 100), (True, 0)):
        tokens = Tokens(Ranks(), True, alike)  # type: ignore[arg-type]
        tokens.note(7)
        tokens.note(torch.tensor(5))
        assert tokens.take() == 12 + others
        tokens.note(3)
        assert tokens.take() == 3 + others


def test_nothing_is_counted_for_other_weights() -> None:
    """Nor said to other ranks."""
    tokens = Tokens(None, False)  # type: ignore[arg-type]
    tokens.note(7)
    assert tokens.take() is None


@pytest.mark.parametrize("noted", [-1, 1.5, float("nan"), float("inf"), "many", torch.ones(2)])
def test_a_number_of_tokens_that_cannot_be(noted: object) -> None:
    """A weight is not made of it."""
    tokens = Tokens(Ranks(1), True)  # type: ignore[arg-type]
    tokens.note(noted)
    with pytest.raises(InputError, match="must be a whole number from 0"):
        tokens.take()


def train(region: int, link: Link, weights: str) -> torch.Tensor:
    """Two micro-batches a step. Region 0 has 10 tokens in each of them, region 1 has more in later steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Blocks([torch.zeros(3)])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    config = OuterConfig(sync_interval=3, outer_lr=1.0, outer_momentum=0.0, weights=weights)
    with OuterOptimizer(accelerator, model, optimizer, config, max_steps=STEPS, link=link) as outer:
        while outer.inner_step < STEPS:
            with accelerator.accumulate(model):
                [vector] = accelerator.unwrap_model(model).vectors()
                accelerator.backward((vector * SLOPES[region]).sum())
                optimizer.step()
                optimizer.zero_grad()
                outer.step(tokens=10 if region == 0 else outer.inner_step)
    return accelerator.unwrap_model(model).vectors()[0].detach().clone()


def test_a_step_whose_tokens_nobody_gives() -> None:
    """A weight that nobody gives is not guessed."""

    def body(region: int, link: Link) -> None:
        model = Blocks([torch.zeros(3)])
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        with OuterOptimizer(accelerator, model, optimizer, OuterConfig(weights="tokens"), link=link) as outer:
            outer.step()

    with pytest.raises(InputError, match=r"outer\.weights=tokens.*outer\.step\(loss, tokens=\.\.\.\)"):
        run_in_lockstep(2, body)


def test_the_mean_is_weighted_by_tokens() -> None:
    """Against the same mean by hand: in each round, the regions' outer gradients by their tokens of that round."""
    found = run_in_lockstep(2, lambda region, link: train(region, link, "tokens"))
    expected = torch.zeros(3, dtype=torch.float64)
    for first in (0, 3):
        tokens = torch.tensor(
            [60.0, sum(2.0 * step for step in range(first, first + 3))], dtype=torch.float64
        )
        outer_grads = 3 * SLOPES.double()
        expected -= (tokens[:, None] * outer_grads).sum(0) / tokens.sum()
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=1e-6)
    equal = run_in_lockstep(2, lambda region, link: train(region, link, "equal"))
    torch.testing.assert_close(equal[0].double(), -6 * SLOPES.double().mean(0), rtol=1e-6, atol=1e-6)
