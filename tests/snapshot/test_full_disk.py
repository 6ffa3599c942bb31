"""A disk that is full: one paragraph that says what to do, and the others stop with a checkpoint."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import Trainer

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import CheckpointError, InputError, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import Journal, read
from hf_cocodc.snapshot import folders, manifest
from hf_cocodc.snapshot.manifest import saving
from hf_cocodc.training import train
from hf_cocodc.training.simulation import simulate
from tests.run.test_resuming import At, callback_of, checkpoint_of, make
from tests.toys import llama

SMALL = 2000


class Full:
    """As long as it is entered, no file may grow beyond a few bytes: the system refuses, as a full disk does."""

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, self.before[1]))

    def __exit__(self, *error: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_trainers_part_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells of it with a RuntimeError. What was written of the checkpoint goes; the one before stays."""
    save = torch.save

    def save_to_a_full_disk(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-4" in str(path) and "optimizer" in str(path):
            with Full():
                save(content, path, *args, **kwargs)
        save(content, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save_to_a_full_disk)
    trainers: list[Trainer] = []

    def body(region: int, link: Link) -> None:
        trainers.append(make(tmp_path, link, save_steps=2))
        trainers[-1].train()

    with pytest.raises(
        CheckpointError, match=r"checkpoint-4 could not be saved: .*Make room, or save elsewhere"
    ):
        simulate(body, regions=1)
    assert manifest.damage(checkpoint_of(tmp_path, 0, 2)) is None
    assert not checkpoint_of(tmp_path, 0, 4).exists()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "torch": lambda path: torch.save(torch.zeros(SMALL), path),
    "torch, little": lambda path: torch.save({"step": 4}, "/dev/full"),
    "safetensors": lambda path: save_file({"weight": torch.zeros(SMALL)}, path),
    "tokenizers": lambda path: Tokenizer(models.WordLevel({str(each): each for each in range(SMALL)})).save(
        str(path)
    ),
    "Python": lambda path: path.write_text("x" * 2 * SMALL),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_says_that_the_disk_is_full(name: str, tmp_path: Path) -> None:
    """torch hides the system's words, and the tokenizers' error has no class of its own."""
    with (
        pytest.raises(
            CheckpointError, match=r"could not be saved: .*(disk is full|File too large).* Make room"
        ),
        saving(tmp_path),
        Full(),
    ):
        WRITERS[name](tmp_path / "file")


def test_an_error_that_is_not_of_the_disk_is_left_alone(tmp_path: Path) -> None:
    """An upload inside a save, for one: its libraries number their errors, too."""
    for error in (RuntimeError("Connection refused (os error 111)"), ValueError("x"), OSError("no number")):
        with pytest.raises(type(error)) as caught, saving(tmp_path):
            raise error
        assert caught.value is error


def test_accelerates_part_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop is told the same as a Trainer."""
    save = torch.save

    def save_to_a_full_disk(content: Any, *args: Any, **kwargs: Any) -> None:
        with Full():
            save(content, *args, **kwargs)

    def body(region: int, link: Link) -> None:
        accelerator, model = Accelerator(cpu=True), llama()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        with OuterOptimizer(
            accelerator, model, optimizer, OuterConfig(method="diloco"), max_steps=30, link=link
        ) as outer:
            model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()
            outer.step()
            monkeypatch.setattr(torch, "save", save_to_a_full_disk)
            accelerator.save_state(str(tmp_path / "saved"))

    with pytest.raises(
        CheckpointError, match=r"saved could not be saved: .*Earlier complete checkpoints stay, .* Make room"
    ):
        simulate(body, regions=1)


def test_the_journal(tmp_path: Path) -> None:
    """The region that cannot write tells the others, which stop with a checkpoint; its own error says what to do."""

    def body(region: int, link: Link) -> None:
        trainer = make(tmp_path, link, save_strategy="no")
        journal = tmp_path / "region-1" / "cocodc" / "journal.jsonl"

        def fill(control: Any) -> None:
            journal.unlink()
            journal.symlink_to("/dev/full")

        if region:
            trainer.add_callback(At(5, fill))
        callbacks[region] = callback_of(trainer)
        with pytest.raises((InputError, RunStopped)) as caught:
            trainer.train()
        said[region] = str(caught.value)

    said: dict[int, str] = {}
    callbacks: dict[int, Any] = {}
    simulate(body, regions=2)
    assert "journal.jsonl cannot be written: No space left on device. Make room" in said[1]
    assert "region 1 was interrupted (InputError at step" in said[0]
    assert len(folders.checkpoints(tmp_path / "region-0")) == 1


def test_events_after_the_first_that_was_refused(tmp_path: Path) -> None:
    """None is written: the journal has no gap, only an end."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("start", step=0)
    journal.check()
    with Full():
        journal.write("log", step=1, words="x" * 2 * SMALL)
    journal.write("log", step=2)
    assert [event["step"] for event in read(path)] == [0]
    with pytest.raises(InputError, match="cannot be written: File too large"):
        journal.check()


def test_a_log_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer prints its figures there: the error is one paragraph, with exit code 2."""

    def run(recipe: Any) -> None:
        with open("/dev/full", "w") as log:
            print("loss", file=log)  # noqa: T201

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train, "preflight", lambda recipe: None)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: quickstart/diloco\n")
    assert train.main([str(recipe)]) == 2
    assert "error: the disk refuses: [Errno 28] No space left on device. Make room" in capsys.readouterr().err
