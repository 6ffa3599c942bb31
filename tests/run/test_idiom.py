"""`get_last_checkpoint(output_dir)`, as the examples of Transformers use it, resumes in all regions or is refused in all."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from hf_cocodc import simulate
from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot import folders, manifest
from hf_cocodc.snapshot.folders import point
from tests.run.test_resuming import STEPS, checkpoint_of, make, weights_of

SAVED = (4, 8, 12, STEPS)


def newest(folder: Path) -> str | None:
    """What a script passes to `trainer.train`; the lines are those of Transformers' examples."""
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


def disk_of(folder: Path, region: int, shared: bool) -> Path:
    return folder if shared else folder / f"disk-{region}"


def train(folder: Path, shared: bool = True, **more: Any) -> list[Trainer]:
    """Two regions that share a disk or have one each; they resume where the idiom finds a checkpoint."""
    found = [newest(disk_of(folder, region, shared)) for region in range(2)]

    def body(region: int, link: Link) -> Trainer:
        trainer = make(disk_of(folder, region, shared), link, **{"save_steps": 4, **more})
        trainer.train(resume_from_checkpoint=found[region])
        return trainer

    return simulate(body, regions=2)


def began_at(folder: Path, region: int) -> int:
    """Step at which the region's last run began."""
    journal = read(folder / f"region-{region}" / "cocodc" / "journal.jsonl")
    return [event["step"] for event in journal if event["kind"] in ("start", "resume")][-1]


