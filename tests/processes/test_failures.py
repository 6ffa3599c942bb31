"""What a user sees when something breaks while regions are running: real processes, through the command line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil
import pytest
from safetensors.torch import load_file

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.run.journal import Journal, read
from hf_cocodc.snapshot.folders import usable
from tests.processes.launching import ROOT, environment, flags, little_text

RECIPE = str(ROOT / "recipes" / "quickstart" / "diloco.yaml")
TINY = [
    *("model.config.hidden_size=32", "model.config.num_hidden_layers=2"),
    *("training.eval_strategy=no", "training.eval_on_start=false"),
    *("training.max_steps=100000", "training.lr_scheduler_type=constant"),
]
TIMEOUT_S = 90


def start(folder: Path, *arguments: str, first: str = "pass") -> subprocess.Popen:
    """`hf-cocodc train` on a run that would last for hours; `first` is what its process does before."""
    sets = [f"training.output_dir={folder}", *TINY, *little_text(folder / "text")]
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{first}; import sys; from hf_cocodc.cli.main import main; sys.exit(main())",
            "train",
            RECIPE,
            *flags(sets),
            *arguments,
        ],
        env=environment(HF_DATASETS_CACHE=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def wait_for_step(run: subprocess.Popen, folder: Path, regions: int = 2, step: int = 20) -> None:
    """Until every region's journal tells of `step`."""
    journals = [folder / f"region-{region}" / "cocodc" / "journal.jsonl" for region in range(regions)]
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and run.poll() is None:
        if all(j.is_file() and any(e.get("step", 0) >= step for e in read(j)) for j in journals):
            return
        time.sleep(0.2)
    run.kill()
    raise AssertionError(f"training did not start in time: {run.communicate()}")


def training_processes(parent: int) -> dict[int, psutil.Process]:
    """The training process of each region below `parent`, by region: lists of processes name it so."""
    children = psutil.Process(parent).children(recursive=True)
    return {int(each.name().removeprefix("region-")): each for each in children if "region-" in each.name()}


def said_by_now(said: IO[str], words: str) -> str:
    """What a command has printed, up to the line that has these words."""
    lines = []
    for line in said:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"{words!r} was not printed: {''.join(lines)}")


