"""What regions agree on before step 1: the length of the run, before anything is derived from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from transformers import Trainer, get_scheduler

from hf_cocodc import simulate
from hf_cocodc.errors import CheckpointError, InputError, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.snapshot.receive import Received
from hf_cocodc.trainer.beginning import Beginning, told
from tests.processes.worker import Tokens
from tests.run.test_resuming import At, callback_of, make
from tests.toys import params_of

EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "warmup_steps": 0.25, "logging_steps": 1}


def unequal(folder: Path, link: Link, callbacks: tuple = (), **more: Any) -> Trainer:
    """A Trainer with an epoch of 6 inner steps in region 0, and of 8 in region 1."""
    data = Tokens(12 + 4 * link.region, seed=link.region)
    return make(folder, link, data=data, callbacks=callbacks, **{**EPOCHS, **more})


def rates(trainer: Trainer) -> list[float]:
    """The learning rate of every inner step."""
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def schedule(steps: int) -> list[float]:
    """The learning rates of a run of this length, by Transformers' own schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=steps // 4, num_training_steps=steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_the_schedule_of_unequal_shards_is_one(tmp_path: Path) -> None:
    """Two epochs of 6 and of 8 inner steps: both regions warm up, decay and evaluate as a run of 12 does."""

    def body(region: int, link: Link) -> Trainer:
        trainer = unequal(tmp_path, link, save_strategy="no", eval_strategy="steps", eval_steps=0.25)
        trainer.train()
        return trainer

    trainers = simulate(body, regions=2)
    for trainer in trainers:
        assert rates(trainer) == schedule(12)
        assert (trainer.state.max_steps, trainer.state.eval_steps) == (12, 3)
        assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]
    assert torch.equal(*(params_of(trainer.model) for trainer in trainers))


def test_the_schedule_of_unequal_shards_goes_on_after_a_resume(tmp_path: Path) -> None:
    """Stopped after 7 of 12 steps, in region 1's first epoch and region 0's second one."""

    def stop(region: int, link: Link) -> None:
        trainer = unequal(tmp_path, link, save_strategy="no")
        if region == 0:
            callback = callback_of(trainer)
            trainer.add_callback(At(6, lambda control: callback._note_signal("SIGTERM")))
        with pytest.raises(RunStopped):
            trainer.train()

    def go_on(region: int, link: Link) -> list[float]:
        trainer = unequal(tmp_path, link, save_strategy="no")
        trainer.train(resume_from_checkpoint=True)
        return rates(trainer)

    simulate(stop, regions=2)
    assert simulate(go_on, regions=2) == [schedule(12)] * 2


STEPS_2 = {"eval_strategy": "steps", "eval_steps": 2}
DELAYED = {**STEPS_2, "eval_delay": 3}
NEVER = {"eval_strategy": "no"}
STREAM = Tokens(16).rows.tolist()


def rows() -> Iterator[dict[str, list[int]]]:
    return ({"input_ids": row, "labels": row} for row in STREAM)


@pytest.mark.parametrize(
    ("common", "own", "message"),
    [
        (
            STEPS_2,
            NEVER,
            r"disagree on training.eval_strategy: region 0 has 'steps', region 1 has 'no'",
        ),
        (STEPS_2, DELAYED, r"disagree on training.eval_delay: region 0 has 0, region 1 has 3"),
        (
            {"eval_on_start": True},
            {"eval_on_start": False},
            r"disagree on training.eval_on_start: region 0 has True, region 1 has False",
        ),
        (
            {"eval_strategy": "epoch", "data": IterableDataset.from_generator(rows)},
            {},
            r"epochs of this data have no known length.* eval_strategy=steps",
        ),
        (
            {"save_strategy": "steps", "save_steps": 3},
            {"save_strategy": "no"},
            r"disagree on training.save_strategy: region 0 has 'steps', region 1 has 'no'",
        ),
        (
            STEPS_2,
            {"evaluate_on": "local"},
            r"disagree on evaluation.on: region 0 has 'global', region 1 has 'local'",
        ),
    ],
)
def test_regions_that_would_wait_for_each_other_in_vain(
    common: dict, own: dict, message: str, tmp_path: Path
) -> None:
    """With eager updates an evaluation needs all regions. What they do not do together is refused before step 1."""

    def body(region: int, link: Link) -> None:
        make(tmp_path, link, "eager", **{"save_strategy": "no", **common, **(own if region else {})}).train()

    with pytest.raises(InputError, match=message):
        simulate(body, regions=2)


def test_a_region_alone_evaluates_after_epochs_of_unknown_length(tmp_path: Path) -> None:
    """It needs nobody for it."""

    def body(region: int, link: Link) -> int:
        data = IterableDataset.from_generator(rows)
        trainer = make(
            tmp_path, link, "eager", data=data, eval_strategy="epoch", max_steps=2, save_strategy="no"
        )
        trainer.train()
        return trainer.state.global_step

    assert simulate(body, regions=1) == [2]


def test_an_evaluation_that_needs_no_other_region_may_take_place_in_one(tmp_path: Path) -> None:
    """All regions hold the same global weights: region 1 need not evaluate them, nor at the start."""

    def body(region: int, link: Link) -> list[int]:
        how = NEVER if region else {**STEPS_2, "eval_on_start": True}
        trainer = make(tmp_path, link, save_strategy="no", max_steps=4, **how)
        trainer.train()
        return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]

    assert simulate(body, regions=2) == [[0, 2, 4], []]


@pytest.mark.parametrize("said", [[100], [100.5, 7], ["100", 7], 100, {"max_steps": 100}])
def test_what_a_donor_says_of_the_start_is_checked(said: Any, tmp_path: Path) -> None:
    received = Received(tmp_path, 2, 4, 7, {"Beginning": said})
    with pytest.raises(CheckpointError, match="region 2 sends a base without what the regions agreed on"):
        told(received)
    assert told(received._replace(started={"Beginning": [9, 7]})) == {2: Beginning(9, 7)}
    assert told(None) == {}
