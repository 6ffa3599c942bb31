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

from hf_cocodc import CoCoDCCallback, OuterOptimizer, simulate
from hf_cocodc.errors import CheckpointError, HandshakeError, InputError, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import folders
from tests.processes.worker import Tokens
from tests.run.test_resuming import (
    STEPS,
    At,
    Dry,
    H,
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


@pytest.mark.parametrize("given", ["own", "region 0's"])
def test_a_path_stands_for_every_regions_own_checkpoint(
    given: str, whole: list[Tensor], tmp_path: Path
) -> None:
    """One script or recipe, with one path in it, serves all regions."""
    step = stopped(tmp_path, 6)

    def body(region: int, link: Link) -> Trainer:
        trainer = make(tmp_path, link, save_strategy="no")
        path = checkpoint_of(tmp_path, region if given == "own" else 0, step)
        trainer.train(resume_from_checkpoint=str(path))
        return trainer

    assert_equal(weights_of(simulate(body, regions=2)), whole)


def test_another_regions_checkpoint_is_refused(tmp_path: Path) -> None:
    """Two regions that went on from one's local weights and random numbers would train the same."""
    step = stopped(tmp_path / "run", 6)
    copy = tmp_path / "copy" / f"checkpoint-{step}"
    shutil.copytree(checkpoint_of(tmp_path / "run", 0, step), copy)

    def body(region: int, link: Link) -> None:
        make(tmp_path / "again", link).train(resume_from_checkpoint=str(copy))

    with pytest.raises(CheckpointError, match=r"region 0's, and this is region 1. Give every region its own"):
        simulate(body, regions=2)


def test_a_region_that_is_left_alone_goes_on_as_another(tmp_path: Path) -> None:
    """Region 0's machine is gone: region 1 goes on from its own checkpoint, as region 0 of one."""
    step = stopped(tmp_path, 6)
    shutil.rmtree(tmp_path / "region-0")
    path = checkpoint_of(tmp_path, 1, step)

    def body(region: int, link: Link) -> Trainer:
        trainer = make(tmp_path, link, save_strategy="no")
        trainer.train(resume_from_checkpoint=str(path))
        return trainer

    [alone] = simulate(body, regions=1)
    assert alone.state.global_step == STEPS


def test_a_region_that_comes_back_takes_the_others_progress_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own checkpoints are older than its leaving: they count for nothing, and cost the others nothing."""
    stopped(tmp_path, 3)
    [alone] = resumed(tmp_path, 1, max_steps=20)
    assert alone.state.global_step == 20
    with caplog.at_level(logging.INFO):
        both = resumed(tmp_path, 2, max_steps=24)
    assert f"region 1 resumes from {checkpoint_of(tmp_path, 1, 20)}" in caplog.text
    assert "region 1 was not there when the checkpoints of step 20 were written" in caplog.text
    assert torch.equal(*weights_of(both))
    assert 20 in folders.checkpoints(tmp_path / "region-0")


def test_a_region_that_has_joined_goes_on_from_what_it_took_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopped before it saved anything of its own, it does not take it over once more."""
    step = stopped(tmp_path, 3)
    resumed(tmp_path, 3, save_strategy="no")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        resumed(tmp_path, 3, save_strategy="no")
    assert f"region 2 resumes from {checkpoint_of(tmp_path, 2, step)}" in caplog.text
    assert "are not used" not in caplog.text
    assert "has no complete checkpoint" not in caplog.text


@pytest.mark.slow
def test_who_goes_back_by_a_path_leaves_the_later_steps_behind(tmp_path: Path) -> None:
    """Resumed from step 6 of 14 and stopped before 14, a run goes on from where it was stopped."""
    resumed(tmp_path)

    def back(region: int, link: Link) -> int:
        trainer = make(tmp_path, link, save_strategy="no")
        if region == 0:
            callback = callback_of(trainer)
            trainer.add_callback(At(7, lambda control: callback._note_signal("SIGTERM")))
        with pytest.raises(RunStopped):
            trainer.train(resume_from_checkpoint=str(checkpoint_of(tmp_path, region, 6)))
        return trainer.state.global_step

    step, other = simulate(back, regions=2)
    assert step == other < STEPS
    for region in range(2):
        assert max(folders.usable(tmp_path / f"region-{region}")) == step


@pytest.mark.slow
def test_checkpoints_are_given_up_only_for_one_that_can_be_gone_on_from(tmp_path: Path) -> None:
    """A resume that is refused leaves everything as it was."""
    resumed(tmp_path)
    (checkpoint_of(tmp_path, 1, STEPS) / state.COMPLETE).unlink()
    with pytest.raises(CheckpointError, match="method=streaming, this run has diloco"):
        resumed(tmp_path, name="diloco")
    assert folders.unusable(checkpoint_of(tmp_path, 0, STEPS)) is None


@pytest.mark.parametrize("shard", [24, 16])
def test_a_signal_in_the_last_interval_changes_nothing(shard: int, tmp_path: Path) -> None:
    """The others hear of it at max_steps, where nothing is left to stop: all finish."""

    def body(region: int, link: Link) -> Trainer:
        data = Tokens(24 if region == 0 else shard, seed=region)
        trainer = make(tmp_path, link, "diloco", data=data, max_steps=3 * H, save_strategy="no")
        if region == 0:
            callback = callback_of(trainer)
            trainer.add_callback(At(3 * H - 1, lambda control: callback._note_signal("SIGTERM")))
        trainer.train()
        return trainer

    trainers = simulate(body, regions=2)
    assert [trainer.state.global_step for trainer in trainers] == [3 * H] * 2
    assert all(callback_of(trainer).outer.finished for trainer in trainers)
    assert torch.equal(*weights_of(trainers))


def test_no_steps_are_made_beyond_max_steps(tmp_path: Path) -> None:
    """A run that was stopped before its end is not closed by asking for fewer steps than it has made."""
    step = stopped(tmp_path, 6)
    with pytest.raises(InputError, match=f"of step {step} .* max_steps={step} leaves nothing to train"):
        resumed(tmp_path, max_steps=step)


def test_the_same_trainer_goes_on(whole: list[Tensor], tmp_path: Path) -> None:
    """As the message of a stopped run advises, and without a new process: in a notebook."""

    def body(region: int, link: Link) -> Trainer:
        trainer = make(tmp_path, link)
        callback = callback_of(trainer)
        if region == 0:
            trainer.add_callback(At(6, lambda control: callback._note_signal("SIGTERM")))
        with pytest.raises(RunStopped):
            trainer.train()
        trainer.pop_callback(At)
        trainer.train(resume_from_checkpoint=True)
        return trainer

    assert_equal(weights_of(simulate(body, regions=2)), whole)


def test_the_same_arguments_serve_a_second_trainer(tmp_path: Path) -> None:
    """Its folder is the first one's."""

    def body(region: int, link: Link) -> str:
        first = make(tmp_path, link)
        second = Trainer(llama(), first.args, callbacks=[CoCoDCCallback(config(), link=link)])
        return str(second.args.output_dir)

    assert simulate(body, regions=2) == [str(tmp_path / f"region-{region}") for region in range(2)]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        (
            "streaming",
            {"save_strategy": "epoch"},
            r"inner steps: 5 in region 0, 6 in region 1.* save_steps=5",
        ),
        ("streaming", {"save_steps": 4}, r"disagree on training.save_steps: region 0 has 4, region 1 has 5"),
        (
            "eager",
            {"save_strategy": "no", "eval_strategy": "epoch"},
            r"inner steps: 5 in region 0, 6 in region 1.* save_steps=5 .eval_strategy",
        ),
    ],
)
def test_what_all_regions_do_together_comes_at_the_same_steps(
    name: str, more: dict, message: str, tmp_path: Path
) -> None:
    """No checkpoint would be complete everywhere where shards, and so epochs, differ in length; said before step 1."""

    def body(region: int, link: Link) -> None:
        own = {"save_steps": more["save_steps"] + region} if "save_steps" in more else {}
        make(tmp_path, link, name, data=Tokens(10 + 2 * region), **more | own).train()

    with pytest.raises(HandshakeError, match=message):
        simulate(body, regions=2)


def test_a_signal_to_a_region_whose_data_has_run_out(tmp_path: Path) -> None:
    """It keeps step with the others, which hear of it as they would of any."""
    callbacks = {}

    def body(region: int, link: Link) -> None:
        data = Dry(10) if region else None
        own = {"accelerator_config": {"dispatch_batches": False}}
        trainer = make(
            tmp_path, link, data=data, when_one_ends="continue", max_steps=40, save_strategy="no", **own
        )
        callbacks[region] = callback_of(trainer)
        if region == 0:
            trainer.add_callback(At(10, lambda control: callbacks[1]._note_signal("SIGTERM")))
        with pytest.raises(RunStopped, match=r"region 1 was interrupted \(SIGTERM\)"):
            trainer.train()

    simulate(body, regions=2)
