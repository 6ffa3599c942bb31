"""What a region tells its command while it trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.engine.balance import Batch
from hf_cocodc.run.progress import Progress
from hf_cocodc.run.training import Training
from hf_cocodc.status import ENV_STATUS, forget, heard, tell
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
    trainer = Trainer(model=llama(), args=args, train_dataset=Tokens(24), callbacks=[callback, Look()])
    trainer.train()
    assert (found[0]["doing"], found[0]["step"], found[0]["steps_made"]) == ("training", 1, 1)
    assert found[0]["loss"] is None
    end = heard(status)
    assert (end["step"], end["max_steps"], end["landed"]) == (STEPS, STEPS, STEPS)
    assert end["doing"] == "running the rest of the script"
    assert (end["folder"], end["awaits"]) == (str(tmp_path / "run" / "region-0"), None)
    assert 0 <= end["blocked_s"] <= end["trained_s"]
    assert end["batches_made"] == STEPS


def test_the_link_knows_whether_a_step_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not late for one that makes its steps without training."""
    model, link = torch.nn.Linear(2, 2), SimpleNamespace(coasts=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config, regions = OuterConfig(sync_interval=100), RegionConfig(region=0, count=1)
    with (
        OuterOptimizer(Accelerator(cpu=True), model, optimizer, config, regions) as outer,
        monkeypatch.context() as patched,
    ):
        patched.setattr(Training, "session", SimpleNamespace(link=link))
        outer.coast_one()
        assert link.coasts is True
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        outer.step(loss=1.5)
        assert link.coasts is False


def loop(journal: Path | None = None, coasts: int = 0) -> None:
    """A script without a Trainer."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    config, regions = OuterConfig(sync_interval=2), RegionConfig(region=0, count=1)
    with OuterOptimizer(accelerator, model, optimizer, config, regions, journal=journal) as outer:
        for _ in range(STEPS):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            outer.step(loss=torch.tensor(1.5, requires_grad=True))  # as loops have it, and torch warns of
        for _ in range(coasts):
            outer.coast_one()


def test_a_plain_loop_that_resumes_from_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone can load its checkpoint: --resume must not be ignored in silence."""
    status = tmp_path / "status.json"
    monkeypatch.setenv(ENV_STATUS, str(status))
    for resume, said in (("0", False), ("1", True)):
        monkeypatch.setenv("HF_COCODC_RESUME", resume)
        loop()
        lines = [each["line"] for each in heard(status)["lines"]]
        assert any("the script has loaded no checkpoint" in line for line in lines) is said


def test_a_plain_loop_tells_its_progress_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing in the script needs to know. The command prints the summary, and not the script."""
    status = tmp_path / "status.json"
    monkeypatch.setenv(ENV_STATUS, str(status))
    caplog.set_level("INFO")
    loop()
    assert "outer steps" not in caplog.text
    end = heard(status)
    assert (end["step"], end["max_steps"], end["loss"], end["folder"]) == (STEPS, 0, 1.5, None)
    assert "tokens_per_step" not in end


def test_a_script_without_a_command_ends_with_a_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the command would print."""
    caplog.set_level("INFO")
    journal = tmp_path / "run" / "region-0" / "cocodc" / "journal.jsonl"
    loop(journal)
    [said] = [message for message in caplog.messages if message.startswith("finished")]
    rows = {line[:22].rstrip(): line[22:] for line in said.splitlines()}
    assert rows["finished"] == f"{STEPS} inner steps"
    assert rows["outer steps"] == "2"
    assert rows["training blocked"].endswith("%)")
    assert (rows["journal"], rows["report"]) == (str(journal), f"hf-cocodc report {tmp_path / 'run'}")


def test_a_summary_tells_steps_that_were_only_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop without `max_steps` keeps step with the others until they have heard that it ends."""
    caplog.set_level("INFO")
    loop(tmp_path / "run" / "region-0" / "cocodc" / "journal.jsonl", coasts=2)
    [said] = [message for message in caplog.messages if message.startswith("finished")]
    first = said.splitlines()[0][22:]
    assert first == f"{STEPS + 2} inner steps, 2 of them not trained here, to keep step with the others"


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


class Heard:
    """A training of region 1 that only hears events."""

    def __init__(self) -> None:
        self.link = SimpleNamespace(region=1, timing="measured")
        self.engine = SimpleNamespace(totals=SimpleNamespace(landings=0))
        self.inner_step, self.settings = 0, {"sync_interval": 100}
        self.rule_of_batch, self.batch, self.loop = None, Batch(4, 2), SimpleNamespace(started={})
        self.allowed: list[str] = []


@pytest.fixture
def progress() -> Progress:
    return Progress(cast(Training, Heard()))


@pytest.mark.parametrize(
    ("is_dealt", "data"),
    [
        (False, "Until a lost region is back, nobody reads its part of the data."),
        (True, "nobody reads what was dealt to it since its last send that landed."),
    ],
)
def test_a_change_of_the_members_is_logged_and_told(
    is_dealt: bool,
    data: str,
    progress: Progress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, in the words of the command: a script shows what a command shows, and what the batch is from then on. A loss has what
    nobody reads, and the way back.
    """
    progress._training.is_dealt = is_dealt
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))
    progress.hear("epoch", {"step": 0, "epoch": 0, "losses": 0, "members": [0, 1, 2], "why": ""})
    assert not caplog.messages
    progress.hear(
        "epoch", {"step": 9, "epoch": 1, "losses": 1, "members": [1], "why": "region 0 is lost: no"}
    )
    progress.hear(
        "epoch", {"step": 20, "epoch": 2, "losses": 1, "members": [0, 1], "why": "region 0 has come in"}
    )
    lost, back = (
        "step 9: from here on only region 1 (region 0 is lost: no)",
        "step 20: from here on 2 regions: 0, 1",
    )
    told, way_back = caplog.messages[0].split(" A process that lives comes back by itself.")
    rates = "; the learning rates stay as they are."
    assert told.startswith(f"{lost}. The global batch is 4 samples an inner step (before: 12){rates} ")
    assert told.endswith(data) and way_back
    back += f" (region 0 has come in). The global batch is 8 samples an inner step (before: 4){rates}"
    assert caplog.messages[1] == back
    status = heard(tmp_path / "status.json")
    assert (status["epoch"], status["members"]) == (2, [0, 1])
    assert [each["line"] for each in status["lines"]] == [told, back]
    assert [(each["once"], each["lost"]) for each in status["lines"]] == [
        ("epoch 1", [0, 2]),
        ("epoch 2", []),
    ]


