"""One end of a TCP connection that carries messages, one JSON object a line, and never waits."""

import json
import os
import socket
import time
import weakref
from typing import Any

MAX_LINE = 256 << 10
"""Bytes of the longest line. A longer one is skipped: what sent it is not one of ours, or has gone mad."""
_MOST_UNSENT = 16 << 20
"""Bytes that wait for the other end at most: then the connection ends."""
_CHUNK = 64 << 10


class Channel:
    """A connected socket (or one that is just connecting) with what it has still to send and what it has half received.

    Attributes:
        socket: does not block.
        ended: whether the other end has closed the connection, or it has failed.
        unsent_since: since when the other end has taken nothing of what it is sent; None if it has taken all.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        keep_from_forks(connection)
        self.ended = False
        self.unsent_since: float | None = None
        self._unsent = bytearray()
        self._received = bytearray()
        self._skips = False
        self._finishes = False

    def write(self, line: bytes) -> None:
        """Send a line, or as much of it as the other end takes now; `flush` sends the rest."""
        if self.unsent_since is None:
            self.unsent_since = time.monotonic()
        self._unsent += line
        self.flush()
        self.ended = self.ended or len(self._unsent) > _MOST_UNSENT

    def flush(self) -> None:
        """Send what the other end takes now."""
        try:
            while self._unsent and not self.ended:
                del self._unsent[: self.socket.send(self._unsent)]
                self.unsent_since = time.monotonic() if self._unsent else None
            if self._finishes and not self.ended:
                self.socket.shutdown(socket.SHUT_WR)
                self._finishes = False
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come. Lines that are no message are skipped."""
        try:
            chunk = self.socket.recv(_CHUNK)
            self.ended = self.ended or not chunk
        except BlockingIOError:
            return []
        except OSError:
            self.ended = True
            return []
        *lines, rest = (self._received + chunk).split(b"\n")
        if lines and self._skips:
            self._skips = False
            del lines[0]
        self._skips = self._skips or len(rest) > MAX_LINE
        self._received = bytearray() if self._skips else rest
        return [message for line in lines if (message := _message(line)) is not None]

    def finish(self) -> None:
        """Send nothing more than what was written. The other end has taken it all once it closes the connection too."""
        self._finishes = True
        self.flush()

    def close(self) -> None:
        self.ended = True
        self.socket.close()


def keep_from_forks(open_socket: socket.socket) -> None:
    """Let a forked process, such as a DataLoader's worker, close its copy: else the connection would outlive ours."""
    _ours.add(open_socket)


def line_of(message: dict[str, Any]) -> bytes:
    """A message as a line.

    Raises:
        ValueError: it is too long.
    """
    line = json.dumps(message).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"a message of {len(line)} bytes is longer than a line of {MAX_LINE} bytes")
    return line


def _message(line: bytes | bytearray) -> dict[str, Any] | None:
    if len(line) > MAX_LINE:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _close_copies() -> None:
    for copy in list(_ours):
        copy.close()


_ours: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_copies)
