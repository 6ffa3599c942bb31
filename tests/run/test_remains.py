"""What runs that were killed leave on the disk does no harm to the run that goes on."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_cocodc.errors import CheckpointError, LinkError, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import folders, manifest
from hf_cocodc.training.simulation import simulate
from tests.run.test_resuming import (
    STEPS,
    At,
    callback_of,
    checkpoint_of,
    fail,
    make,
    resumed,
    stopped,
    weights_of,
)


def shorten(folder: Path, region: int, step: int) -> None:
    """Delete a region's checkpoints behind `step`, as if it had not come so far."""
    for later, path in folders.checkpoints(folder / f"region-{region}").items():
        if later > step:
            shutil.rmtree(path)


@pytest.mark.slow
def test_a_half_written_checkpoint_is_written_anew(tmp_path: Path) -> None:
    """Nothing of it enters the one that takes its place, such as a file that had no name yet."""
    resumed(tmp_path)
    for region in range(2):
        shorten(tmp_path, region, 10)
        half = checkpoint_of(tmp_path, region, 10)
        (half / state.COMPLETE).unlink()
        (half / "cocodc" / ".tmpKBVGIk").write_bytes(bytes(1000))
        (half / ".tmpMBVGIk").write_bytes(bytes(1000))
    resumed(tmp_path)
    for region in range(2):
        whole, other = (checkpoint_of(tmp_path, region, step) for step in (10, 6))
        assert manifest.damage(whole) is None
        names = [sorted(path.relative_to(each) for path in each.rglob("*")) for each in (whole, other)]
        assert names[0] == names[1]


def test_a_checkpoint_that_only_some_regions_have_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise that of one region's old run could meet that of another's new run when all resume once more."""
    resumed(tmp_path)
    shorten(tmp_path, 0, 10)
    shorten(tmp_path, 1, 9)

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link, callbacks=(At(10, fail),))
        with pytest.raises((ValueError, RunStopped)):
            trainer.train(resume_from_checkpoint=True)

    with caplog.at_level(logging.WARNING):
        simulate(body, regions=2)
    assert "region 0: checkpoint-10 is given up, because all regions continue from step 9" in caplog.text
    assert manifest.damage(checkpoint_of(tmp_path, 0, 9)) is None
    assert manifest.damage(checkpoint_of(tmp_path, 0, 10)) is not None
    assert resumed(tmp_path)[0].state.global_step == STEPS


@pytest.mark.slow
def test_a_new_run_in_a_folder_that_was_used_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What an earlier run left there, further on, is not what --resume goes on from; its path still is."""
    resumed(tmp_path)
    step = stopped(tmp_path, 6)
    assert step < STEPS
    with caplog.at_level(logging.INFO):
        resumed(tmp_path, save_strategy="no")
    assert f"checkpoint-{STEPS} is not used: it is of an earlier run in this folder" in caplog.text
    assert f"region 0 resumes from {checkpoint_of(tmp_path, 0, step)}" in caplog.text

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link)
        trainer.train(resume_from_checkpoint=str(checkpoint_of(tmp_path, region, STEPS - 1)))

    simulate(body, regions=2)
    assert folders.unusable(checkpoint_of(tmp_path, 0, STEPS)) is None


@pytest.mark.slow
def test_a_region_that_joins_from_a_folder_of_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own checkpoints are further on; it takes over that of the run which the others have."""
    resumed(tmp_path / "other")
    step = stopped(tmp_path, 6)
    shutil.copytree(tmp_path / "other" / "region-0", tmp_path / "region-2")
    with caplog.at_level(logging.WARNING):
        three = resumed(tmp_path, 3, save_strategy="no")
    assert "region 2 holds checkpoints of another run" in caplog.text
    assert f"region 2 has no complete checkpoint of step {step}" in caplog.text
    assert {trainer.state.global_step for trainer in three} == {STEPS}
    assert folders.run_of(tmp_path / "region-2") == folders.run_of(tmp_path / "region-0") != 0
    # what the other run left is as it was, to go on from by its path; that of the same step has made room
    assert manifest.damage(checkpoint_of(tmp_path, 2, STEPS)) is None
    [aside] = (tmp_path / "region-2").glob(f"checkpoint-{step}.replaced")
    assert manifest.damage(aside) is None


class Killed(BaseException):
    """Ends a region as SIGKILL does: at once."""


def killed_in_the_first_save(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """A run of two regions that ends when region 0 has its first checkpoint, and region 1 has only a part of it."""
    seal = state.seal

    def seal_and_die(checkpoint: Path) -> None:
        if checkpoint.parent.name == "region-0":
            seal(checkpoint)
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(state, "seal", seal_and_die)
        with pytest.raises((Killed, LinkError)):
            simulate(lambda region, link: make(folder, link, **more).train(), regions=2)


@pytest.mark.slow
def test_a_kill_inside_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A region that has none takes over that of another."""
    killed_in_the_first_save(tmp_path, monkeypatch, save_steps=5)
    assert manifest.damage(checkpoint_of(tmp_path, 0, 5)) is None
    assert not manifest.is_sealed(checkpoint_of(tmp_path, 1, 5))
    run = folders.run_of(tmp_path / "region-0")
    assert torch.equal(*weights_of(resumed(tmp_path, save_steps=5)))
    assert "region 1 has no complete checkpoint of step 5: it takes over region 0's" in caplog.text
    for region in range(2):
        folder = tmp_path / f"region-{region}"
        assert list(folders.checkpoints(folder)) == [5, 10, STEPS]
        assert folders.run_of(folder) == run


