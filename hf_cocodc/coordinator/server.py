"""The coordinator: one asyncio loop and one port for any number of runs. What it decides is in `rules.py`."""

import asyncio
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
from .service import Coordinator
from .state import StateFile, default_path

logger = logging.getLogger(__name__)

_BACKLOG = 1024


class Served:
    """A coordinator in a thread of this process. This machine reaches it at `address` (HOST:PORT)."""

    def __init__(
        self,
        listener: socket.socket,
        secrets: Sequence[Keys],
        state: StateFile | None,
        relay: int | None = None,
    ) -> None:
        self._relay = relay
        self.address, self.port = address_of(listener)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._work, args=(listener, secrets, state), name="hf_cocodc-coordinating", daemon=True
        )
        self._thread.start()

    def _work(self, listener: socket.socket, secrets: Sequence[Keys], state: StateFile | None) -> None:
        def fail(error: OSError) -> None:
            logger.error("the coordinator ends: %s", _not_written(error))
            self._loop.stop()

        coordinator = Coordinator(
            self._loop,
            listener,
            secrets,
            state,
            lambda line: logger.info("%s", line),
            fail,
            relay=self._relay,
        )
        try:
            self._loop.run_forever()
        finally:
            _end(self._loop, coordinator, listener, state)

    def close(self) -> None:
        """End the coordinator. Its regions train on, as far as they can without one."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def serve_in_thread(
    host: str = "127.0.0.1",
    port: int = 0,
    secrets: Sequence[Keys] = (),
    state: Path | None = None,
    relay: int | None = None,
) -> Served:
    """Start a coordinator in a thread, until its `close` or the end of this process. Port 0 takes a free port.

    Raises:
        InputError: this machine cannot listen on the address, or the state file cannot be used.
    """
    listener = listen(host, port)
    try:
        return Served(listener, secrets, None if state is None else StateFile(state), relay)
    except BaseException:
        listener.close()
        raise


def serve(
    host: str,
    port: int,
    secrets: Sequence[Keys],
    state: Path | None,
    say: Callable[[str], None],
    relay: int | None = None,
) -> None:
    """Run a coordinator in the main thread until SIGINT or SIGTERM. Raises like `serve_in_thread`.

    `say` takes the lines of its log. `relay` is the port of a relay beside it. `state`: its file, by default that of the port;
    none at port 0.
    """
    listener = listen(host, port)
    file = coordinator = None
    loop = asyncio.new_event_loop()
    failures: list[OSError] = []

    def fail(error: OSError) -> None:
        failures.append(error)
        loop.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, loop.stop)
    try:
        if state is None and port:  # nobody would find the next coordinator at another port
            state = default_path(port)
        file = None if state is None else StateFile(state)
        beside = "" if relay is None else f", relay on port {relay}"
        say(
            f"coordinator listening on {named(host, listener.getsockname()[1])}{beside}; press Ctrl-C to end it"
        )
        for line in [] if file is None else file.news:
            say(line)
        coordinator = Coordinator(loop, listener, secrets, file, say, fail, relay=relay)
        loop.run_forever()
    finally:
        _end(loop, coordinator, listener, file)
    if failures:
        raise InputError(_not_written(failures[0])) from failures[0]


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


def _end(
    loop: asyncio.AbstractEventLoop,
    coordinator: Coordinator | None,
    listener: socket.socket,
    state: StateFile | None,
) -> None:
    if coordinator is not None:
        loop.run_until_complete(coordinator.close())
    listener.close()
    if state is not None:
        state.close()
    loop.close()


def _not_written(error: OSError) -> str:
    return (
        f"the file of --state cannot be written: {error.strerror or error}. Make room, and start the coordinator again: the "
        "regions train on, and wait for it with every change."
    )
