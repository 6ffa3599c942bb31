"""Pairs of regions: the TCP connections to one other region, each a gloo group of two.

If an operation fails or times out, gloo closes all connections of its group. A group of two therefore fails alone. It can be
dropped, and connected again, while the connections to other regions work on. It has no thread of its own.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from ..coordinator.cipher import Cipher
from ..coordinator.proof import Proof
from ..coordinator.secret import Keys
from ..threads import NativeThread
from .introduction import Introduction, OnControl, Way
from .proving import proven

T = TypeVar("T")

MAX_CONNECTIONS = 16
MAX_SOCKETS = 512
"""Sockets that a process opens for its pairs; with many regions, each pair has fewer connections. Most systems allow 1024."""
ASSUMED_RATE = 125e6
"""Bytes per second that a region plans for without a rate limit: 1 Gbit/s."""
_USABLE = 0.25
"""Share of a socket's buffer that we count as bytes in flight. The kernel's book-keeping takes a third of the buffer, and a
connection that was idle or has lost a packet starts with far less."""

_LOOK_S = 0.2

_gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it

_abandoned: list[Any] = []
"""Connections that failed, for which a thread may still wait. They are kept for ever: their destructors would wait, too."""


class Pending(NamedTuple):
    """An operation in progress with a region, and the memory that it reads or writes."""

    region: int
    connection: "Connection"
    work: Any
    memory: Tensor
    then: Callable[[], None] | None = None
    """Called once the operation has ended."""


class Connection:
    """One connection: a gloo group of two.

    Args:
        group: of gloo.
        region: the region at the other end.
        peer: its rank in the group.
    """

    def __init__(self, group: Any, region: int, peer: int) -> None:
        self._group, self._region, self._peer = group, region, peer
        self._void: list[Pending] = []
        self._num_waiting = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self, operation: str, memory: Tensor, tag: int) -> Pending:
        """Start to "send" or "recv" the bytes of `memory`. Raises RuntimeError if the connection has failed."""
        group = self._group
        if group is None:
            raise RuntimeError("the connection is closed")
        return Pending(self._region, self, getattr(group, operation)([memory], self._peer, tag), memory)

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Wait for an operation. Raises RuntimeError if it fails or does not end in time: then the connection has failed."""
        with self._lock:
            self._num_waiting += 1
        try:
            work.wait(timeout)
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._release()

    def keep(self, pending: Pending) -> None:
        """Keep an operation for whose end nobody waits any more: gloo may use its memory until the connection is closed."""
        with self._lock:
            self._void.append(pending)
            self._release()

    def close(self) -> None:
        """Close this end. While a thread waits here, only the other end can close the connection: that wakes the thread."""
        with self._lock:
            self._is_closed = True
            self._release()

    def _release(self) -> None:
        # without the memory of a receive gloo would stop to read, and a thread that waits would not hear of the other end
        if self._is_closed and not self._num_waiting:
            self._void.clear()  # operations end before their group
            self._group = None