def test_a_region_that_lost_its_checkpoints_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody deleted them, or all are damaged: no reason to give up the steps of the others."""
    resumed(tmp_path, save_steps=5)
    shorten(tmp_path, 0, 5)
    shorten(tmp_path, 1, 0)
    resumed(tmp_path, save_strategy="no")
    assert "region 1 has no complete checkpoint of step 5: it takes over region 0's" in caplog.text


def test_a_region_that_failed_takes_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others saved when they stopped, perhaps long after the last checkpoint: these steps are not given up."""

    def body(region: int, link: Link) -> None:
        callbacks = (At(7, fail),) if region else ()
        with pytest.raises((ValueError, RunStopped)):
            make(tmp_path, link, callbacks=callbacks, save_strategy="no").train()

    simulate(body, regions=2)
    [step] = folders.checkpoints(tmp_path / "region-0")
    resumed(tmp_path, save_strategy="no")
    assert f"region 1 has no complete checkpoint of step {step}: it takes over region 0's" in caplog.text
    begun = read(tmp_path / "region-1" / "cocodc" / "journal.jsonl")[0]
    assert (begun["kind"], begun["step"], begun["from_region"]) == ("resume", step, 0), (
        "it goes on, in a new journal"
    )


def test_a_region_that_has_stopped_says_which_checkpoint_all_have(tmp_path: Path) -> None:
    """Region 1 fails, and saves nothing then: the resumed run goes on from the step that both have, not from the last one."""

    def body(region: int, link: Link) -> str:
        callbacks = (At(7, fail),) if region else ()
        with pytest.raises((ValueError, RunStopped)) as error:
            make(tmp_path, link, callbacks=callbacks, save_steps=3, name="diloco").train()
        return str(error.value)

    said, _ = simulate(body, regions=2)
    *_, common, newest = folders.checkpoints(tmp_path / "region-0")
    assert (
        f"This region has saved checkpoint-{newest} in its folder. All regions have checkpoint-{common} ("
        in said
    )
    resumed(tmp_path, save_strategy="no", name="diloco")
    assert [event["step"] for event in read(tmp_path / "region-0" / "cocodc" / "journal.jsonl")
            if event["kind"] == "resume"] == [common]  # fmt: skip


def test_a_save_destroys_nothing_of_another_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new run in the same folder that saves at the same step: the earlier checkpoint is renamed, and can be resumed."""
    [first] = resumed(tmp_path, 1, save_steps=7)
    simulate(lambda region, link: make(tmp_path, link, save_steps=7, max_steps=7).train(), regions=1)
    [aside] = (tmp_path / "region-0").glob("checkpoint-7.replaced")
    assert f"{checkpoint_of(tmp_path, 0, 7)} is there already: it is renamed to {aside}" in caplog.text
    assert manifest.damage(aside) is None
    assert folders.unusable(checkpoint_of(tmp_path, 0, 7)) is None

    def body(region: int, link: Link) -> Trainer:
        trainer = make(tmp_path, link, save_strategy="no")
        trainer.train(resume_from_checkpoint=str(aside))
        return trainer

    [again] = weights_of(simulate(body, regions=1))
    assert torch.equal(again, weights_of([first])[0])


def test_rotation_leaves_another_runs_checkpoints_alone(tmp_path: Path) -> None:
    """They are neither deleted nor counted."""
    resumed(tmp_path, 1, save_steps=2, max_steps=6)
    simulate(
        lambda region, link: make(tmp_path, link, save_steps=5, save_total_limit=2).train(),
        regions=1,
    )
    found = folders.checkpoints(tmp_path / "region-0")
    assert list(found) == [2, 4, 6, 10, STEPS]
    assert [step for step, path in found.items() if folders.is_of_another_run(path)] == [2, 4, 6]


def test_a_resume_that_is_refused_leaves_the_journal(tmp_path: Path) -> None:
    """The fragments differ from those that were saved, and the journal goes beyond the checkpoint."""
    resumed(tmp_path, 1, save_steps=5)
    shorten(tmp_path, 0, 5)
    journal = tmp_path / "region-0" / "cocodc" / "journal.jsonl"
    before = journal.read_bytes()

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link)
        callback = callback_of(trainer)
        callback.config = dataclasses.replace(callback.config, num_fragments=2)
        trainer.train(resume_from_checkpoint=True)

    with pytest.raises(CheckpointError, match="the checkpoint has 3 fragments, this run 2"):
        simulate(body, regions=1)
    assert journal.read_bytes()[: len(before)] == before


def test_a_run_that_stops_saves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second saving of the same step would put the complete checkpoint at risk while the process is being ended."""
    sealed, seal = [], state.seal
    monkeypatch.setattr(state, "seal", lambda checkpoint: [sealed.append(checkpoint), seal(checkpoint)])
    step = stopped(tmp_path, 6)
    assert sorted(sealed) == [checkpoint_of(tmp_path, region, step) for region in range(2)]
