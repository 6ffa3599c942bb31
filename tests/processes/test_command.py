"""Two commands in one folder, and regions whose command is gone: real processes, through the command line."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot.folders import checkpoints
from hf_cocodc.snapshot.manifest import damage
from tests.processes.forks import fork
from tests.processes.test_failures import TIMEOUT_S, start, training_processes, wait_for_step
from tests.processes.worker import Tokens
from tests.toys import llama


def train(output: str) -> None:
    """What a script does in a folder of its choice."""
    args = TrainingArguments(
        output_dir=output, max_steps=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    Trainer(model=llama(), args=args, train_dataset=Tokens(8), callbacks=[CoCoDCCallback()]).train()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, for the commands of one test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.slow
def test_regions_end_when_their_command_is_gone(tmp_path: Path, temporary: Path) -> None:
    """SIGKILL of the command: the regions stop as after SIGTERM, each with a checkpoint. Until then the folder is locked.

    They remove what the command would have removed at its end.
    """
    run = start(tmp_path)
    wait_for_step(run, tmp_path)
    everyone = psutil.Process(run.pid).children(recursive=True)
    trainers = training_processes(run.pid)
    journal = (tmp_path / "region-0" / "cocodc" / "journal.jsonl").read_bytes()
    second = start(tmp_path)
    _, refusal = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 2
    assert f"region-0 is in use by process {run.pid} on" in refusal
    assert (tmp_path / "region-0" / "cocodc" / "journal.jsonl").read_bytes().startswith(journal)
    trainers[0].suspend()  # so that the regions are still there when the next command comes
    run.kill()
    run.communicate()
    third = start(tmp_path)
    _, refusal = third.communicate(timeout=TIMEOUT_S)
    assert third.returncode == 2
    assert f"region-0 is in use by process {trainers[0].pid} on" in refusal
    trainers[0].resume()
    _, alive = psutil.wait_procs(everyone, timeout=TIMEOUT_S)
    assert not alive
    for region in (0, 1):
        [*_, end] = read(tmp_path / f"region-{region}" / "cocodc" / "journal.jsonl")
        assert (end["kind"], end["exit_code"]) == ("error", 3)
        assert damage(checkpoints(tmp_path / f"region-{region}")[end["step"]]) is None
    assert not list(temporary.glob("hf-cocodc-*"))
    assert not list(tmp_path.glob("region-*/log.1.txt")), (
        "the commands that were refused have written nothing"
    )


@pytest.mark.slow
def test_a_script_is_refused_where_a_region_trains(tmp_path: Path, temporary: Path) -> None:
    """The lock is the callback's, not only the command's; and one region on its own outlives its command."""
    run = start(tmp_path, "--region", "0", "--set", "regions.count=1")
    wait_for_step(run, tmp_path, regions=1)
    [trainer] = training_processes(run.pid).values()
    run.kill()
    run.communicate()
    log = tmp_path / "script.txt"
    other = fork(train, str(tmp_path), log=log)
    try:
        other.join(TIMEOUT_S)
        assert f"InputError: {tmp_path}/region-0 is in use by process {trainer.pid} on" in log.read_text()
        time.sleep(3)
        assert trainer.is_running()
        assert trainer.status() != psutil.STATUS_ZOMBIE
        assert not list(temporary.glob("hf-cocodc-*"))
    finally:
        other.kill()
        trainer.kill()
        psutil.wait_procs([trainer], timeout=TIMEOUT_S)
