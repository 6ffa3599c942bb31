"""A coordinator in a process of its own: tests freeze it, kill it, and start it again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hf_cocodc.coordinator import server
from hf_cocodc.net.keys import Keys
from tests.processes.forks import fork, wait_until


def serve(host: str, port: int, state: str, secret: str | None, said: str) -> None:
    """Serve until this process ends. The port is written to the file `said`, and the log to the output."""
    secrets = [] if secret is None else [Keys.from_secret(secret)]
    server.serve(host, port, secrets, Path(state), partial(_say, said))


def _say(said: str, line: str) -> None:
    os.write(1, f"{line}\n".encode())
    if "listening on" in line:
        Path(said + ".new").write_text(line.partition(";")[0].rpartition(":")[2])
        os.replace(said + ".new", said)


class CoordinatorProcess:
    """A coordinator, always on the same port. At the end of the block it is killed.

    Args:
        folder: for what it says.
        host: where it listens.
        begin: starts its process, as `fork` does.
        keeps: whether it still has its file when it is started again.
        secret: of its runs.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        begin: Callable[..., Any] = fork,
        keeps: bool = False,
        secret: str | None = None,
    ) -> None:
        self._said, self._begin = folder / "coordinator", begin
        self.log = folder / "log-coordinator.txt"
        self._state, self._keeps = folder / "state", keeps
        self._host, self.port, self._secret = host, 0, secret
        self.start()

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def start(self) -> None:
        """Start the coordinator."""
        if not self._keeps:
            self._state.unlink(missing_ok=True)
        self._said.unlink(missing_ok=True)
        asked = self._host, self.port, str(self._state), self._secret, str(self._said)
        self._process = self._begin(serve, *asked, log=self.log)
        wait_until(self._said.exists, self._process, self.log)
        self.port = int(self._said.read_text())

    def freeze(self) -> None:
        """Returns when all its threads stand still: until then it may answer."""
        os.kill(self._process.pid, signal.SIGSTOP)
        stats = list(Path(f"/proc/{self._process.pid}/task").glob("*/stat"))
        wait_until(lambda: all(") T " in path.read_text() for path in stats), self._process, self.log)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
