"""The coordinator freezes, dies, and comes back with its file or without it, while regions train: real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc.coordinator.messages import Terms
from hf_cocodc.link.base import MeanRequest
from hf_cocodc.link.records import Trailer
from hf_cocodc.parts import codecs
from hf_cocodc.parts.fragments import Fragment
from tests.link.memory import linked
from tests.processes.coordinators import CoordinatorProcess
from tests.processes.forks import fork, wait_until
from tests.processes.test_elastic import STEPS, Three, check_survivors

TIMEOUT_S, END_S = 2.0, 90


def a_region(address: str, region: int, slow_s: float, folder: str) -> None:
    """Meets the other once, goes on when told, and makes steps for `slow_s` before it meets it again."""
    terms = Terms(count=2, timeout_s=TIMEOUT_S)
    how: dict[str, Any] = {"connections": 1, "timeout_s": TIMEOUT_S}
    link = linked(address, region, terms, period_s=TIMEOUT_S / 4, patience_s=10.0, **how)
    codec, fragment = codecs.fp32(), Fragment(0, ("a",), ((10,),), 10)

    def meet(step: int) -> None:
        converse = partial(codec.converse, torch.ones(10), fragment, codec.init(fragment))
        link.mean(MeanRequest(converse, 10, Trailer, f"step {step}")).wait()

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
        if link.num_regions < 2:
            sys.exit(f"failed: {link.losses_in_words}")
        Path(folder, f"met-again-{region}").touch()
    except Exception as error:
        reason = str(error)
        sys.exit(f"failed: {reason}")
    finally:
        link.close(reason)


class Two:
    """Two regions that have met once; the second makes steps for `slow_s` before it meets again."""

    def __init__(self, coordinator: CoordinatorProcess, folder: Path, slow_s: float = 0.0) -> None:
        self._folder = folder
        self._logs = [folder / f"log-{region}.txt" for region in (0, 1)]
        self.processes = [
            fork(a_region, coordinator.address, region, slow_s * region, str(folder), log=log)
            for region, log in enumerate(self._logs)
        ]
        for region, log in enumerate(self._logs):
            wait_until((folder / f"met-{region}").exists, self.processes[region], log)

    def go(self, *regions: int) -> None:
        """Let these regions go on to their ends."""
        for region in regions:
            (self._folder / f"go-{region}").touch()

    def ends(self, *regions: int) -> list[tuple[int | None, str]]:
        """Of these regions: their exit codes, and what they said."""
        self.go(*regions)
        try:
            for region in regions:
                self.processes[region].join(END_S)
        finally:
            for process in self.processes:
                process.kill()
        return [(self.processes[region].exitcode, self._logs[region].read_text()) for region in regions]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path) as found:
        yield found


@pytest.mark.slow
def test_a_region_dies_while_the_coordinator_is_frozen(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    """The other one names it and ends, after a time-out: it does not wait for the coordinator for longer."""
    two = Two(coordinator, tmp_path)
    coordinator.freeze()
    two.processes[1].kill()
    [(code, said)] = two.ends(0)
    assert code == 1
    assert "failed: region 1 is lost (region 1 cannot be reached: its connections broke while" in said
    assert "the coordinator has not answered for" in said and "It saves no checkpoint of this step" in said


@pytest.mark.slow
def test_a_region_freezes_while_the_coordinator_is_frozen(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    """Nobody can say whether it lives. The other one waits; once the coordinator is back, it names the region and ends."""
    two = Two(coordinator, tmp_path)
    coordinator.freeze()
    pid = two.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    two.go(0)
    time.sleep(2 * TIMEOUT_S)
    assert two.processes[0].is_alive()
    coordinator.thaw()
    [(code, said)] = two.ends(0)
    assert code == 1
    assert "failed: region 1 is lost: it has given no heartbeat for" in said


@pytest.mark.slow
def test_a_region_is_slow_while_the_coordinator_is_dead(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    """Three time-outs of lateness: nobody can say that the region is lost, and both end well."""
    two = Two(coordinator, tmp_path, 3 * TIMEOUT_S)
    coordinator.kill()
    for code, said in two.ends(0, 1):
        assert code == 0, said
    assert all((tmp_path / f"met-again-{region}").exists() for region in (0, 1))


@contextlib.contextmanager
def three(coordinator: CoordinatorProcess, folder: Path, pause_s: float = 0.05) -> Iterator[Three]:
    """Three regions of an elastic run that train."""
    found = Three(folder, "streaming", coordinator=coordinator, pause_s=pause_s)
    try:
        found.wait_for_step(1, 5)
        yield found
    finally:
        found.end()


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_an_elastic_run_trains_on_without_a_coordinator(
    how: str, coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    """To its end: nothing asks the coordinator for anything."""
    with three(coordinator, tmp_path) as regions:
        coordinator.freeze() if how == "frozen" else coordinator.kill()
        found = regions.found(0, 1, 2)
        assert len({str(each["digests"]) for each in found}) == 1
        assert len(found[0]["digests"]) == STEPS


def is_stuck(regions: Three) -> bool:
    """Whether the regions that are left make no step."""
    before = [regions.step(region) for region in (0, 2)]
    time.sleep(1.0)
    return [regions.step(region) for region in (0, 2)] == before and max(before) < STEPS


@pytest.mark.parametrize("how", ["frozen", "with its file"])
def test_a_loss_waits_for_the_coordinator(how: str, tmp_path: Path) -> None:
    """The others go on once it is back: it remembers who takes part."""
    with (
        CoordinatorProcess(tmp_path, keeps=True) as coordinator,
        three(coordinator, tmp_path) as regions,
    ):
        coordinator.freeze() if how == "frozen" else coordinator.kill()
        regions.hit(1, signal.SIGKILL)
        time.sleep(1.0)
        assert is_stuck(regions)
        coordinator.thaw() if how == "frozen" else coordinator.start()
        check_survivors(regions.found(0, 2))


@pytest.mark.slow
def test_regions_that_need_no_decision_train_on_beside_a_coordinator_without_its_file(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator, three(coordinator, tmp_path) as regions:
        coordinator.kill()
        coordinator.start()
        found = regions.found(0, 1, 2)
        assert len({str(each["digests"]) for each in found}) == 1 and len(found[0]["digests"]) == STEPS
        said = coordinator.log.read_text()
        assert "it waits for that, then ends (with regions.min after regions.wait_s" in said
