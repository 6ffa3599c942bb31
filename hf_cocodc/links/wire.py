"""The TCP connections between regions: gloo groups outside torch.distributed's default group, and their errors."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LinkError, RegionLostError
from ..meeting.heartbeat import Heartbeat
from ..meeting.store import if_answered

MAX_CONNECTIONS = 16
ASSUMED_RATE = 125e6
"""Bytes per second that a region plans for without a rate limit: 1 Gbit/s."""
_USABLE = 0.25
"""Share of a socket's buffer that we count as bytes in flight. The kernel's book-keeping takes a third of the buffer, and a
connection that was idle or has lost a packet starts with far less."""
_FOR_EVER = timedelta(days=365)
_NOTE_S = 3.0

_gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it

_abandoned: list[Any] = []
"""Groups that failed. They are never destroyed: gloo's destructor would block until their pending operations time out."""


class Pending(NamedTuple):
    """An operation in progress with a region."""

    region: int
    work: Any


class Wire:
    """Connections to every other region: one for control messages, and some for payloads.

    Control messages have a connection of their own, so that they never wait in a queue of payloads.

    Args:
        store: reaches all regions; used under `prefix` to connect, and to tell why a region left.
        prefix: unique to the run (and lane).
        region: this region.
        num_regions: number of regions M.
        connections: for payloads, to each other region; None derives the number from the longest round trip.
        address: the address of this machine that other regions reach.
        timeout_s: seconds after which an operation that another region has begun counts as failed.
        rate_limit: bytes per second that this wire sends at most; None for no limit.
        num_lanes: wires of this region; they share the network.

    Attributes:
        others: the other regions.
        connections: number of payload connections to each other region.
        rtt_s: seconds of a round trip to the most distant region.

    Raises:
        LinkError: the connections could not be made in time.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        region: int,
        num_regions: int,
        connections: int | None,
        address: str,
        timeout_s: float,
        rate_limit: float | None,
        num_lanes: int,
    ) -> None:
        self.region, self.num_regions, self.timeout_s = region, num_regions, timeout_s
        self.others = [other for other in range(num_regions) if other != region]
        self._prefix, self._store, self._address = prefix, store, address
        self._notes = dist.PrefixStore(f"{prefix}/left", store)
        self._rate_limit = rate_limit
        self._free_at = 0.0
        self._tag = 0
        self._bulk: list[Any] = []
        self._device = _gloo.create_device(hostname=address)  # shared: each device has its own thread
        self._control = self._group("control")
        self.rtt_s = self._round_trip_s()
        if connections is None:
            wanted = connections_for(self.rtt_s, rate_limit or ASSUMED_RATE / num_lanes)
            mine = torch.tensor([wanted], dtype=torch.float64)
            connections = int(max(each.item() for each in self.swap(mine, "the number of connections")))
        self.connections = connections
        # a call that blocks on a store blocks the calls of all threads: groups made in parallel need a store each
        own_store = getattr(store, "clone", None)
        with ThreadPoolExecutor(connections if own_store else 1) as pool:
            names = [f"bulk{index}" for index in range(connections)]
            self._bulk = list(pool.map(lambda name: self._group(name, own_store and own_store()), names))

    def tag(self) -> int:
        """A tag for the operations of one call. All regions make the same calls in order, and thus get the same tags."""
        self._tag = (self._tag + 1) % (1 << 24)
        return self._tag

    def send(self, region: int, payload: Tensor, tag: int, index: int, what: str) -> Pending:
        """Wait until the rate limit allows it, then start to send bytes on payload connection `index`."""
        if self._rate_limit:
            now = time.monotonic()
            time.sleep(max(self._free_at - now, 0.0))
            self._free_at = max(self._free_at, now) + payload.numel() / self._rate_limit
        with self._naming(region, what):
            return Pending(region, self._bulk[index % self.connections].send([payload], region, tag))

    def receive(self, region: int, buffer: Tensor, tag: int, index: int, what: str) -> Pending:
        """Start to receive bytes into `buffer`; do not touch the buffer before they are here."""
        with self._naming(region, what):
            return Pending(region, self._bulk[index % self.connections].recv([buffer], region, tag))

    def wait(self, pending: Iterable[Pending], what: str, patience: Heartbeat | None = None) -> None:
        """Wait for operations. With `patience`, another region may be late: its heartbeat decides how long to wait.

        Raises:
            LinkError: an operation failed; the message names the region, and the reason if the region left one.
        """
        for region, work in pending:
            if patience is not None:
                patience.wait_for(region, what)
            with self._naming(region, what):
                work.wait(timedelta(seconds=self.timeout_s) if patience is None else _FOR_EVER)
        if patience is not None:
            patience.arrived()

    def begin_swap(self, own: Tensor, what: str) -> "Swap":
        """Start to exchange a small tensor with every other region, on the control connection."""
        tag = self.tag()
        got = {other: torch.empty_like(own) for other in self.others}
        pending = []
        for other in self.others:
            with self._naming(other, what):
                pending.append(Pending(other, self._control.recv([got[other].view(torch.uint8)], other, tag)))
                pending.append(Pending(other, self._control.send([own.view(torch.uint8)], other, tag)))
        return Swap([got.get(region, own) for region in range(self.num_regions)], pending)

    def swap(self, own: Tensor, what: str) -> list[Tensor]:
        """The small tensors of all regions, in the order of the regions."""
        values, pending = self.begin_swap(own, what)
        self.wait(pending, what)
        return values

    def leave_note(self, reason: str) -> None:
        """Write down why this region leaves."""
        # without a store the others still see the connection close
        if_answered(lambda: self._notes.set(str(self.region), reason), _NOTE_S)

    def note_of(self, region: int) -> str | None:
        """The note that `region` left, if any."""

        def read() -> str | None:
            return self._notes.get(str(region)).decode() if self._notes.check([str(region)]) else None

        return if_answered(read, _NOTE_S)

    def close(self, broken: bool) -> None:
        """Release the connections. Broken ones are kept for ever, see `_abandoned`."""
        if broken:
            _abandon([self._control, *self._bulk])
        self._control, self._bulk = None, []

    def _round_trip_s(self) -> float:
        """The shortest of several tries: the first tries also set the connections up."""
        tries = []
        for _ in range(4 if self.others else 0):
            start = time.perf_counter()
            self.swap(torch.zeros(1, dtype=torch.float64), "the first round trip")
            tries.append(time.perf_counter() - start)
        return min(tries, default=0.0)

    def _group(self, name: str, store: dist.Store | None = None) -> Any:
        options = _gloo._Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        options._devices = [self._device]
        try:
            prefixed = dist.PrefixStore(f"{self._prefix}/{name}", store or self._store)
            return _gloo(prefixed, self.region, self.num_regions, options)
        except RuntimeError as error:
            raise LinkError(
                f"region {self.region} could not connect to the other regions from its address {self._address}: "
                f"{str(error).splitlines()[0][:200]}. Every region must reach every other region at its address: "
                "set regions.interface to the network interface of the link."
            ) from error

    @contextlib.contextmanager
    def _naming(self, region: int, what: str) -> Iterator[None]:
        """Inside the block, turn gloo's errors into errors that name the region and the awaited transfer."""
        since = time.perf_counter()
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            raise self._explain(region, what, time.perf_counter() - since, error) from error

    def _explain(self, region: int, what: str, waited_s: float, error: Exception) -> LinkError:
        """The error for a failed operation with `region`. It quotes the note that the region left, if any."""
        reason = self._wait_for_note(region)
        if reason is not None:
            return RegionLostError(
                region, f"region {region} left while region {self.region} waited for {what}: {reason}"
            )
        if "timed out" in str(error).lower():
            return RegionLostError(
                region,
                f"region {region} went silent in the middle of {what}: it sent nothing for {waited_s:.0f} s (regions."
                f"timeout_s={self.timeout_s:g}). If the link is only slow, raise regions.timeout_s. If the region is gone, "
                "start all regions again with --resume.",
            )
        return RegionLostError(
            region,
            f"region {region} closed its connection while region {self.region} waited for {what}: its process has died. Look "
            "at its last output, then start all regions again with --resume.",
        )

    def _wait_for_note(self, region: int) -> str | None:
        """The note of `region`, if any. Waits a moment: the note may arrive after the connection has closed."""
        for _ in range(10):
            note = self.note_of(region)
            if note is not None:
                return note
            time.sleep(0.05)
        return None


class Swap(NamedTuple):
    """A swap of small tensors in progress. Wait for `pending`; then `values` are valid, in the order of the regions."""

    values: list[Tensor]
    pending: list[Pending]


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


def _abandon(groups: Sequence[Any]) -> None:
    import ctypes

    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _abandoned.append(group)
