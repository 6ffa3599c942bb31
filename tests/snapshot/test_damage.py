"""Checkpoints that have changed on the disk: named, skipped for older ones, refused where a path was given; never trained on."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import folders, manifest
from hf_cocodc.snapshot.local_weights import weights_file
from hf_cocodc.training.simulation import simulate
from tests.run.test_resuming import STEPS, checkpoint_of, make, resumed, weights_of

LAST, BEFORE = STEPS - 2, STEPS - 4
Damage = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A run of two regions that was stopped by hand before its end: its folder, and the weights it would come to."""
    folder = tmp_path_factory.mktemp("run")
    whole = weights_of(resumed(folder, save_steps=2))
    for region in range(2):
        shutil.rmtree(checkpoint_of(folder, region, STEPS))
    return folder, whole


@pytest.fixture
def again(run: tuple[Path, list[Tensor]], tmp_path: Path) -> Path:
    """A copy of the run's folder."""
    shutil.copytree(run[0], tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_step(checkpoint: Path, other: Path) -> None:
    path = checkpoint / "trainer_state.json"
    path.write_text(path.read_text().replace(f'"global_step": {LAST}', f'"global_step": {LAST - 1}'))


DAMAGES: dict[str, tuple[str, Damage]] = {
    "a bit of the local weights": (
        weights_file(),
        lambda own, other: flip(own / weights_file()),
    ),
    "a bit of the inner optimizer": ("optimizer.pt", lambda own, other: flip(own / "optimizer.pt")),
    "the other region's random numbers": (
        "rng_state.pth",
        lambda own, other: None if shutil.copyfile(other / "rng_state.pth", own / "rng_state.pth") else None,
    ),
    "an edited step": ("trainer_state.json", edit_step),
    "a bit of our own tensors": (
        "cocodc/global-lane0.safetensors",
        lambda own, other: flip(own / state.tensors_file()),
    ),
    "a bit of the list of files": (state.COMPLETE, lambda own, other: flip(own / state.COMPLETE)),
    "weights that were not there": (
        "pytorch_model.bin",
        lambda own, other: None if (own / "pytorch_model.bin").write_bytes(b"weights") else None,
    ),
}


QUICK = ("a bit of the inner optimizer", "an edited step")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DAMAGES]
)
def test_all_regions_go_back_to_the_newest_that_is_good_everywhere(
    name: str, run: tuple[Path, list[Tensor]], again: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where only region 1's is damaged, too; what was skipped is said, and the numbers are those of a run never stopped."""
    file, damage = DAMAGES[name]
    damage(checkpoint_of(again, 1, LAST), checkpoint_of(again, 0, LAST))
    with caplog.at_level(logging.INFO):
        trainers = resumed(again, save_strategy="no")
    assert f"region 1: {checkpoint_of(again, 1, LAST)} is not used: {file}" in caplog.text
    assert f"region 0 resumes from {checkpoint_of(again, 0, BEFORE)}" in caplog.text
    assert torch.equal(torch.stack(weights_of(trainers)), torch.stack(run[1]))
    notes = [e for e in read(again / "region-1" / "cocodc" / "journal.jsonl") if e["kind"] == "note"]
    assert [f"{file}" in note["message"] for note in notes] == [True]


def test_what_was_expected_and_what_was_found(again: Path) -> None:
    flip(checkpoint_of(again, 0, LAST) / "optimizer.pt")
    wrong = manifest.damage(checkpoint_of(again, 0, LAST))
    assert wrong is not None
    files = json.loads((checkpoint_of(again, 0, LAST) / state.COMPLETE).read_text())["files"]
    saved = files["optimizer.pt"]["sha256"][:12]
    assert wrong.startswith("optimizer.pt has changed since it was saved: its SHA-256 is ")
    assert wrong.endswith(f", {saved} was saved")


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file, except the one that says who writes there now."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_damaged_checkpoint_that_a_path_names_is_refused(again: Path) -> None:
    """The reason is said, and the way out."""
    flip(checkpoint_of(again, 1, LAST) / weights_file())
    said = []

    def body(region: int, link: Link) -> Trainer:
        trainer = make(again, link)
        with pytest.raises(CheckpointError) as caught:
            trainer.train(resume_from_checkpoint=str(checkpoint_of(again, region, LAST)))
        said.append(str(caught.value))
        return trainer

    before = contents(again)
    simulate(body, regions=2)
    first, second = sorted(said)
    assert f"checkpoint-{LAST} cannot be resumed from: {weights_file()} has changed" in first
    assert f"region 1 cannot resume from its checkpoint-{LAST}" in second
    for message in said:
        assert "let regions find the newest that all of them have: resume_from_checkpoint=True" in message
    assert before == contents(again)


def test_only_damaged_checkpoints_are_refused(again: Path) -> None:
    """A run of many hours does not start anew by itself."""
    for region in range(2):
        for path in folders.checkpoints(again / f"region-{region}").values():
            flip(path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"to resume from: none of region 0 and region 1 can be used"):
        resumed(again)


def test_every_damage_to_the_number_of_the_run_is_found(tmp_path: Path) -> None:
    """A file that is cut, or has one wrong bit, never gives another number: intact checkpoints would be those of another run."""
    folders.begin_run(tmp_path, 1_753_112_345)
    path = tmp_path / folders.RUN
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(content))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            folders.run_of(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "a folder"])
def test_a_damaged_number_of_the_run_is_named(damage: str, again: Path) -> None:
    """The error names the file, not the checkpoints."""
    path = again / "region-1" / folders.RUN
    number = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(number[:3])
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=f"{path} is damaged: .* or give the path of a checkpoint"):
        resumed(again)


def test_a_path_makes_up_for_a_damaged_number_of_the_run(again: Path) -> None:
    """The checkpoint has the number, too, and the run goes on with it."""
    path = again / "region-1" / folders.RUN
    path.write_bytes(path.read_bytes()[:3])

    def body(region: int, link: Link) -> None:
        make(again, link).train(resume_from_checkpoint=str(checkpoint_of(again, region, LAST)))

    simulate(body, regions=2)
    assert folders.run_of(again / "region-1") == folders.run_of(again / "region-0")
