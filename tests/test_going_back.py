"""Resuming off the straight path: rolled back, from a path, in the same process, with regions that come and go."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Trainer

from hf_cocodc import CoCoDCCallback, OuterOptimizer, simulate, state
from hf_cocodc.errors import CheckpointError, InputError, RunStopped
from hf_cocodc.links.base import Link
from tests.processes.worker import Tokens
from tests.test_resuming import (
    STEPS,
    At,
    callback_of,
    checkpoint_of,
    config,
    make,
    resumed,
    stopped,
    weights_of,
)
from tests.toys import llama, params_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """What two regions come to that are never stopped."""
    folder = tmp_path_factory.mktemp("whole")

    def body(region: int, link: Link) -> Trainer:
        trainer = make(folder, link, save_strategy="no")
        trainer.train()
        return trainer

    return weights_of(simulate(body, regions=2))


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


@pytest.mark.parametrize("back_from", [6, 9])
def test_a_plain_loop_is_rolled_back(back_from: int, tmp_path: Path) -> None:
    """load_state while transfers of the branch that is given up are in flight: they are given up as well."""

    def loop(link: Link, back_from: int) -> Tensor:
        accelerator, model = Accelerator(cpu=True), llama(link.region)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        rows = Tokens(2 * STEPS, seed=link.region).rows
        with OuterOptimizer(accelerator, model, optimizer, config(), max_steps=STEPS, link=link) as outer:

            def train(until: int) -> None:
                while outer.inner_step < until:
                    batch = rows[2 * outer.inner_step :][:2]
                    accelerator.backward(model(input_ids=batch, labels=batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    outer.step()

            train(until=4)
            accelerator.save_state(str(tmp_path / str(link.region)))
            train(until=back_from)
            if back_from:
                accelerator.load_state(str(tmp_path / str(link.region)))
            train(until=STEPS)
        return params_of(accelerator.unwrap_model(model))

    never = simulate(lambda region, link: loop(link, 0), regions=2)
    assert_equal(simulate(lambda region, link: loop(link, back_from), regions=2), never)
