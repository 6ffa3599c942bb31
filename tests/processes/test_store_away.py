"""Fixed regions whose store freezes or dies: it carries no sign of life and no reason to leave. Real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_cocodc.links.base import Parcel
from hf_cocodc.links.gloo import GlooLink
from hf_cocodc.links.trailer import Trailer
from hf_cocodc.meeting.store import connect_store
from hf_cocodc.parts import codecs
from hf_cocodc.parts.fragments import Fragment
from tests.processes.forks import fork, wait_until
from tests.processes.stores import StoreProcess
from tests.processes.test_failures import start, wait_for_step

TIMEOUT_S = 90


def a_region(address: str, region: int, slow_s: float, folder: str) -> None:
    """Meets the other once, goes on when told, and makes steps for `slow_s` before it meets it again."""
    link = GlooLink(connect_store(address, 10), "run", region, 2, 1, timeout_s=2.0)
    codec, fragment = codecs.fp32(), Fragment(0, ("a",), ((10,),), 10)

    def meet(step: int) -> None:
        converse = partial(codec.converse, torch.ones(10), fragment, codec.init(fragment))
        link.mean(Parcel(converse, 10, Trailer, f"step {step}")).wait()

    reason = None
    try:
        meet(1)
        Path(folder, f"met-{region}").touch()
        while not Path(folder, f"go-{region}").exists():
            time.sleep(0.01)
        for step in range(int(slow_s * 10)):
            time.sleep(0.1)
            link.tick(step + 1)
        meet(2)
        Path(folder, f"met-again-{region}").touch()
    except Exception as error:
        reason = str(error)
        sys.exit(f"failed: {reason}")
    finally:
        link.close(reason)


class Two:
    """Two regions that have met once; the second makes steps for `slow_s` before it meets again."""

    def __init__(self, store: StoreProcess, folder: Path, slow_s: float = 0.0) -> None:
        self._folder = folder
        self._logs = [folder / f"log-{region}.txt" for region in (0, 1)]
        self.processes = [
            fork(a_region, store.address, region, slow_s * region, str(folder), log=log)
            for region, log in enumerate(self._logs)
        ]
        for region, log in enumerate(self._logs):
            wait_until((folder / f"met-{region}").exists, self.processes[region], log)

    def go(self, *regions: int) -> list[tuple[int | None, str]]:
        """Let these regions go on to their ends: their exit codes, and what they said."""
        for region in regions:
            (self._folder / f"go-{region}").touch()
        try:
            for region in regions:
                self.processes[region].join(TIMEOUT_S)
        finally:
            for process in self.processes:
                process.kill()
        return [(self.processes[region].exitcode, self._logs[region].read_text()) for region in regions]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as found:
        yield found


@pytest.mark.parametrize("how", ["freezes", "dies"])
def test_a_region_is_lost_while_the_store_is_frozen(how: str, store: StoreProcess, tmp_path: Path) -> None:
    """The other one names it and ends; it does not wait for the store to say why."""
    two = Two(store, tmp_path)
    store.freeze()
    pid = two.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP if how == "freezes" else signal.SIGKILL)
    [(code, said)] = two.go(0)
    assert code == 1
    if how == "freezes":
        assert "failed: region 1 sent nothing for" in said
        assert "it has given no sign of life for" in said
        assert "or the network between the regions is down" in said
    else:
        assert "failed: region 1 closed its connection while region 0 waited for step 2" in said


@pytest.mark.slow
def test_a_region_is_slow_while_the_store_is_dead(store: StoreProcess, tmp_path: Path) -> None:
    """Three time-outs of lateness: the region shows that it is alive without a store, and both end well."""
    two = Two(store, tmp_path, 6.0)
    store.kill()
    for code, said in two.go(0, 1):
        assert code == 0, said
    assert all((tmp_path / f"met-again-{region}").exists() for region in (0, 1))


@pytest.mark.slow
def test_a_run_ends_well_while_its_store_is_frozen(store: StoreProcess, tmp_path: Path) -> None:
    """Whole regions, each by its own command: neither training nor the end of a process waits for the store."""
    arguments = [
        "--store",
        store.address,
        "--set",
        "training.max_steps=60",
        "--set",
        "regions.timeout_s=4",
    ]
    runs = [start(tmp_path, "--region", str(region), *arguments) for region in (0, 1)]
    try:
        wait_for_step(runs[0], tmp_path, step=10)
        store.freeze()
        said = [run.communicate(timeout=TIMEOUT_S) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], said
    assert all("60 in each of 2" in output for output, _ in said)
