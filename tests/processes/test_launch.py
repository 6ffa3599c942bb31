"""`hf-cocodc launch` of a script that was written for Trainer, not for us: killed, it comes back and ends with one model."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from hf_cocodc.run.journal import read
from hf_cocodc.snapshot.folders import usable
from tests.processes.launching import ROOT, environment
from tests.processes.test_failures import said_by_now, training_processes

SCRIPT = ROOT / "tests" / "processes" / "clm_script.py"
TIMEOUT_S = 240


def start(folder: Path, *options: str, steps: int) -> subprocess.Popen:
    arguments = [
        "--train_file",
        "text.txt",
        "--output_dir",
        "out",
        "--max_steps",
        str(steps),
        "--save_steps",
        "10",
    ]
    arguments += ["--use_cpu", "--logging_steps", "5", "--learning_rate", "1e-3", "--report_to", "none"]
    return subprocess.Popen(
        [sys.executable, "-m", "hf_cocodc", "launch", *options, str(SCRIPT), *arguments],
        env=environment(HF_DATASETS_CACHE=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def journals(folder: Path) -> list[Path]:
    return [folder / "out" / f"region-{region}" / "cocodc" / "journal.jsonl" for region in (0, 1)]


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_it_is_killed_and_comes_back(tmp_path: Path) -> None:
    """SIGKILL of region 1: region 0 trains on; the command names who was killed. With --resume both go on, and end with equal
    models and a summary.
    """
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    draw = random.Random(0)
    (tmp_path / "text.txt").write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(200)))
    run = start(tmp_path, "--regions", "2", steps=100_000)
    deadline = time.monotonic() + TIMEOUT_S
    while not all(
        each.is_file() and any(e.get("step", 0) >= 20 for e in read(each)) for each in journals(tmp_path)
    ):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=5)
        time.sleep(0.05)
    training_processes(run.pid)[1].send_signal(signal.SIGKILL)
    while not any(each["kind"] == "epoch" and each["losses"] for each in read(journals(tmp_path)[0])):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=5)
        time.sleep(0.05)
    assert run.stdout is not None
    said = said_by_now(run.stdout, "To bring it back:") + run.stdout.readline()
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 130
    assert "region 1 is lost (killed, " in said and "To bring it back:\n    hf-cocodc launch " in said

    stopped = max(usable(tmp_path / "out" / "region-0"))
    run = start(tmp_path, "--regions", "2", "--resume", steps=stopped + 20)
    everyone = psutil.Process(run.pid)
    said, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors + (tmp_path / "runs/clm_script/region-0/log.txt").read_text()[-3000:]
    assert not everyone.is_running()
    assert f"resumed from step {stopped}" in said
    assert "\ninner steps " in said and "\nglobal model " in said
    ends = [next(e for e in reversed(read(each)) if e["kind"] == "finish") for each in journals(tmp_path)]
    assert [each["step"] for each in ends] == [stopped + 20] * 2
    models = [load_file(tmp_path / "out" / f"region-{region}" / "model.safetensors") for region in (0, 1)]
    assert all(bool((models[0][name] == models[1][name]).all()) for name in models[0])