class Pair:
    """This region's end of the connections to one other region. Both ends make the same calls.

    Args:
        region: this region.
        other: the other region.
        device: of gloo; all groups share one, because each has a thread and a listening socket.
        timeout_s: seconds after which a connection counts as failed, if the other end does not answer.
        keys: of the run's secret, which both ends prove to have on every connection; None without one.
        encrypt: whether what they send is to be encrypted.

    Attributes:
        control: the connection for control messages; None before `meet`.
        bulk: the connections for payloads.
        rtt_s: seconds of a round trip, set by the wire.
        ciphers: what seals what this end sends, and what opens what comes; None if nothing is encrypted.
        own_address: where gloo listens here, as the system's calls name it; b"" before `meet`.
        address: where it does at the other end.
    """

    def __init__(
        self,
        region: int,
        other: int,
        device: Any,
        timeout_s: float,
        keys: Keys | None = None,
        encrypt: bool = False,
    ) -> None:
        self._ids, self._keys, self._encrypt = sorted((region, other)), keys, encrypt
        self.ciphers: tuple[Cipher, Cipher] | None = None
        self.region = other
        self._rank = int(region > other)
        self._device, self._timeout_s = device, timeout_s
        self.control: Any = None
        self.bulk: list[Connection] = []
        self.rtt_s = 0.0
        self.own_address = self.address = b""

    def close(self) -> None:
        """Close all connections. See `Connection.close`."""
        for connection in (self.control, *self.bulk):
            connection.close()

    def meet(self, key: str, way: Callable[[str], Way]) -> None:
        """Make the control connection.

        Args:
            key: the same at both ends; no other pair of processes ever uses it.
            way: from a key, how the two ends tell each other where they are.

        Raises:
            RuntimeError: the other end did not come in time, or cannot be reached.
        """

        def connect(number: int) -> Connection:
            return self._connect(way(f"{key}/again{number}" if number else key))

        self.control, proof = self._proven(connect, self._keys, {"for": "wire", "key": key})
        if proof is not None:
            self._keys = proof.session()
            self.ciphers = proof.ciphers(in_order=False) if self._encrypt else None

    def widen(self, index: int, tag: int) -> Connection:
        """Make payload connection `index`. The ends introduce themselves on the control connection, with this tag.

        Raises:
            RuntimeError: the control connection has failed, or the other end cannot be reached.
        """

        def connect(number: int) -> Connection:
            return self._connect(OnControl(self.control, tag + index, self._timeout_s))

        return self._proven(connect, self._keys, {"for": "payloads", "index": index})[0]

    def connection(self, index: int | None) -> Connection:
        """Payload connection `index`, or the control connection."""
        return self.control if index is None else self.bulk[index % len(self.bulk)]

    def _proven(
        self, connect: Callable[[int], Connection], keys: Keys | None, about: dict[str, Any]
    ) -> tuple[Connection, Proof | None]:
        if keys is None:
            return connect(0), None

        def prove(number: int) -> Proof:
            return Proof(keys, {**about, "regions": self._ids, "try": number}, self._encrypt)

        return proven(connect, prove, self._rank == 0)

    def _connect(self, way: Way) -> Connection:
        options = _gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        options._devices = [self._device]
        options._threads = 0  # for collective calls, which we never make
        introduction = Introduction(way)
        group = _gloo(introduction, self._rank, 2, options)
        self.own_address, self.address = introduction.addresses
        return Connection(group, self.region, 1 - self._rank)


def connections_for(rtt_s: float, rate: float = ASSUMED_RATE, window: int | None = None) -> int:
    """Number of connections that keep a link busy.

    The link holds rtt_s x rate bytes in flight. One connection may have a share `_USABLE` of its window in flight.

    Args:
        rtt_s: seconds of a round trip.
        rate: bytes per second of the link.
        window: bytes of a socket's buffer; by default the limit of this machine's kernel for senders.
    """
    window = _send_buffer() if window is None else window
    wanted = math.ceil(rtt_s * rate / (_USABLE * window))
    return min(max(wanted, 1), MAX_CONNECTIONS)


def _send_buffer() -> int:
    """The largest TCP send buffer, in bytes, that this machine's kernel allows; Linux's default if the kernel does not say."""
    limits = Path("/proc/sys/net/ipv4/tcp_wmem")
    return int(limits.read_text().split()[2]) if limits.is_file() else 4 << 20


def abandon(things: Iterable[Any]) -> None:
    """Keep things for ever, also when the interpreter ends."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        _abandoned.append(thing)


def side_by_side(
    calls: Iterable[Callable[[], T]], threads: int, look: Callable[[], object] = lambda: None
) -> list[T]:
    """The results of calls that wait for other regions, in order. Each thread takes the next call as soon as it is free.

    The threads are daemons, so that a region which does not answer keeps no process from its end.

    Args:
        calls: what the threads call.
        threads: at most so many.
        look: called several times a second meanwhile; it may raise.

    Raises:
        BaseException: the first error of a call, or of `look`, as soon as it occurs; threads may still be waiting, but take no
            other call.
    """
    todo = list(enumerate(calls))
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    changed = threading.Condition()
    left = len(todo)
    todo.reverse()

    def work() -> None:
        nonlocal left
        while True:
            with changed:
                if not todo or failures:
                    return
                index, call = todo.pop()
            try:
                results[index] = call()
            except BaseException as error:  # raised in the calling thread
                with changed:
                    failures.append(error)
                    changed.notify()
                return
            with changed:
                left -= 1
                changed.notify()

    for _ in range(min(threads, left)):
        NativeThread(work, "hf_cocodc-connect").start()
    while True:
        with changed:
            if changed.wait_for(lambda: failures or not left, _LOOK_S):
                break
        try:
            look()
        except BaseException as error:
            with changed:
                failures.append(error)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(results))]
