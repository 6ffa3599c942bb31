"""One end of a TCP connection that carries messages, one JSON object a line, and never waits."""

import logging
import os
import socket
import ssl
import time
import weakref
from collections import deque
from typing import Any

import msgspec

from ..errors import shown
from .keys import Identity

logger = logging.getLogger(__name__)

MAX_LINE = 256 << 10
"""Bytes of the longest line that is written. Whatever sends a longer one is not one of ours, or has gone mad."""
_MOST_UNSENT = 16 << 20
"""Bytes that wait for the other end at most: then the connection ends."""
_CHUNK = 64 << 10
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Routers forget silent connections, some after 30 s. A connection on which nothing answers for as long has ended."""


class Channel:
    """A connected or just connecting socket, which never blocks, with what is still to be sent and what is half received.

    Attributes:
        longest: bytes of the longest line that is read. A longer one is skipped, and sets `has_skipped`.
        ended: whether the other end has closed the connection, or it has failed.
        is_closed: whether the other end has closed it, as the end of its process does.
        is_protected: whether the other end has proven itself (see `protect`).
        is_denied: whether it has not: it has another identity, or does not speak TLS.
        unsent_since: since when the other end has taken nothing of what it is sent; None if it has taken all.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        keep_from_forks(connection)
        self.ended = self.is_closed = self.is_protected = self.is_denied = False
        self.unsent_since: float | None = None
        self._unsent = bytearray()
        self._received = bytearray()
        self._lines: deque[bytes] = deque()
        self._tls: ssl.SSLObject | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._certificate = b""
        self.longest = MAX_LINE
        self.has_skipped = self._skips = False
        self._finishes = False

    def protect(self, identity: Identity, is_server: bool) -> None:
        """From now on, speak TLS: whoever has the same identity is at the other end, or nobody. What follows is for one thread.

        Nothing can be written before `is_protected`. `receive` goes on with the handshake.
        """
        self._certificate = identity.certificate
        self._tls = identity.wrap(self._incoming, self._outgoing, is_server)
        self._incoming.write(self._received)
        self._received = bytearray()
        self._decrypt()

    def write(self, line: bytes) -> None:
        """Send a line, or as much of it as the other end takes now; `flush` sends the rest."""
        if self._tls is not None:
            try:
                self._tls.write(line)
            except ssl.SSLError:
                self.ended = True
            line = self._outgoing.read()
        self._send(line)

    def _send(self, data: bytes) -> None:
        if self.unsent_since is None:
            self.unsent_since = time.monotonic()
        # a single line may be longer than what may wait before it
        self.ended = self.ended or len(self._unsent) > _MOST_UNSENT
        self._unsent += data
        self.flush()

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
        except OSError as error:
            self.is_closed = self.is_closed or isinstance(error, BrokenPipeError)
            self.ended = True

    @property
    def num_lines(self) -> int:
        """Lines that have come and were not taken."""
        return len(self._lines)

    @property
    def next_bytes(self) -> int:
        """Bytes of the first of them."""
        return len(self._lines[0])

    def receive(self, most: int = _CHUNK) -> None:
        """Keep what has come, to be taken; `most` bytes of it."""
        try:
            chunk = self.socket.recv(most)
            self.is_closed = self.is_closed or not chunk
            self.ended = self.ended or not chunk
        except BlockingIOError:
            return
        except OSError:
            self.ended = True
            return
        if self._tls is None:
            self._take_in(chunk)
        else:
            self._incoming.write(chunk)
            self._decrypt()

    def _decrypt(self) -> None:
        """Go on with the handshake, and take in what has come."""
        assert self._tls is not None
        is_over = False
        try:
            if not self.is_protected:
                self._tls.do_handshake()
                if self._tls.getpeercert(True) != self._certificate:
                    raise ssl.SSLError("another certificate")
                self.is_protected = True
            while chunk := self._tls.read(_CHUNK):
                self._take_in(chunk)
            is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            is_over, self.is_denied = True, not self.is_protected
            logger.debug("TLS: %s", error)
        answer = self._outgoing.read()
        if answer:  # also why this end refuses the other one
            self._send(answer)
        self.ended = self.ended or is_over

    def _take_in(self, chunk: bytes) -> None:
        end = chunk.rfind(b"\n") + 1
        if end:  # what is half received is copied once, however long its line is
            lines = bytes(self._received + chunk[: end - 1]).split(b"\n")
            if self._skips:
                self._skips = False
                del lines[0]
            short = [line for line in lines if len(line) <= self.longest]
            self.has_skipped = self.has_skipped or len(short) < len(lines)
            self._lines.extend(short)
            self._received = bytearray()
        if not self._skips:
            self._received += chunk[end:]
        if len(self._received) > self.longest:
            self._received, self._skips = bytearray(), True
        self.has_skipped = self.has_skipped or self._skips

    def take_line(self) -> bytes:
        """The first line that has come."""
        return self._lines.popleft()

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


def keep_alive(connection: socket.socket, is_read: bool = True) -> None:
    """Let a connection end if its other end, or the way there, has gone without a word.

    `is_read`: whether the other end takes what comes at once. The kernel would end a connection to one that takes nothing, too.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name) and (is_read or name != "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def line_of(message: Any, longest: int = MAX_LINE) -> bytes:
    """A message, or another value that JSON can express, as a line. Raises ValueError if it is too long."""
    line = _encoder.encode(message) + b"\n"
    if len(line) > longest:
        raise ValueError(f"a message of {len(line)} bytes is longer than a line of {longest} bytes")
    return line


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is none."""
    try:
        return _objects.decode(line)
    except (ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    """What libraries derive from a string or a number, such as torch its version."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{shown(value)} cannot be sent")


def _close_copies() -> None:
    for copy in list(_ours):
        copy.close()


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_objects = msgspec.json.Decoder(dict[str, Any])
_ours: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_copies)
