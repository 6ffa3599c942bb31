"""What a region tells its command while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.status import ENV_STATUS, forget, heard, tell
from hf_cocodc.training.progress import Progress
from tests.processes.worker import Tokens
from tests.toys import llama

STEPS = 3


def test_progress_is_told_from_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that a line needs: steps, tokens, seconds and waiting; and that the model is saved at the end."""
    status, found = tmp_path / "status.json", []
    monkeypatch.setenv(ENV_STATUS, str(status))

    class Look(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            found.append(heard(status))

    args = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=STEPS,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callback = CoCoDCCallback(OuterConfig(sync_interval=2), RegionConfig(region=0, count=1))
    trainer = Trainer(model=llama(), args=args, train_dataset=Tokens(24), callbacks=[callback])
    for each in (Progress(callback, tokens_per_step=96), Look()):
        trainer.add_callback(each)
    trainer.train()
    assert (found[0]["doing"], found[0]["step"], found[0]["steps_made"]) == ("training", 1, 1)
    end = heard(status)
    assert (end["doing"], end["step"], end["max_steps"]) == ("saving the model", STEPS, STEPS)
    assert (end["tokens_per_step"], end["awaits"]) == (96, None)
    assert 0 <= end["blocked_s"] <= end["trained_s"]


def test_an_error_is_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that still tells how far training has come must not hide why it has ended."""
    status = tmp_path / "status.json"
    monkeypatch.setenv(ENV_STATUS, str(status))
    tell("has ended with an error", error="no space", exit_code=2)
    tell("training", step=5)
    assert heard(status)["error"] == "no space"


def test_nothing_is_left_where_no_command_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions whose command is gone remove what they told it, the last one with the folder; they tell no more."""
    statuses = [tmp_path / "statuses" / f"region-{region}.json" for region in (0, 1)]
    statuses[0].parent.mkdir()
    for status in statuses:
        monkeypatch.setenv(ENV_STATUS, str(status))
        tell("training", step=5)
    for status in statuses:
        assert status.is_file()
        monkeypatch.setenv(ENV_STATUS, str(status))
        forget()
        tell("training", step=6)
        assert not status.exists()
    assert not statuses[0].parent.exists()
    forget()
