"""Trainer's inner optimizers: the learning rate of each step, and those that no region can train with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from hf_cocodc import CoCoDCCallback
from hf_cocodc.errors import InputError
from hf_cocodc.link.lockstep import loopback
from tests.matrix import STEPS, arguments
from tests.processes.worker import Tokens
from tests.run.test_inner_optimizer import CO2, TwoSets, rates_of
from tests.toys import llama


def test_the_rate_of_each_step_in_trainer(tmp_path: Path) -> None:
    """Trainer steps its schedule before a step ends; what counts is the rate that the step used."""
    callback = CoCoDCCallback(CO2, link=loopback())
    trainer = Trainer(
        model=llama(layers=2),
        args=arguments(tmp_path, warmup_steps=2, gradient_accumulation_steps=2),
        train_dataset=Tokens(64),
        callbacks=[callback],
    )
    used, found = [], []

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            found.append(rates_of(callback.outer))

        def on_pre_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            used.append(optimizer.param_groups[0]["lr"])

    trainer.add_callback(Watch())
    trainer.train()
    assert len(used) == STEPS
    assert used[0] == 0
    assert found[0][:STEPS] == used


def test_a_trainer_with_two_sets_of_weights_is_refused_when_it_is_made(tmp_path: Path) -> None:
    """Whether the optimizer is named, given as a class or given itself: before anything is trained."""
    model = llama(layers=2)
    for more, name in (
        ({"args": arguments(tmp_path, optim="schedule_free_adamw")}, "training.optim=schedule_free_adamw"),
        ({"optimizers": (TwoSets(model.parameters(), lr=0.1), None)}, "the optimizer TwoSets"),
        ({"optimizer_cls_and_kwargs": (TwoSets, {"lr": 0.1})}, "the optimizer TwoSets"),
    ):
        given = {"args": arguments(tmp_path), **more}
        with pytest.raises(InputError, match=f"{name} keeps two sets of weights"):
            Trainer(
                model=model,
                train_dataset=Tokens(8),
                callbacks=[CoCoDCCallback(CO2, link=loopback())],
                **given,
            )
