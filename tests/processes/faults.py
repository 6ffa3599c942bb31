"""Regions in processes of their own, which are killed, frozen and started again; and so is the coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from hf_cocodc.run.journal import read
from tests.benchmarks.emulation.wan import Wan
from tests.processes import faults_worker
from tests.processes.coming_worker import HURRY
from tests.processes.coordinators import CoordinatorProcess
from tests.processes.faults_worker import Task
from tests.processes.forks import fork
from tests.processes.launching import environment

START_S, END_S = 120.0, 240.0
"""How long a test waits for what must happen soon, and for the end of a run."""


class Elsewhere:
    """A process of a machine of its own, with the interface of one of `multiprocessing`."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.pid, self.kill = process.pid, process.kill
        self._process = process

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        self._process.wait(timeout)


class Regions:
    """The regions of a run. At the end of the block all their processes, and the coordinator's, are killed.

    Args:
        count: regions with which the run begins.
        task: what they do.
        wan: with one more place than there may be regions, if they and the coordinator are machines of their own.
    """

    def __init__(self, count: int, task: Task, wan: Wan | None = None) -> None:
        self.count, self.task, self._wan = count, task, wan
        self.folder = Path(task.folder)
        self.processes: dict[int, Any] = {}
        self._every: list[Any] = []
        self._diaries: dict[int, str] = {}

    def __enter__(self) -> Regions:
        if self._wan is None:
            self.coordinator = CoordinatorProcess(self.folder)
        else:
            host = self._wan.address(self._wan.regions - 1)
            self.coordinator = CoordinatorProcess(self.folder, host, self._elsewhere)
        return self

    def _elsewhere(self, body: Callable[..., None], *arguments: Any, log: Path) -> Elsewhere:
        """`fork` in the last machine of the `wan`."""
        assert self._wan is not None
        code = f"from {body.__module__} import {body.__name__}; {body.__name__}{arguments!r}"
        command = [sys.executable, "-c", code]
        with log.open("ab") as out:
            return Elsewhere(
                self._wan.popen(self._wan.regions - 1, command, environment(), stdout=out, stderr=out)
            )

    def __exit__(self, *error: object) -> None:
        for process in self._every:
            process.kill()
            process.join()
        self.coordinator.kill()

    def start(self, regions: Iterable[int] | None = None, fault: str = "", join: bool = False) -> None:
        """Start these regions, or all; each with the command of its first start."""
        for region in range(self.count) if regions is None else regions:
            env = {
                "HF_COCODC_REGION": str(region),
                "HF_COCODC_REGIONS": str(self.count),
                "HF_COCODC_COORDINATOR": self.coordinator.address,
                "HF_COCODC_RUN": "faults",
            }
            env |= {"FAULT": fault} if fault else {}
            env |= {"HF_COCODC_JOIN": "1"} if join else {}
            self._diaries[region] = f"diary-{region}.{len(self._every)}.jsonl"
            env["DIARY"] = self._diaries[region]
            log = self.folder / f"log-{region}.txt"
            if self._wan is None:
                self.processes[region] = fork(faults_worker.main, self.task.line(), log=log, **env)
            else:
                command = [sys.executable, faults_worker.__file__, self.task.line()]
                with log.open("ab") as out:
                    process = self._wan.popen(region, command, environment(**env), stdout=out, stderr=out)
                self.processes[region] = Elsewhere(process)
            self._every.append(self.processes[region])

    def kill(self, region: int) -> None:
        self.processes[region].kill()
        self.processes[region].join()

    def freeze(self, region: int) -> None:
        os.kill(self.processes[region].pid, signal.SIGSTOP)

    def thaw(self, region: int) -> None:
        os.kill(self.processes[region].pid, signal.SIGCONT)

    def cut_off(self, region: int, others: Iterable[int], cut: bool = True) -> None:
        """Lose what `region` sends to `others` (of a `wan`), or carry it again."""
        assert self._wan is not None
        for other in others:
            what = ["replace" if cut else "del", f"{self._wan.address(other)}/32", "dev", "lo"]
            assert self._wan.popen(region, ["ip", "route", *what]).wait() == 0

    def diary(self, region: int) -> list[dict[str, Any]]:
        """What the present process of a region has written."""
        return lines(self.folder / self._diaries[region])

    def step(self, region: int) -> int:
        """The inner step that the present process of a region has reached."""
        return max((line["step"] for line in self.diary(region) if "step" in line), default=0)

    def journal(self, region: int) -> list[dict[str, Any]]:
        path = self.folder / f"journal-{region}.jsonl"
        return read(path) if path.is_file() else []

    def members(self, region: int) -> list[int]:
        """The members by a region's journal."""
        found = [event["members"] for event in self.journal(region) if event["kind"] == "epoch"]
        return found[-1] if found else []

    def until(
        self,
        holds: Callable[[], Any],
        what: str,
        within_s: float = START_S,
        needed: Collection[int] | None = None,
    ) -> None:
        """Wait for something that must happen; a region that has ended with an error ends the wait, if it is `needed`."""
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {within_s:g} s\n{self.words()}")
            for region, process in self.processes.items():
                has_failed = process.exitcode not in (None, 0, -signal.SIGKILL)
                if has_failed and (needed is None or region in needed):
                    raise AssertionError(f"{what}: region {region} has ended\n{self.words()}")
            time.sleep(0.02)

    def until_step(self, step: int, regions: Iterable[int] | None = None) -> None:
        for region in self.processes if regions is None else regions:
            self.until(lambda region=region: self.step(region) >= step, f"region {region} at step {step}")

    def until_members(self, members: Collection[int], regions: Iterable[int]) -> None:
        for region in regions:
            self.until(
                lambda region=region: self.members(region) == sorted(members),
                f"region {region} with members {sorted(members)}",
            )

    def end(self, regions: Collection[int], within_s: float = END_S) -> dict[int, dict[str, Any]]:
        """Wait until these regions, which hurry from now on, have finished; the last line of each diary. All must hold the
        same params. Another region that was still on its way into the run ends with an error by then."""
        (self.folder / HURRY).touch()
        found = {}
        for region in regions:
            self.until(
                lambda region=region: self.processes[region].exitcode is not None,
                "the end",
                within_s,
                regions,
            )
            assert self.processes[region].exitcode == 0, self.words()
            found[region] = self.diary(region)[-1]
            assert found[region]["end"] == self.task.steps, self.words()
        assert len({last["digest"] for last in found.values()}) == 1, self.words()
        return found

    def check(self) -> None:
        """Check what must hold in any run: landings are equal in all regions, epochs rise, members agree."""
        told: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        epochs: dict[tuple[int, int], tuple[int, ...]] = {}
        for region in range(self.count):
            last = (-1, -1)
            for event in self.journal(region):
                if event["kind"] == "land":
                    key = (event["fragment"], event["sent_at"])
                    told.setdefault(key, {})[region] = tuple(event["members"])
                if event["kind"] == "epoch":
                    assert (event["epoch"], event["step"]) >= last, self.words()
                    last = (event["epoch"], event["step"])
                    key, members = (event["epoch"], event["losses"]), tuple(event["members"])
                    assert epochs.setdefault(key, members) == members, self.words()
        for key, members in told.items():
            assert len(set(members.values())) == 1, (key, members)
        digests: dict[int, set[int]] = {}
        for path in self.folder.glob("diary-*.jsonl"):
            for line in lines(path):
                if "digest" in line and "step" in line:
                    digests.setdefault(line["step"], set()).add(line["digest"])
        assert told
        assert digests
        assert not {step: found for step, found in digests.items() if len(found) > 1}, self.words()

    def words(self) -> str:
        """What the regions have said, for the message of a test that fails."""
        said = []
        for region, process in self.processes.items():
            log = (self.folder / f"log-{region}.txt").read_text(errors="replace")
            state = f"exit code {process.exitcode}, step {self.step(region)}"
            said.append(f"--- region {region} ({state})\n{log[-2500:]}")
        return "\n".join(said)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a diary."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
