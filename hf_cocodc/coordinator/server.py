"""The coordinator: one asyncio loop and one port for any number of runs. What it decides is in `rules.py`."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import InputError
from ..net.addresses import listen_at, named
from ..net.channel import keep_from_forks
from ..net.keys import Keys
from .service import ALIVE_S, Coordinator
from .state import State, StateFile, default_path

logger = logging.getLogger(__name__)

_BACKLOG = 1024


class Served:
    """A coordinator in a thread of this process. This machine reaches it at `address` (HOST:PORT).

    `news`: what there is to say about its state, in words. `say` takes the lines of its log; `fail` is called if it ends because
    its state file cannot be written; `alive_s`: see `ALIVE_S`.
    """

    def __init__(
        self,
        listener: socket.socket,
        secrets: Sequence[Keys],
        state: State | None,
        say: Callable[[str], None],
        fail: Callable[[InputError], None],
        alive_s: float = ALIVE_S,
    ) -> None:
        self.address, self.port = address_of(listener)
        self._listener, self._state, self._fail = listener, state, fail
        self.news = [] if state is None else state.news
        self._loop = asyncio.new_event_loop()
        self._coordinator = Coordinator(self._loop, listener, secrets, state, say, self._not_written, alive_s)
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-coordinating", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._coordinator.close())
        self._listener.close()
        if self._state is not None:
            self._state.close()
        self._loop.close()

    def _not_written(self, error: OSError) -> None:
        self._loop.stop()
        self._fail(
            InputError(
                f"the file of --state cannot be written: {error.strerror or error}. Make room, and start the coordinator again: "
                "the regions train on, and wait for it with every change."
            )
        )

    @property
    def num_callers(self) -> int:
        """Connections that are open."""
        return self._coordinator.num_callers

    def stop(self) -> None:
        """Let it end soon."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)

    def wait(self) -> None:
        """Wait until it has ended."""
        # a signal may interrupt another thread: this one handles it between two waits
        while self._thread.is_alive():
            self._thread.join(0.1)

    def close(self) -> None:
        """End the coordinator. Its regions train on, as far as they can without one."""
        self.stop()
        self.wait()


def serve_in_thread(
    host: str = "127.0.0.1",
    port: int = 0,
    secrets: Sequence[Keys] = (),
    state: Path | None = None,
    say: Callable[[str], None] = lambda line: logger.info("%s", line),
    fail: Callable[[InputError], None] = lambda error: logger.error("the coordinator ends: %s", error),
) -> Served:
    """Start a coordinator in a thread, until its `close` or the end of this process. Port 0 takes a free port.

    Raises:
        InputError: this machine cannot listen on the address, or the state file cannot be used.
    """
    listener = listen(host, port)
    try:
        return Served(listener, secrets, None if state is None else StateFile(state), say, fail)
    except BaseException:
        listener.close()
        raise


def serve(
    host: str,
    port: int,
    secrets: Sequence[Keys],
    state: Path | None,
    say: Callable[[str], None],
) -> None:
    """Run a coordinator until SIGINT or SIGTERM; for the main thread. Raises like `serve_in_thread`.

    `say` takes the lines of its log. `state`: its file, by default that of the port; none at port 0.
    """
    failures: list[InputError] = []
    if state is None and port:  # nobody would find the next coordinator at another port
        state = default_path(port)
    served = serve_in_thread(host, port, secrets, state, say, failures.append)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: served.stop())
    say(f"coordinator listening on {named(host, served.port)}; press Ctrl-C to end it")
    for line in served.news:
        say(line)
    served.wait()
    if failures:
        raise failures[0]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, and does not block. Raises InputError if this machine cannot listen on the address."""
    try:
        listener = listen_at(host, port, _BACKLOG)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --host or --port."
        ) from error
    listener.setblocking(False)
    keep_from_forks(listener)
    return listener


def address_of(listener: socket.socket) -> tuple[str, int]:
    """HOST:PORT at which this machine reaches a socket that listens, and the port."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
    return named(host, port), port
