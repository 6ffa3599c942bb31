"""One end of a TCP connection that carries messages, one JSON object a line, and never waits."""

import base64
import json
import math
import os
import socket
import time
import weakref
from collections import deque
from typing import Any

from .cipher import Altered, Cipher

MAX_LINE = 256 << 10
"""Bytes of the longest line that is written. What sends a longer one is not one of ours, or has gone mad."""
_MOST_UNSENT = 16 << 20
"""Bytes that wait for the other end at most: then the connection ends."""
_CHUNK = 64 << 10
LONGEST_SEALED = 2 * MAX_LINE


class Channel:
    """A connected socket (or one that is just connecting) with what it has still to send and what it has half received.

    Attributes:
        socket: does not block.
        longest: bytes of the longest line that is read. A longer one is skipped.
        has_skipped: whether there was one.
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
        self._lines: deque[bytes] = deque()
        self._ciphers: tuple[Cipher, Cipher] | None = None
        self.longest = MAX_LINE
        self.has_skipped = self._skips = False
        self._finishes = False

    def write(self, line: bytes) -> None:
        """Send a line, or as much of it as the other end takes now; `flush` sends the rest."""
        if self.unsent_since is None:
            self.unsent_since = time.monotonic()
        self._unsent += (
            line if self._ciphers is None else base64.b64encode(self._ciphers[0].seal(line)) + b"\n"
        )
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

    def seal(self, ciphers: tuple[Cipher, Cipher] | None) -> None:
        """From now on, seal what is written and open what was not taken yet, with these ciphers for the one and the other."""
        if ciphers is not None:
            self._ciphers, self.longest = ciphers, LONGEST_SEALED

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come. Lines that are no message are skipped; one that nobody sealed ends the connection."""
        self.receive()
        return self.take()

    def receive(self) -> None:
        """Keep what has come, to be taken."""
        try:
            chunk = self.socket.recv(_CHUNK)
            self.ended = self.ended or not chunk
        except BlockingIOError:
            return
        except OSError:
            self.ended = True
            return
        *lines, rest = (self._received + chunk).split(b"\n")
        if lines and self._skips:
            self._skips = False
            del lines[0]
        self._skips = self._skips or len(rest) > self.longest
        self._received = bytearray() if self._skips else rest
        short = [bytes(line) for line in lines if len(line) <= self.longest]
        self.has_skipped = self.has_skipped or self._skips or len(short) < len(lines)
        self._lines.extend(short)

    def take(self, most: float = math.inf) -> list[dict[str, Any]]:
        """The messages that were received, or the first of them."""
        found: list[dict[str, Any]] = []
        while self._lines and len(found) < most:
            line = self._lines.popleft()
            try:
                message = _message(
                    line if self._ciphers is None else self._ciphers[1].open(base64.b64decode(line))
                )
            except (Altered, ValueError):
                self.ended = True
                break
            if message is not None:
                found.append(message)
        return found

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
    try:
        found = json.loads(line)
        if b"\\ud" in line.lower():
            json.dumps(found, ensure_ascii=False).encode()  # half of a character could not be shown
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _close_copies() -> None:
    for copy in list(_ours):
        copy.close()


_ours: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_copies)
