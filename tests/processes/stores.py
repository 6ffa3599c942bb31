"""A store in a process of its own: tests freeze it, kill it, and start it again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_cocodc.meeting.store import serve_store
from tests.processes.forks import fork, wait_until


def serve(host: str, port: int, said: str) -> None:
    """Serve a store for ever; its port is written to the file `said`."""
    store = serve_store(host, port)
    Path(said + ".new").write_text(str(store.port))
    os.replace(said + ".new", said)
    time.sleep(1e6)


class StoreProcess:
    """A store, always on the same port. At the end of the block it is killed.

    Args:
        folder: for what it says.
        host: where it listens.
        begin: starts its process, as `fork` does.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1", begin: Callable[..., Any] = fork) -> None:
        self._said, self._log, self._begin = folder / "store", folder / "log-store.txt", begin
        self._host, self.port = host, 0
        self.start()

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def start(self) -> None:
        """Start the store, empty."""
        self._said.unlink(missing_ok=True)
        self._process = self._begin(serve, self._host, self.port, str(self._said), log=self._log)
        wait_until(self._said.exists, self._process, self._log)
        self.port = int(self._said.read_text())

    def freeze(self) -> None:
        """Returns when all its threads stand still: until then it may answer."""
        os.kill(self._process.pid, signal.SIGSTOP)
        stats = list(Path(f"/proc/{self._process.pid}/task").glob("*/stat"))
        wait_until(lambda: all(") T " in path.read_text() for path in stats), self._process, self._log)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
