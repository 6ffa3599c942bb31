"""SIGKILL while checkpoints are being written: whatever it leaves behind, the run goes on from the newest complete one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot.checkpoint import COMPLETE
from hf_cocodc.snapshot.checkpoint import read as read_state
from hf_cocodc.snapshot.folders import checkpoints
from hf_cocodc.snapshot.manifest import damage
from tests.processes.forks import TIMEOUT_S, Process, fork, wait_until
from tests.processes.worker import Tokens
from tests.toys import llama, params_of

KILLS = 10
STEPS = 60
STEPS_BETWEEN = 4  # at most, so that the run outlives all kills
CONFIG = OuterConfig(method="streaming", sync_interval=4, num_fragments=3, overlap_steps=3)


def train(folder: Path, saves: bool) -> None:
    """A lone region's run, from where it stands: dropout and several epochs, so that random numbers and data count."""
    model = llama(layers=3, dropout=0.2)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        save_strategy="steps" if saves else "no",
        save_steps=1,
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(22), callbacks=[CoCoDCCallback(CONFIG)])
    trainer.train(resume_from_checkpoint=saves)
    torch.save(params_of(trainer.model), folder / "end.pt")


def complete(folder: Path) -> list[int]:
    """Steps whose checkpoints bear the last mark."""
    return [step for step, path in checkpoints(folder / "region-0").items() if (path / COMPLETE).is_file()]


def newest(folder: Path) -> int:
    return max(complete(folder), default=0)


def saving(folder: Path) -> bool:
    """Whether the newest checkpoint is not complete yet."""
    return max(checkpoints(folder / "region-0"), default=0) > newest(folder)


def resumed_from(folder: Path) -> int:
    """Where the process that writes the journal has begun."""
    begun = [event for event in read(journal_of(folder)) if event["kind"] in ("start", "resume")]
    return begun[-1]["step"] if begun else -1


def journal_of(folder: Path) -> Path:
    return folder / "region-0" / "cocodc" / "journal.jsonl"


def kill_while_saving(process: Process, folder: Path, log: Path, moments: random.Random) -> bool:
    """SIGKILL after a few more checkpoints, at a random moment of the next; whether a broken one is left."""
    goal = newest(folder) + moments.randint(1, STEPS_BETWEEN)
    wait_until(lambda: newest(folder) >= goal, process, log, poll_s=0.001)
    wait_until(lambda: saving(folder), process, log, poll_s=0)
    time.sleep(moments.uniform(0, 0.025))
    process.kill()
    process.join(TIMEOUT_S)
    found = checkpoints(folder / "region-0")
    for step in complete(folder):
        assert damage(found[step]) is None, "what bears the last mark is whole"
        assert not [path for path in found[step].rglob("*") if path.name.startswith(".tmp")], (
            "and nothing else"
        )
    return len(found) > len(complete(folder))


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly_from_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    """Killed ten times while it saves, a run ends with the bits of one that nobody touched."""
    log, moments = tmp_path / "log.txt", random.Random(16)
    again, whole = tmp_path / "again", tmp_path / "whole"
    untouched = fork(train, whole, False, log=log)
    broken = in_flight = 0
    for _ in range(KILLS):
        before = newest(again)
        process = fork(train, again, True, log=log)
        broken += kill_while_saving(process, again, log, moments)
        assert resumed_from(again) == before
        saved = read_state(checkpoints(again / "region-0")[newest(again)]).state
        in_flight += any(fragment["in_flight"] for fragment in saved["fragments"])
    assert newest(again) < STEPS
    assert broken >= KILLS // 4, "the kills must come while a checkpoint is being written"
    assert in_flight >= KILLS // 4, "and while transfers are on their way"
    for process in (untouched, fork(train, again, True, log=log)):
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, log.read_text()[-4000:]
    assert torch.equal(torch.load(again / "end.pt"), torch.load(whole / "end.pt"))
    sends = [
        (event["step"], event["fragment"]) for event in read(journal_of(again)) if event["kind"] == "send"
    ]
    untouched_sends = [
        (event["step"], event["fragment"]) for event in read(journal_of(whole)) if event["kind"] == "send"
    ]
    assert sends == untouched_sends, "the journal tells of each send once"