def test_what_is_noted_is_told_and_a_resume_names_its_checkpoint(
    progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A region that comes back to a run has not resumed."""
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))
    caplog.set_level("INFO")
    progress.hear("resume", {"step": 7, "from_region": 0, "joins": True, "checkpoint": "base"})
    progress.hear("resume", {"step": 8, "checkpoint": "run/region-1/checkpoint-8"})
    progress.hear("note", {"step": 8, "message": "checkpoint-9 is not used"})
    progress.hear("evaluate", {"step": 8, "weights": "global", "eval_loss": 1.25, "eval_accuracy": None})
    deal = {"step": 9, "samples": {"0": 12, "1": 4}, "speeds": {"0": 15.53, "1": 5.0}}
    progress.hear("deal", {**deal, "why": "speeds are known"})
    dealt = (
        "step 9: the global batch of 16 samples is dealt anew (speeds are known): region 0: 12 (15.5 a second), "
        "region 1: 4 (5 a second)"
    )
    assert caplog.messages == ["region 1 resumes from run/region-1/checkpoint-8 (step 8)", dealt]
    assert [each["line"] for each in heard(tmp_path / "status.json")["lines"]] == [
        "resumed from step 8 (run/region-1/checkpoint-8)",
        "checkpoint-9 is not used",
        "step 8: held out, global weights: loss 1.250",
        dealt,
    ]


def test_a_newcomer_that_catches_up_tells_no_step(
    progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the steps of the others, and has not begun to train."""
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))
    tell("joining: catching up")
    progress.stepped()
    assert heard(tmp_path / "status.json").keys() == {"doing", "since", "lines"}


def test_a_metric_that_is_no_number_ends_nothing(
    progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compute_metrics` may give an accuracy for each class."""
    monkeypatch.setenv(ENV_STATUS, str(tmp_path / "status.json"))
    progress.hear("evaluate", {"step": 8, "weights": "local", "eval_loss": 1.25, "eval_accuracy": [0.5, 1.0]})
    [line] = heard(tmp_path / "status.json")["lines"]
    assert line["line"] == "step 8: held out, local weights: loss 1.250"


def test_an_evaluation_before_the_first_landing_says_whose_weights_it_shows(
    progress: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and not on start, where everybody knows."""
    caplog.set_level("INFO")
    training: Any = progress._training
    for training.inner_step, training.engine.totals.landings in ((0, 0), (50, 0), (80, 0), (100, 1)):
        progress.note_untrained()
    assert caplog.messages == [
        "the evaluation at step 50 shows the weights from before training: no outer gradient has landed yet "
        "(outer.sync_interval=100)."
    ]
