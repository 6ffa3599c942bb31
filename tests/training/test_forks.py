"""Regions of a recipe as children of a fork server that has loaded their libraries: what they have like any new process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from hf_cocodc.training import launch
from hf_cocodc.training.forks import SIGNALS, Fork

REFUSED = ["no-such-recipe.yaml"]


def seen(folder: Path, **env: str) -> tuple[Fork, Path]:
    """A region whose recipe is not there; it writes to a log."""
    log = folder / "log.txt"
    log.write_text("an earlier line\n")
    return Fork({**os.environ, "HF_COCODC_REGION": "4", **env}, str(log), REFUSED), log


def test_a_forked_region_is_one_that_a_launcher_would_start(tmp_path: Path) -> None:
    """Its environment, its log and its exit code."""
    first, log = seen(tmp_path)
    assert first.wait() == first.returncode == first.poll() == 2
    earlier, error = log.read_text().splitlines()[:2]
    assert earlier == "an earlier line" and error.startswith(
        "error: recipe 'no-such-recipe.yaml' is not a file"
    )


def test_a_region_that_is_killed(tmp_path: Path) -> None:
    """However early; and a signal that came to its command's group is not lost on it."""
    process, _ = seen(tmp_path, OMP_NUM_THREADS="3")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() in (-signal.SIGKILL, 2)


def test_signals_to_all_processes_of_a_command_do_not_end_the_server(tmp_path: Path) -> None:
    """Ctrl-C and `timeout` signal a process group, and Slurm every process: the regions would seem to lack memory."""
    first, _ = seen(tmp_path)
    first.wait()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for number in SIGNALS:
        os.kill(server, number)
    second, _ = seen(tmp_path)
    assert second.wait() == 2
    assert server == forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def test_threads_that_the_user_has_chosen_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP takes a list, too, for nested parallel regions; it has read it, or the server that was there before has not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    process, log = seen(tmp_path)
    assert process.wait() == 2, log.read_text()


def test_the_environment_of_a_forked_region_is_the_launchers() -> None:
    """What accelerate's launcher sets beside it is about CUDA's and Intel's libraries, and a compiler that is off."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    words = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    words += ["--dynamo_backend", "no", "-m", "hf_cocodc.train"]
    given, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    _, env = prepare_simple_launcher_cmd_env(given)
    ours = launch._ON_CPUS
    assert ours.items() <= env.items()
    others = {key for key, value in env.items() if os.environ.get(key) != value} - set(ours)
    assert all(key.startswith(("KMP_", "ACCELERATE_DYNAMO_", "OMP_NUM_THREADS")) for key in others), others


@pytest.mark.parametrize("closed", [1, 2])
def test_a_command_whose_output_is_closed_keeps_the_other(closed: int) -> None:
    """A supervisor may close one of them; a copy of the other must not take its number."""
    program = f"""
import os
os.close({closed})
from hf_cocodc.training.forks import _silent
with _silent():
    os.write({3 - closed}, b"not seen")
os.write({3 - closed}, b"seen")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=True)
    assert ran.stdout + ran.stderr == b"seen"


def test_a_command_without_output_prints_its_help() -> None:
    words = [sys.executable, "-m", "hf_cocodc", "--help"]
    closed = subprocess.run(["/bin/sh", "-c", 'exec "$@" >&-', "sh", *words], timeout=120, check=False)
    assert closed.returncode == 0
