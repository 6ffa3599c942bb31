"""One socket of a connection: what it sends and receives is sealed, if the run has a secret, and the kernel counts its bytes."""

import errno
import operator
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from .keys import Ciphers

CLOSED = "the other end has closed the connection"
SIZES = (4 << 10, 64 << 10)
"""Bytes of the messages that prove, each way, that large packets pass where small ones do. A router or a tunnel may swallow them
without a word: connections come about there, and small messages pass.
"""
SWALLOWED = (
    "small packets pass, and large ones vanish on the way without a word: something between the two carries smaller packets than "
    "their interfaces send (MTU)"
)
MEND = "ip link set INTERFACE mtu 1400    # at both ends; or sysctl -w net.ipv4.tcp_mtu_probing=1"
_NONCE_BYTES = 32
_PROBE_S = 20.0
"""A probe that has not come after so many seconds, while small packets do, does not come."""
_RECORD = 256 << 10
"""What is sealed at once: so much memory a line takes, whatever is sent."""
_MORE = getattr(socket, "MSG_MORE", 0)
_JOINED = 64 << 10
"""A message of at most so many bytes leaves together with its header."""
_STATE = struct.Struct("=2x2B4x48xI40xI16x2Q12xI4xI")


class _Counts(NamedTuple):
    """Of Linux's `tcp_info`; its times are in ms and us."""

    retransmits: int
    probes: int
    last_ack_recv: int
    total_retrans: int
    bytes_acked: int
    bytes_received: int
    min_rtt: int
    data_segs_out: int


class Seen(NamedTuple):
    """What the kernel has counted of a socket; all 0 where it does not say.

    Attributes:
        acked: bytes that the other end's machine has taken.
        received: bytes that have come.
        packets: that were sent, those that were sent again among them.
        resent: packets that were sent again.
    """

    acked: int = 0
    received: int = 0
    packets: int = 0
    resent: int = 0

    @property
    def moved(self) -> int:
        """Bytes that have come or gone."""
        return self.acked + self.received

    def plus(self, other: "Seen") -> "Seen":
        return Seen(*map(operator.add, self, other))


_NO_RTT = (1 << 32) - 1
_GONE_MS = 30_000
_UNANSWERED = 2
_CLOSE_WAIT = 8


class Swallowed(OSError):
    """Small packets pass, and large ones do not."""

    def __init__(self) -> None:
        super().__init__(SWALLOWED)


class Closed(ConnectionResetError):
    """The other end has closed the socket in good order, as far as the kernel says so: it was not reset, also not since."""

    def __init__(self) -> None:
        super().__init__(errno.ECONNRESET, CLOSED)


CiphersFor = Callable[[bytes, bytes], Ciphers]
"""From the nonces of this end and of the other one: the ciphers of a socket, which no other socket has."""


class Pipe:
    """A connected socket, which blocks. Both ends `open` it before anything else is sent."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._ciphers: Ciphers | None = None
        self._sealed = memoryview(b"")

    def open(self, timeout_s: float, ciphers_for: CiphersFor | None, probes: bool = True) -> None:
        """Make the ciphers; with `probes`, prove them, and see that large packets pass. Raises OSError: Swallowed if only small
        ones do.
        """
        self.socket.settimeout(timeout_s)
        nonce, theirs = secrets.token_bytes(_NONCE_BYTES), bytearray(_NONCE_BYTES)
        self.send(nonce)
        self.fill(memoryview(theirs))
        if ciphers_for is not None:
            self._ciphers = ciphers_for(nonce, bytes(theirs))
            self._sealed = memoryview(bytearray(_RECORD + self._ciphers[1].overhead))
        if probes:
            self.socket.settimeout(min(timeout_s, _PROBE_S))
            try:
                self.send(bytes(SIZES[0]))
                self.fill(memoryview(bytearray(SIZES[0])))
            except TimeoutError as error:
                raise Swallowed from error
        self.socket.settimeout(None)

    def send(self, header: bytes, content: bytes | memoryview = b"", flags: int = 0) -> None:
        """Send a header and what follows it. Raises OSError if that fails."""
        sent: Iterator[bytes | memoryview] = iter((header, content))
        if self._ciphers is not None:
            pieces = (content[at : at + _RECORD] for at in range(0, len(content), _RECORD))
            sent = map(self._ciphers[0].seal, chain([header], pieces))
        if len(content) <= _JOINED:
            self.socket.sendall(b"".join(sent), flags)
            return
        self.socket.sendall(next(sent), _MORE)
        for each in sent:
            self.socket.sendall(each)

    def fill(self, memory: memoryview) -> None:
        """Receive as many bytes as the memory has: a header, or what follows it. Raises OSError if other ones come, or none."""
        if self._ciphers is None:
            _fill(self.socket, memory)
            return
        cipher = self._ciphers[1]
        for at in range(0, len(memory), _RECORD):
            piece = memory[at : at + _RECORD]
            sealed = self._sealed[: len(piece) + cipher.overhead]
            _fill(self.socket, sealed)
            piece[:] = cipher.open(sealed)

    def look(self) -> tuple[Seen, bool]:
        """What the kernel has counted; and whether the socket is dead: what was sent, or a question whether the other end takes
        more, has been unanswered for long. An end that takes nothing answers: it may only be late.
        """
        counts = self._counts()
        if counts is None:
            return Seen(), False
        is_dead = max(counts.retransmits, counts.probes) >= _UNANSWERED and counts.last_ack_recv > _GONE_MS
        seen = Seen(counts.bytes_acked, counts.bytes_received, counts.data_segs_out, counts.total_retrans)
        return seen, is_dead

    @property
    def rtt_s(self) -> float | None:
        """Seconds of a round trip between the two kernels, the shortest so far; None where the kernel does not say."""
        counts = self._counts()
        return counts.min_rtt / 1e6 if counts is not None and 0 < counts.min_rtt < _NO_RTT else None

    def _counts(self) -> _Counts | None:
        try:
            state = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _STATE.size)
            return _Counts(*_STATE.unpack(state))
        except (OSError, AttributeError, struct.error):  # it is closed, or not Linux
            return None


def _fill(connected: socket.socket, memory: memoryview) -> None:
    filled = 0
    while filled < len(memory):
        came = connected.recv_into(memory[filled:], 0, socket.MSG_WAITALL)
        if not came:
            raise Closed if _is_half_closed(connected) else ConnectionResetError(errno.ECONNRESET, CLOSED)
        filled += came


def _is_half_closed(connected: socket.socket) -> bool:
    """Whether the other end alone has closed a socket. One that was reset looks alike to all but the first who hears of it."""
    try:
        return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
    except (OSError, AttributeError):  # this end has closed it, too, or it is not Linux
        return False
