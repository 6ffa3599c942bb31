"""Messages on asyncio transports, one JSON object a line, and what every connection needs of its socket."""

import asyncio
import os
import socket
import weakref
from typing import Any

import msgspec

from ..errors import shown

MAX_LINE = 256 << 10
"""Bytes of the longest line that is written. Whatever sends a longer one is not one of ours, or has gone mad."""
_MOST_UNSENT = 16 << 20
"""Bytes that wait for the other end at most: then the connection ends."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Routers forget silent connections, some after 30 s. A connection on which nothing answers for as long has ended."""


def put(transport: asyncio.WriteTransport, line: bytes) -> bool:
    """Send a line soon; whether the other end takes what it is sent: else the connection is to be ended."""
    # a single line may be longer than what may wait before it
    if transport.get_write_buffer_size() > _MOST_UNSENT:
        return False
    if not transport.is_closing():
        transport.write(line)
    return True


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
