"""The rate limit, kept by the kernel: it spreads what a connection sends evenly over time (Linux, SO_MAX_PACING_RATE).

What a region sends in one go fills the buffer before a slow link. Packets are dropped there, and a connection that loses them is
slow for seconds.
"""

import contextlib
import ctypes
import functools
import logging
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_SO_MAX_PACING_RATE = 47
_MOST = (1 << 32) - 2
"""The largest rate that every kernel takes; one more means none."""
_OPEN_FILES = Path("/proc/self/fd")
NOT_KEPT = (
    "this machine's kernel does not keep a rate limit (SO_MAX_PACING_RATE): this package does, with one piece after the "
    "other, and a lossy link is used less well"
)
logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


class Share(NamedTuple):
    """What the connections to one other region may send.

    Attributes:
        own: the address at which gloo listens here, as the system's calls name it (sockaddr).
        other: where it does at the other end.
        rate: bytes per second of each connection.
    """

    own: bytes
    other: bytes
    rate: float


def can_pace() -> bool:
    """Whether this machine's kernel keeps a limit."""
    with socket.socket() as probe:
        return _OPEN_FILES.is_dir() and _limit(probe.fileno(), _MOST)


@functools.cache
def say_who_keeps_the_limit(region: int) -> None:
    """Say once that it is not the kernel."""
    logger.warning("region %d: %s (regions.rate_limit).", region, NOT_KEPT)


def pace(shares: Sequence[Share]) -> int:
    """Limit all connections that were made between the addresses of the shares; returns how many have their limit.

    A connection that came from elsewhere has a port of its own, so that regions behind one address cannot be told apart: the
    largest share of those counts.
    """
    given = [Share(_place(each.own), _place(each.other), each.rate) for each in shares]
    paced = 0
    for number in _sockets():
        with contextlib.suppress(OSError):  # closed meanwhile
            copy = os.dup(number)  # the number may soon be another file's
            try:
                rate = _rate_of(copy, given)
                paced += rate is not None and _limit(copy, rate)
            finally:
                os.close(copy)
    return paced


def _rate_of(number: int, shares: Sequence[Share]) -> float | None:
    """The limit of a socket; None of one that is not gloo's."""
    peer = _named(_libc.getpeername, number)
    if peer is None:  # it listens
        return None
    fitting = [each for each in shares if each.other == peer]
    if not fitting:
        own = _named(_libc.getsockname, number)
        accepted = [each for each in shares if each.own == own]
        fitting = [each for each in accepted if _host(each.other) == _host(peer)] or accepted
    return max((each.rate for each in fitting), default=None)


def _limit(number: int, rate: float) -> bool:
    """Whether the kernel has taken the limit."""
    wanted, found = ctypes.c_uint(max(min(int(rate), _MOST), 1)), ctypes.c_uint()
    option = socket.SOL_SOCKET, _SO_MAX_PACING_RATE
    size = ctypes.c_uint(ctypes.sizeof(found))
    if _libc.setsockopt(number, *option, ctypes.byref(wanted), size):
        return False
    return not _libc.getsockopt(number, *option, ctypes.byref(found), ctypes.byref(size)) and (
        found.value == wanted.value
    )


def _sockets() -> Iterator[int]:
    for path in _OPEN_FILES.iterdir() if _OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode):
                yield int(path.name)


def _named(ask: Callable[..., int], number: int) -> bytes | None:
    """What the system names one end of a socket. A `socket.socket` of it could change it: it sets the default time-out."""
    answer = ctypes.create_string_buffer(128)
    size = ctypes.c_uint(len(answer))
    return _place(answer.raw) if ask(number, answer, ctypes.byref(size)) == 0 else None


def _place(address: bytes) -> bytes:
    """Family, port and IP address of a sockaddr, without what differs between two names of one place."""
    family = int.from_bytes(address[:2], sys.byteorder)
    return address[:8] if family == socket.AF_INET else address[:4] + address[8:24]


def _host(place: bytes) -> bytes:
    return place[:2] + place[4:]
