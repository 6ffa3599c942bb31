"""Regions of an elastic run as real processes: one dies or freezes, and the others train on."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.coordinator.server import Served, serve_in_thread
from tests.processes.coordinators import CoordinatorProcess
from tests.processes.elastic_worker import train
from tests.processes.forks import TIMEOUT_S, fork, wait_until

STEPS = 24


@dataclass
class Three:
    """Three regions that train, each a process."""

    folder: Path
    name: str
    terms: dict[str, Any] = field(default_factory=dict)
    coordinator: Served | CoordinatorProcess = field(default_factory=serve_in_thread)
    pause_s: float = 0.05

    def __post_init__(self) -> None:
        self.log = self.folder / "log.txt"
        rest = self.coordinator.address, self.folder, self.name, STEPS, self.pause_s, self.terms
        self.processes = [fork(train, region, 3, *rest, log=self.log) for region in range(3)]

    def hit(self, region: int, number: int) -> None:
        """Send a signal to a region."""
        pid = self.processes[region].pid
        assert pid is not None
        os.kill(pid, number)

    def step(self, region: int) -> int:
        made = self.folder / f"steps-{region}.txt"
        return len(made.read_text().split()) if made.exists() else 0

    def wait_for_step(self, region: int, step: int) -> None:
        wait_until(lambda: self.step(region) >= step, self.processes[region], self.log)

    def found(self, *regions: int) -> list[dict[str, Any]]:
        """What these regions saw, once they have ended well."""
        for region in regions:
            self.processes[region].join(TIMEOUT_S)
            assert self.processes[region].exitcode == 0, self.log.read_text()[-4000:]
        return [json.loads((self.folder / f"region-{region}.json").read_text()) for region in regions]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def check_survivors(found: list[dict[str, Any]]) -> None:
    """Regions 0 and 2 agree on every bit of the global params, at every step to the end, and on who took part."""
    one, two = found
    assert one["digests"] == two["digests"] and len(one["digests"]) == STEPS
    assert one["end"] == two["end"] and one["end"] is not None
    assert one["members"] == two["members"]
    assert one["members"][0] == [0, 1, 2] and one["members"][-1] == [0, 2]
    for each in found:
        assert [facts["members"] for kind, facts in each["events"] if kind == "epoch"] == [[0, 2]]


@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_the_others_train_on_when_a_region_is_killed(name: str, tmp_path: Path) -> None:
    three = Three(tmp_path, name)
    try:
        three.wait_for_step(1, 7)
        three.hit(1, signal.SIGKILL)
        check_survivors(three.found(0, 2))
    finally:
        three.end()


@pytest.mark.slow
def test_the_others_do_not_wait_longer_than_the_grace_for_a_frozen_region(tmp_path: Path) -> None:
    """When it wakes up, it hears that they have gone on."""
    three = Three(tmp_path, "streaming", {"grace_s": 1.0})
    try:
        three.wait_for_step(1, 7)
        three.hit(1, signal.SIGSTOP)
        check_survivors(three.found(0, 2))
        three.hit(1, signal.SIGCONT)
        three.found(1)
        assert "without region 1" in (tmp_path / "left-behind-1.txt").read_text()
    finally:
        three.end()
