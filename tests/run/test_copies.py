"""Optimizers with weights of their own undo what lands, and are refused; all others train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from tests.toys import batch, llama

STEPS = 24


class Masters(torch.optim.AdamW):
    """AdamW on fp32 masters of its own, as apex has them; `where` they lie, and whether the first step makes them."""

    def __init__(self, params: Any, where: str = "attribute", follows: bool = False) -> None:
        super().__init__(params, lr=1e-3)
        self.where, self.follows = where, follows
        self.masters: dict[Any, torch.Tensor] = {}
        if where == "attribute":
            self._make()

    def _make(self) -> None:
        for group in self.param_groups:
            self.masters |= {param: param.detach().float().clone() for param in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.masters:
            self._make()
        if self.follows:
            for param, master in self.masters.items():
                master.copy_(param)
        kept = [param.data for param in self.masters]
        for param, master in self.masters.items():
            param.data = master
            param.grad = None if param.grad is None else param.grad.float()
        super().step()
        for (param, master), data in zip(self.masters.items(), kept, strict=True):
            param.data, param.grad = data, None
            param.copy_(master)
            if self.where == "state":
                self.state[param]["master"] = master


class Lookahead(torch.optim.AdamW):
    """AdamW that goes back half of the way every third step; its slow weights begin with the first of these."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps += 1
        if self.steps % 3:
            return
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.clone())
                slow.lerp_(param, 0.5)
                param.copy_(slow)


class Remembers(torch.optim.AdamW):
    """Keeps the weights with which it began, as Prodigy does; its first step has no learning rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("p0", param.clone())
            group["lr"] = 1e-3


def train(make: Callable[[nn.Module], Any], dtype: torch.dtype, interval: int, steps: int = STEPS) -> None:
    config = OuterConfig(sync_interval=interval, outer_lr=0.7, outer_momentum=0.0)

    def live(region: int, link: Link) -> None:
        accelerator, model = Accelerator(cpu=True), llama(layers=1, dtype=dtype)
        optimizer = make(model)
        with OuterOptimizer(accelerator, model, optimizer, config, max_steps=steps, link=link) as outer:
            while not outer.should_stop:
                tokens = batch(region, outer.inner_step)
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                optimizer.step()
                optimizer.zero_grad()
                outer.step()

    run_in_lockstep(2, live)


UNDOING = {
    "masters made at once": lambda model: Masters(model.parameters()),
    "masters made at the first step": lambda model: Masters(model.parameters(), "late"),
    "masters in the state": lambda model: Masters(model.parameters(), "state"),
    "lookahead": lambda model: Lookahead(model.parameters()),
}


@pytest.mark.parametrize("interval", [3, 8])
@pytest.mark.parametrize("name", UNDOING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_undoes_landings_is_refused(name: str, dtype: torch.dtype, interval: int) -> None:
    """By its name, in the round after the first landing; before this, regions trained apart and ended with exit code 0."""
    kind = type(UNDOING[name](llama(layers=1))).__name__
    with pytest.raises(InputError, match=f"{kind} keeps a copy of the weights of its own"):
        train(UNDOING[name], dtype, interval)


FOLLOWING = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "masters that follow": lambda model: Masters(model.parameters(), follows=True),
    "remembers": lambda model: Remembers(model.parameters(), lr=0.0),
}


@pytest.mark.parametrize("interval", [3, 8])
@pytest.mark.parametrize("name", FOLLOWING)
def test_an_optimizer_that_follows_the_parameters_trains(name: str, interval: int) -> None:
    train(FOLLOWING[name], torch.float32, interval, steps=3 * STEPS)