@pytest.mark.slow
def test_a_run_survives_a_killed_region_by_default(tmp_path: Path) -> None:
    """SIGKILL of region 1: the command says at the start what a loss does, and at the loss what it did; region 0 trains on.
    Region 1 comes back by the command that it prints; a signal stops both, and they resume and finish with equal models. The
    summary counts.
    """
    run = start(tmp_path)
    assert run.stdout is not None
    wait_for_step(run, tmp_path)
    training_processes(run.pid)[1].kill()
    said = said_by_now(run.stdout, "To bring it back:")
    assert "if a region is lost, the others train on without it until it is back: at least 1 of 2" in said
    assert "region 1 is lost (killed, " in said
    again = run.stdout.readline().split()
    assert again[:2] == ["hf-cocodc", "train"]
    code = "import sys; from hf_cocodc.cli.main import main; sys.exit(main())"
    back = subprocess.Popen(
        [sys.executable, "-c", code, *again[1:]],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said += said_by_now(run.stdout, "from here on 2 regions: 0, 1")
    assert "(region 1 is lost: " in said
    assert (
        "The global batch is 4 samples an inner step (before: 8); the learning rates stay as they are."
        in said
    )
    assert "The global batch is 8 samples an inner step (before: 4)" in said
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 130 and "is complete in region 0 under" in errors, errors
    assert "the commands of the others know theirs" in errors
    back.communicate(timeout=TIMEOUT_S)
    assert back.returncode == 3
    step = max(usable(tmp_path / "region-0"))
    assert step in usable(tmp_path / "region-1")

    run = start(tmp_path, "--resume", "--set", f"training.max_steps={step + 20}")
    said, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    assert f"resumed from step {step}" in said
    assert re.search(r"\nlosses +1 of a region, 1 return\n", said), said
    models = [load_file(tmp_path / f"region-{region}" / "model.safetensors") for region in (0, 1)]
    assert all(bool((models[0][name] == models[1][name]).all()) for name in models[0])


@pytest.mark.slow
def test_a_run_finishes_without_a_killed_region(tmp_path: Path) -> None:
    """Exit code 0, and the summary says who was missing."""
    run = start(tmp_path, "--set", "training.max_steps=600")
    wait_for_step(run, tmp_path)
    training_processes(run.pid)[1].kill()
    said, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    assert re.search(r"\nregions +2, 1 from step \d+ \(region 1 lost\)\n", said), said
    assert re.search(r"\nlosses +1 of a region, no returns\n", said), said
    assert (tmp_path / "region-0" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_killed_region_is_named_by_the_other(tmp_path: Path) -> None:
    """With on_loss=stop, SIGKILL of region 1 ends region 0 with a checkpoint, and a message that names region 1, without a
    time-out.
    """
    run = start(tmp_path, "--set", "regions.on_loss=stop")
    wait_for_step(run, tmp_path)
    training_processes(run.pid)[1].kill()
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    assert "error: [region 1] was killed" in errors
    assert (
        "error: [region 0] region 1 is lost: region 1 closed its connection while region 0 waited for"
        in errors
    )
    [step] = re.findall(r"This region has saved checkpoint-(\d+)", errors)
    assert [int(step)] == [*usable(tmp_path / "region-0")]
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_frozen_region_is_named_after_the_timeout(tmp_path: Path) -> None:
    """A region that is stopped, not dead, costs timeout_s; the message says how long and for what."""
    impatient = "from hf_cocodc.training import launch; launch.GRACE_S = 3"
    run = start(tmp_path, "--set", "regions.timeout_s=4", "--set", "regions.on_loss=stop", first=impatient)
    wait_for_step(run, tmp_path)
    frozen = training_processes(run.pid)[1]
    frozen.send_signal(signal.SIGSTOP)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    assert "error: [region 0] region 1 is lost: it has given no heartbeat for" in errors
    assert "(regions.timeout_s=4)" in errors and "This region has saved checkpoint-" in errors
    assert not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE, "nothing is left behind"


@pytest.mark.slow
def test_sigterm_stops_all_regions_at_one_step_with_a_checkpoint(tmp_path: Path) -> None:
    """Regions stop together, the exit code is 128 and the signal's number, and the message says how to go on."""
    run = start(tmp_path)
    wait_for_step(run, tmp_path)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 143
    assert "interrupted at step" in errors
    assert "is complete in every region" in errors
    assert not psutil.wait_procs(children, timeout=TIMEOUT_S)[1]


@pytest.mark.slow
def test_a_terminal_that_closes_before_there_is_anything_to_save(tmp_path: Path) -> None:
    """Regions that have not begun end at once, and none is lost. SIGHUP would end the command alone."""
    run = start(
        tmp_path, first="import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    )  # under nohup, too
    deadline = time.monotonic() + TIMEOUT_S
    while len(children := training_processes(run.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGHUP)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 129
    assert "Traceback" not in errors
    assert not [
        child for child in children.values() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_regions_at_once(tmp_path: Path) -> None:
    """Where regions cannot agree to stop, because one is frozen, a second SIGINT ends every process."""
    run = start(tmp_path, "--set", "outer.sync_interval=100000")
    wait_for_step(run, tmp_path)
    children = psutil.Process(run.pid).children(recursive=True)
    training_processes(run.pid)[1].suspend()
    run.send_signal(signal.SIGINT)
    time.sleep(2)
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "no checkpoint is complete in every region" in errors
    assert not psutil.wait_procs(children, timeout=TIMEOUT_S)[1]


@pytest.mark.slow
def test_a_region_that_never_comes(tmp_path: Path) -> None:
    """One region of two, alone at the coordinator, ends after start_timeout_s and names the one that is missing."""
    address = serve_in_thread().address
    run = start(tmp_path, "--region", "0", "--coordinator", address, "--set", "regions.start_timeout_s=3")
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    assert "region 1 did not arrive within 3 s" in errors


@pytest.mark.slow
def test_regions_that_disagree(tmp_path: Path) -> None:
    """Two regions started with another interval end at the handshake: the field and both values are named; exit code 2."""
    to = ["--coordinator", serve_in_thread().address]
    runs = [
        start(tmp_path, "--region", str(region), *to, "--set", f"outer.sync_interval={10 + region}")
        for region in (0, 1)
    ]
    errors = [run.communicate(timeout=TIMEOUT_S)[1] for run in runs]
    for run, error in zip(runs, errors, strict=True):
        assert run.returncode == 2
        assert "disagree on outer.sync_interval: region 0 has 10, region 1 has 11" in error


@pytest.mark.slow
def test_an_empty_share_of_data_is_said_and_destroys_nothing(tmp_path: Path) -> None:
    """Text that does not fill one block is an input error (exit code 2), said once for both regions.

    They find it late, in their own processes. The record of the run before, in the same folders, is all there.
    """
    before = {}
    for region in (0, 1):
        folder = tmp_path / f"region-{region}"
        Journal(folder / "cocodc" / "journal.jsonl").write("finish", step=800)
        (folder / "log.txt").write_text("the log of the run before\n")
        (folder / "model.safetensors").write_bytes(b"the model of the run before")
        (folder / "checkpoint-9").mkdir()
        (folder / "cocodc" / "run").write_text("7")
        before.update({path: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    run = start(tmp_path, "--set", "data.block_size=100000000")
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 2
    assert "do not fill one block of block_size=100000000" in errors
    assert "Traceback" not in errors
    for path, held in before.items():
        now = path.with_name("log.1.txt") if path.name == "log.txt" else path
        assert now.read_bytes() == held
