"""The processes of a run of `churn`: regions, and the coordinator, which is one of them where they meet in a storage."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from hf_cocodc.coordinator.in_storage import serving_in
from hf_cocodc.net.storage import Storage
from tests.processes.forks import Process
from tests.processes.launching import environment

START_S = 5.0
"""Seconds in which a coordinator has begun."""


@dataclass(eq=False)
class Life:
    """The processes of a region, from one start to their end.

    Attributes:
        done: what was done to it: "kill", "kill one rank", "freeze", "term", "leave".
        is_first: whether it has met the others at the start of the run.
    """

    region: int
    name: str
    processes: list[Process]
    master: object
    is_first: bool
    done: set[str] = field(default_factory=set)

    @property
    def codes(self) -> list[int | None]:
        """Exit codes of its ranks; None where one lives."""
        return [process.exitcode for process in self.processes]

    @property
    def lives(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def send(self, number: int, ranks: int | None = None) -> None:
        for process in self.processes[:ranks]:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, number)


class Coordinator:
    """`hf-cocodc coordinator`, always on the same port and with the same file."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = "127.0.0.1:{1}".format(*free.getsockname())
        self._folder, self.state = folder, folder / "state"
        self.begin()

    def begin(self) -> None:
        port = self.address.rpartition(":")[2]
        command = [sys.executable, "-m", "hf_cocodc", "coordinator", "--port", port, "--state", self.state]
        self._began = time.monotonic()
        with (self._folder / "log-coordinator.txt").open("ab") as log:
            self._process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env=environment()
            )

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """End it as a service manager does; returns its exit code."""
        self.send(signal.SIGCONT)
        time.sleep(max(self._began + START_S - time.monotonic(), 0.0))  # its handler is there by then
        self.send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(15.0)
        self.kill()
        return -9


class InStorage:
    """The coordinator of regions that meet in a storage: one of them."""

    def __init__(self, url: str) -> None:
        self.address = url
        self._storage = Storage(url)

    @property
    def serves(self) -> int | None:
        """The process that serves, or has served last."""
        process = serving_in(self._storage)
        return int(process.partition("-")[0]) if process else None

    def end(self) -> int:
        return 0
