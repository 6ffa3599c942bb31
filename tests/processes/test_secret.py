"""Regions with a secret, in real processes over real sockets: a stranger at their coordinator changes nothing."""

from __future__ import annotations

import contextlib
import functools
import signal
from pathlib import Path

import psutil
import pytest
import torch

from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.server import Served, serve_in_thread
from hf_cocodc.net.keys import Keys
from tests.processes.ending_worker import live
from tests.processes.forks import TIMEOUT_S, fork, region_env, wait_until
from tests.processes.strangers import ordering
from tests.processes.test_failures import start, training_processes, wait_for_step
from tests.secret import secret

SECRET, OTHER = secret("ours"), secret("another")


def begin(folder: Path, *secrets: str | None, begun: str | None = None) -> tuple[Served, list]:
    """Regions, each with its secret; and a coordinator that was `begun` with one."""
    coordinator = serve_in_thread(secrets=[] if begun is None else [Keys.from_secret(begun)])
    folder.mkdir()
    processes = [
        fork(
            functools.partial(live, step_s=0.1),
            str(folder),
            log=folder / "log.txt",
            **region_env(coordinator, region),
            **({} if own is None else {"HF_COCODC_SECRET": own}),
        )
        for region, own in enumerate(secrets)
    ]
    return coordinator, processes


@pytest.mark.slow
def test_a_stranger_at_the_coordinator_changes_no_number(tmp_path: Path) -> None:
    """It gives orders while regions train: they end as a run without a secret. No file has the secret."""
    ends = {}
    for name, own in (("alone", None), ("disturbed", SECRET)):
        folder = tmp_path / name
        coordinator, processes = begin(folder, own, own, begun=own)
        with contextlib.ExitStack() as beside:
            said: list[str] = []
            if own is not None:
                journal = folder / "region-1" / "cocodc" / "journal.jsonl"
                wait_until(journal.is_file, processes[1], folder / "log.txt")
                [run] = status(coordinator.address, Keys.from_secret(own))
                said = beside.enter_context(ordering(coordinator.address, run["name"], None, OTHER))
            for process in processes:
                process.join(TIMEOUT_S)
        log = (folder / "log.txt").read_text()
        assert [process.exitcode for process in processes] == [0, 0], log[-4000:]
        assert bool(said) == (own is not None)
        assert all("secret" in each for each in said)
        ends[name] = [torch.load(folder / f"region{region}-rank0.pt")["weights"] for region in (0, 1)]
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert torch.equal(ends["disturbed"][0], ends["disturbed"][1])
    assert torch.equal(ends["alone"][0], ends["disturbed"][0])


@pytest.mark.parametrize("other", [OTHER, None], ids=["another", "none"])
def test_a_region_with_another_secret_ends_before_it_meets(other: str | None, tmp_path: Path) -> None:
    """At once, with the reason; no secret is shown."""
    folder = tmp_path / "run"
    coordinator, [process] = begin(folder, other, begun=SECRET)
    process.join(TIMEOUT_S)
    said = (folder / "log.txt").read_text()
    assert process.exitcode == 1, said[-4000:]
    assert f"the coordinator at {coordinator.address} refuses this process: " in said
    why = (
        "the caller has another secret" if other else "the coordinator has a secret, and the caller has none"
    )
    assert why in said
    assert SECRET not in said
    assert OTHER not in said


@pytest.mark.slow
def test_a_command_shows_the_secret_nowhere(tmp_path: Path) -> None:
    """In no file that it and its regions write (logs, journals, checkpoints with their cards, recipes), no line on the terminal,
    and no arguments of a process.
    """
    given, home = tmp_path / "given", tmp_path / "home"
    given.write_text(SECRET)
    given.chmod(0o600)
    home.mkdir()
    run = start(home, first=f"import os; os.environ['HF_COCODC_SECRET'] = open({str(given)!r}).read()")
    wait_for_step(run, home)
    children = psutil.Process(run.pid).children(recursive=True)
    arguments = [each.cmdline() for each in children]
    assert len(training_processes(run.pid)) == 2
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=TIMEOUT_S)
    files = [path for path in home.rglob("*") if path.is_file()]
    assert {"README.md", "log.txt", "journal.jsonl", "trainer_state.json"} <= {path.name for path in files}
    assert SECRET not in str((said, arguments))
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
