"""Processes forked from one that has the libraries."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.training import launch
from hf_cocodc.training.forks import Fork, call
from hf_cocodc.training.train import Job, train_forked


def refuse() -> None:
    raise InputError("not this one")


def test_a_call_returns_and_raises_what_its_function_does() -> None:
    """And changes nothing here."""
    assert call(partial(sum, [1, 2, 3])) == 6
    with pytest.raises(InputError, match="^not this one$"):
        call(refuse)
    with pytest.raises(RuntimeError, match="(?s)Traceback.*ZeroDivisionError"):
        call(lambda: 1 // 0)
    call(lambda: os.environ.update(HF_COCODC_REGION="7"))
    assert "HF_COCODC_REGION" not in os.environ


def test_a_call_leaves_ctrl_c_to_its_caller() -> None:
    """A terminal sends it to both processes; the one that waits ends the other."""
    assert call(lambda: os.kill(os.getpid(), signal.SIGINT) or 5) == 5


def test_a_call_that_ends_without_an_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has ended with exit code 4"):
        call(partial(sys.exit, 4))
    with pytest.raises(FileNotFoundError):
        call(partial(open, "/nowhere"))


def test_exit_codes_are_known_where_a_supervisor_has_left_sigchld_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert call(partial(sum, [1, 2])) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_forks_draw_different_random_numbers() -> None:
    """`datasets` names files in a cache, which regions share, by such a number if it cannot hash what made them."""
    import numpy as np
    from datasets.fingerprint import generate_random_fingerprint

    for draw in (generate_random_fingerprint, partial(np.random.randint, 1 << 60), lambda: random.random()):
        assert call(draw) != call(draw)


def test_a_call_that_is_killed_says_so() -> None:
    """By the system, because memory is short."""
    with pytest.raises(InputError, match=r"was killed \(exit code -9\).*too little memory"):
        call(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_fork_waits_for_its_job_and_ends_like_any_process(tmp_path: Path) -> None:
    """Other handlers of signals than here, a process group of its own, and Python's own functions at the end."""
    said = tmp_path / "said"

    def work(job: int) -> None:
        import atexit

        atexit.register(said.write_text, "the end")
        assert os.getpgid(0) == os.getpid()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if job:
            os._exit(job)

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for job in (0, 5):
            said.unlink(missing_ok=True)
            process = Fork(work)
            assert process.poll() is None
            process.begin(job)
            assert process.wait() == process.returncode == process.poll() == job
            assert said.is_file() == (job == 0)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "code"), [("EOFError()", 1), ("SystemExit(4)", 4), ("KeyboardInterrupt()", 130)]
)
def test_an_error_in_a_fork_is_no_success(error: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever it is: the end of a file is also what a fork hears whose command has gone."""

    def work(job: str) -> None:
        raise eval(job)

    process = Fork(work)
    process.begin(error)
    assert process.wait() == code
    assert ("EOFError" in capfd.readouterr().err) == (code == 1)


def test_a_fork_that_was_killed_before_it_began() -> None:
    process = Fork(print)
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.2)
    process.begin("too late")
    assert process.wait() == -signal.SIGKILL


def test_a_fork_that_nobody_needs_ends() -> None:
    """Because the command has ended, or has raised an error before the regions begin."""
    code = (
        "import os; from hf_cocodc.training.forks import Fork; forks = [Fork(print) for _ in range(3)]; "
        "print(*(each.pid for each in forks), flush=True); os._exit(0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pids = [int(each) for each in ended.stdout.split()]
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(pids) == 3 and not ended.stderr


def test_a_forked_region_is_one_that_a_launcher_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment, its log and its exit code; the error goes to the log."""
    log = tmp_path / "log.txt"
    log.write_text("an earlier line\n")
    env = {**os.environ, "OMP_NUM_THREADS": "3", "HF_COCODC_REGION": "4"}

    def main(arguments: list[str]) -> int:
        import torch

        threads = torch.get_num_threads()
        os.write(1, f"{arguments} {os.environ['HF_COCODC_REGION']} {threads}\n".encode())
        os.write(2, b"to stderr\n")
        return 2

    monkeypatch.setattr("hf_cocodc.training.train.main", main)
    process = Fork(train_forked)
    process.begin(Job(env, str(log), ["r.yaml"]))
    assert process.wait() == 2
    assert log.read_text() == "an earlier line\n['r.yaml'] 4 3\nto stderr\n"


def test_threads_that_the_user_has_chosen_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP takes a list, too, for nested parallel regions; it has read it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    monkeypatch.setattr("hf_cocodc.training.train.main", lambda arguments: 0)
    process = Fork(train_forked)
    process.begin(Job(dict(os.environ), str(tmp_path / "log.txt"), []))
    assert process.wait() == 0


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