def links(folder: Path) -> list[int]:
    assert all(path.is_symlink() for path in folder.glob("checkpoint-*"))
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A run that was never stopped: its folder, and its weights."""
    folder = tmp_path_factory.mktemp("run")
    return folder, torch.stack(weights_of(train(folder)))


@pytest.fixture
def again(run: tuple[Path, Tensor], tmp_path: Path) -> Path:
    """A copy of the folder, as after a crash when region 0 had saved step 12 and region 1 had not."""
    folder = shutil.copytree(run[0], tmp_path / "run", symlinks=True)
    assert links(folder) == list(SAVED)
    for region, step in ((0, STEPS), (1, STEPS), (1, 12)):
        shutil.rmtree(checkpoint_of(folder, region, step))
        point(folder / f"region-{region}")
    for region in range(2):
        point(folder / f"region-{region}")
    assert links(folder) == [4, 8, 12]
    return folder


def test_all_regions_resume_from_the_newest_that_they_have(run: tuple[Path, Tensor], again: Path) -> None:
    """Though the idiom names one that region 1 has not completed."""
    assert newest(again) == str(again / "checkpoint-12")
    assert torch.equal(torch.stack(weights_of(train(again))), run[1])
    assert [began_at(again, region) for region in range(2)] == [8, 8]
    assert links(again) == list(SAVED)


@pytest.mark.slow
def test_a_copy_of_the_folder_may_have_copies_in_place_of_links(
    run: tuple[Path, Tensor], again: Path
) -> None:
    folder = shutil.copytree(again, again.with_name("copy"), symlinks=False)
    assert not (folder / "checkpoint-12").is_symlink()
    assert torch.equal(torch.stack(weights_of(train(folder))), run[1])
    assert [began_at(folder, region) for region in range(2)] == [8, 8]


def test_a_path_in_the_output_folder_goes_back(run: tuple[Path, Tensor], again: Path) -> None:
    """To this step; later ones are given up, and their links go."""

    def body(region: int, link: Link) -> Trainer:
        trainer = make(again, link, save_strategy="no")
        trainer.train(resume_from_checkpoint=str(again / "checkpoint-4"))
        return trainer

    assert torch.equal(torch.stack(weights_of(simulate(body, regions=2))), run[1])
    assert [began_at(again, region) for region in range(2)] == [4, 4]
    assert links(again) == [4]


@pytest.mark.parametrize("step", [77, 2])
def test_a_checkpoint_that_no_region_has_is_refused(step: int, again: Path) -> None:
    """It does not mean an older one; nothing on the disk changes."""

    def body(region: int, link: Link) -> None:
        make(again, link).train(resume_from_checkpoint=str(again / f"checkpoint-{step}"))

    with pytest.raises(
        CheckpointError, match=f"is to resume from checkpoint-{step}, which no region has. Name one that is"
    ):
        simulate(body, regions=2)
    assert links(again) == [4, 8, 12]


@pytest.mark.parametrize("named", [12, None])
def test_one_region_that_has_the_checkpoint_is_enough(
    named: int | None, run: tuple[Path, Tensor], tmp_path: Path
) -> None:
    """Each region has a disk of its own, and region 0's is empty: it takes region 1's checkpoint over."""
    shutil.copytree(run[0], tmp_path / "disk-1", symlinks=True)
    shutil.rmtree(tmp_path / "disk-1" / "region-0")

    def body(region: int, link: Link) -> Trainer:
        home, step = tmp_path / f"disk-{region}", 12 if region else named
        trainer = make(home, link, save_strategy="no")
        trainer.train(resume_from_checkpoint=step and str(home / f"checkpoint-{step}"))
        return trainer

    assert torch.equal(*weights_of(simulate(body, regions=2)))
    assert [began_at(tmp_path / f"disk-{region}", region) for region in range(2)] == [12, 12]


def test_a_region_that_has_lost_its_disk_resumes_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It finds nothing, another region does: it takes over the other's checkpoint, and never begins from step 0 alone."""
    train(tmp_path, shared=False)
    shutil.rmtree(checkpoint_of(tmp_path / "disk-0", 0, STEPS))
    shutil.rmtree(tmp_path / "disk-1")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        both = weights_of(train(tmp_path, shared=False))
    assert "region 1 was to begin from step 0, and region 0 is to resume: all resume" in caplog.text
    assert "region 1 has no complete checkpoint of step 12: it takes over region 0's" in caplog.text
    assert torch.equal(*both)
    assert links(tmp_path / "disk-1") == [12, STEPS]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("own 8", None, r"region 0 is to resume from .* \(checkpoint-8\), region 1 is to begin from step 0"),
        ("own 8", "own 4", r"\(checkpoint-8\), region 1 is to resume from .* \(checkpoint-4\)"),
        ("own 8", True, r"\(checkpoint-8\), region 1 is to resume from the newest checkpoint that all"),
        (
            True,
            None,
            r"region 1 is to begin from step 0 though it has checkpoints.*For a new run use another",
        ),
    ],
)
def test_wishes_that_do_not_go_together_are_refused(
    first: Any, second: Any, message: str, again: Path
) -> None:
    """In all regions, with the way out; nothing on the disk changes."""

    def body(region: int, link: Link) -> None:
        wanted = (first, second)[region]
        if isinstance(wanted, str):
            wanted = str(checkpoint_of(again, region, int(wanted.split()[1])))
        make(again, link).train(resume_from_checkpoint=wanted)

    with pytest.raises(CheckpointError, match=message) as caught:
        simulate(body, regions=2)
    assert "resume_from_checkpoint=True, or get_last_checkpoint(output_dir)" in str(caught.value)
    assert links(again) == [4, 8, 12]


def test_a_checkpoint_of_plain_trainer_is_not_mistaken(again: Path) -> None:
    """In the output folder lies one that this package did not write: it is refused, and no older one is used in its place."""
    (again / "checkpoint-20").mkdir()
    with pytest.raises(
        CheckpointError, match=r"checkpoint-20 cannot be resumed from: cocodc/COMPLETE is missing"
    ):
        train(again)


def test_links_follow_rotation_and_new_runs(tmp_path: Path) -> None:
    train(tmp_path, save_total_limit=1)
    assert links(tmp_path) == [12, STEPS]
    assert list(folders.checkpoints(tmp_path / "region-0")) == [12, STEPS]
    simulate(lambda region, link: make(tmp_path, link, max_steps=4, save_steps=4).train(), regions=2)
    assert links(tmp_path) == [4], "the checkpoints of the run before are not those of the new one"


def test_a_disk_without_links_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with caplog.at_level(logging.WARNING):
        simulate(lambda region, link: make(tmp_path, link, max_steps=4, save_steps=4).train(), regions=1)
    assert "Operation not supported): get_last_checkpoint does not find them there" in caplog.text
    assert not manifest.damage(checkpoint_of(tmp_path, 0, 4))
