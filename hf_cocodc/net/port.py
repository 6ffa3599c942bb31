"""The one port on which a region listens. It hands each caller to whoever expects it; a stranger costs next to nothing.

A caller begins with a token, which this region has given it over the coordinator or over an existing connection, and with a
number, which says what for.
"""

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import InputError
from .addresses import listen_at, named
from .channel import keep_alive, keep_from_forks

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
_GREETING_BYTES = TOKEN_BYTES + 1
_GREET_S = 5.0
"""Seconds in which a caller has said its token."""
_MOST_CALLERS = 64
"""Callers that have not said theirs. For one more, the oldest is closed: an honest one says it with its first packet."""
_AT_ONCE = 32
"""Callers that are accepted before others have their turn."""
_BACKLOG = 1024
_PAUSE_S = 0.2


Take = Callable[[socket.socket, int], None]
"""Gets the connection of a caller, and its number."""


@dataclass(eq=False)
class _Stranger:
    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)


class Port:
    """Listens on `number`, in a thread of its own. Raises InputError if this machine cannot listen there.

    `host` is empty for all addresses of this machine, `port` 0 for any port that is free.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        try:
            self._listener = listen_at(host, port, _BACKLOG)
        except OSError as error:
            raise InputError(
                f"this region cannot listen on {named(host, port)}: {error.strerror}. Choose another regions.port, or another "
                "regions.interface."
            ) from error
        self._listener.setblocking(False)
        if hasattr(socket, "TCP_DEFER_ACCEPT"):  # who says nothing never gets here
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, round(_GREET_S))
        self.number: int = self._listener.getsockname()[1]
        self._expected: dict[bytes, Take] = {}
        self._lock = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        for each in (self._listener, self._woken, self._wake):
            keep_from_forks(each)
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-port", daemon=True)
        self._thread.start()

    def expect(self, token: bytes, take: Take) -> None:
        """From now on, give the callers that say this token to `take`, in the port's thread."""
        with self._lock:
            self._expected[token] = take

    def forget(self, token: bytes) -> None:
        with self._lock:
            self._expected.pop(token, None)

    def close(self) -> None:
        """Listen no more. Connections that were handed on stay."""
        self._wake.close()
        self._thread.join()

    def _work(self) -> None:
        callers: list[_Stranger] = []
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            for each in (self._listener, self._woken):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(1.0 if callers else None)}
                if self._woken in ready:
                    break
                if self._listener in ready:
                    callers += self._accept(selector)
                now = time.monotonic()
                over = [each for each in callers if each.connection in ready and self._has_heard(each)]
                rest = [each for each in callers if each not in over]
                late = [each for each in rest if now >= each.until] + rest[
                    : max(len(rest) - _MOST_CALLERS, 0)
                ]
                for caller in (*over, *late):
                    with contextlib.suppress(KeyError, ValueError):  # handed on, or closed
                        selector.unregister(caller.connection)
                for caller in late:
                    caller.connection.close()
                callers = [each for each in rest if each not in late]
        for caller in callers:
            caller.connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> list[_Stranger]:
        """Those who have come now."""
        came: list[_Stranger] = []
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError:  # too many files are open: the next look would find the same caller at once
                time.sleep(_PAUSE_S)
                break
            connection.setblocking(False)
            keep_from_forks(connection)
            caller = _Stranger(connection, time.monotonic() + _GREET_S)
            if not self._has_heard(caller):
                selector.register(connection, selectors.EVENT_READ)
                came.append(caller)
        return came

    def _has_heard(self, caller: _Stranger) -> bool:
        """Read a greeting, and no more. Returns whether the caller has said one, or gone: then it is handed on, or closed."""
        try:
            chunk = caller.connection.recv(_GREETING_BYTES - len(caller.said))
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        caller.said += chunk
        if chunk and len(caller.said) < _GREETING_BYTES:
            return False
        token, first_bytes = None, bytes(caller.said[:TOKEN_BYTES])
        with self._lock:
            for each in self._expected:  # all of them: how long it takes tells nobody anything
                token = each if secrets.compare_digest(each, first_bytes) else token
            take = None if token is None else self._expected[token]
        if take is None:
            caller.connection.close()
        else:
            try:
                take(tuned(caller.connection), caller.said[-1])
            except Exception:  # others still call
                logger.exception("a connection of another region is lost")
                caller.connection.close()
        return True


def dial(host: str, port: int, token: bytes, number: int, timeout_s: float, own: str = "") -> socket.socket:
    """A connection to another region's port, on which token and number were said. Raises OSError if nobody answers there.

    `own`: the address to call from; empty for any.
    """
    connection = socket.create_connection((host, port), timeout_s, (own, 0) if own else None)
    try:
        connection.sendall(token + bytes([number]))
        return tuned(connection)
    except OSError:
        connection.close()
        raise


def tuned(connection: socket.socket) -> socket.socket:
    """The connection, which blocks from now on, sends small messages at once, and says now and then that it is alive."""
    connection.settimeout(None)
    keep_from_forks(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection, is_read=False)  # of a late region; `Pipe.look` judges
    return connection
