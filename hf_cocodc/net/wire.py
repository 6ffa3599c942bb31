"""The TCP connections between regions, outside torch.distributed, and their errors.

A `Wire` holds a pair of connected ends for each other region. A transfer uses a `View` of it.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from ..errors import LinkError, RegionLostError
from .awake import awake_s
from .connection import Connection, ConnectionLost
from .keys import Keys, Share
from .members import Whereabouts
from .pacing import LOSES, can_pace, congestion_of, part_lost, say_who_keeps_the_limit
from .pairs import ASSUMED_RATE, MAX_CONNECTIONS, MAX_SOCKETS, Pair, connections_for
from .pipe import CLOSED, Seen
from .port import Port
from .recovery import NotBack
from .view import LARGEST, Throttle, View, Waits

logger = logging.getLogger(__name__)

FIRST = 0
"""Order of the first messages of a pair: all other views have a higher one."""
_MOST_ASKED = 64
"""The most that regions.connections may ask for."""
_ROUND_TRIPS = 4
"""So often a round trip is measured, unless it goes through a storage: there each takes seconds."""
_LONG_S = 0.005
"""A shorter round trip belongs to one site."""
_SOON = 0.25
"""Share of the time-out in which a piece must have traveled."""
_NEWS_S = 0.1
"""A region's last note, which replaces an earlier one, may come over the coordinator so long after the connections close."""
_NOTE_S = 0.5
"""A region's note may arrive so long after its connections have closed. Later nobody waits for that: a decision tells why."""


class Wire:
    """Connections to other regions, which may come and go: a pair of ends for each.

    Args:
        connections: for payloads, to each other region; None derives the number from the round trip.
        port: on which to listen; 0 for any that is free.
        announce: from the port, pairs of a host and a port at which others reach this region; by default its own. None, where
            regions reach each other through a storage.
        call_from: the address from which to call others; empty for any.
        timeout_s: seconds after which an operation that another region has begun counts as failed.
        rate_limit: bytes per second that this wire sends at most, to all regions together; None for no limit.
        num_lanes: wires of this region; they share the network.
        congestion: of payload connections: see `pacing.congestion_of`.
        keys: of the run's secret: with them, all that is sent is sealed.
        most_regions: of the run: with many, each pair has fewer connections.

    Attributes:
        addresses: at which others reach this wire.
        storage: the URL of the one in which the run meets; empty if it meets at a coordinator's port.
        why_lost: "died" or "unreachable" once a region is lost, from when a connection to it broke, whether new ones are
            refused, and whether it has closed one in good order; None while it may come back.
        note_of: the note that a region left about why it leaves, if any; waits for it for so many seconds.

    Raises:
        InputError: this machine cannot listen on the address and port, or has no such congestion control.
    """

    def __init__(
        self,
        region: int,
        connections: int | None = None,
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        rate_limit: float | None = None,
        num_lanes: int = 1,
        congestion: str = "auto",
        keys: Keys | None = None,
        port: int = 0,
        announce: Callable[[int], Sequence[tuple[str, int]]] | None = None,
        call_from: str = "",
        most_regions: int = 2,
    ) -> None:
        self._most_regions = most_regions
        self._keys, self._share = keys, Share()
        self.region, self.timeout_s = region, timeout_s
        self._asked = connections
        self.note_of: Callable[[int, float], str | None] = lambda region, wait_s: None
        self.why_lost: Callable[[int, float, bool, bool], str | None] = self._is_late
        self.storage = ""
        self._congestion, self._may_choose = congestion_of(congestion), congestion == "auto"
        self._rate, self._limit = rate_limit or ASSUMED_RATE / num_lanes, rate_limit
        self._throttle = Throttle(rate_limit)
        self.waits = Waits()
        self._seen: dict[int, Seen] = {}
        self._is_told = False
        self._paced: tuple[tuple[int, int], ...] = ()
        self._pacing = threading.Lock()
        self._pairs: dict[int, Pair] = {}
        self._lock = threading.Lock()
        self._port = Port(address if announce is None else "", port)
        self.port, self._call_from = self._port.number, call_from
        self.addresses = tuple(((address, self.port),) if announce is None else announce(self.port))
        if not self.addresses and connections is None:
            self._asked = 1  # what goes through a storage has no window that it would fill

    @property
    def whereabouts(self) -> Whereabouts:
        """What others must know to connect to this wire."""
        return Whereabouts(self.addresses, self._share.public)

    @property
    def regions(self) -> list[int]:
        """The regions to which this wire is connected, in order."""
        return sorted(self._pairs)

    @property
    def ways(self) -> dict[int, str]:
        """The `Pair.way` of each region that is connected."""
        with self._lock:
            return {region: pair.way for region, pair in sorted(self._pairs.items())}

    @property
    def connections(self) -> int:
        """The most payload connections that a pair has."""
        with self._lock:
            return max((len(pair.bulk) for pair in self._pairs.values()), default=0)

    def meet(
        self, region: int, other: Whereabouts, about: str, look: Callable[[], object] = lambda: None
    ) -> Pair:
        """Connect to one other region, which does the same; blocks until both have. Other pairs may work meanwhile.

        The pair counts once it is added. Raises LinkError if it could not be made in time.

        `about`: names the two processes, in the same way at both ends; no other two have this name. `look`: see `Pair.meet`.
        """
        pair = self._pair(region, other, about)
        try:
            if pair.has_no_address:
                pair.meet_in_storage(self._asked or 1, look)
            else:
                pair.meet(look)
                self._widen(pair)
        except BaseException:
            pair.close()
            raise
        return pair

    def add(self, pair: Pair) -> None:
        """Let a pair count that has met, in the place of an earlier one."""
        with self._lock:
            earlier = self._pairs.pop(pair.region, None)
            self._pairs[pair.region] = pair
        if earlier is not None:
            earlier.close()

    def drop(self, region: int) -> None:
        """Close the connections to a region, if any: operations on them fail at both ends. No other pair is touched."""
        with self._lock:
            pair = self._pairs.pop(region, None)
        if pair is not None:
            pair.close()

    def view(self, regions: Iterable[int], order: int) -> View:
        """What one transfer between this region and others uses. Raises LinkError if one of them is not connected.

        `order`: equal in all participants, and higher than that of any view that one of them has had before.
        """
        with self._lock:
            others = set(regions) - {self.region}
            missing = sorted(others - self._pairs.keys())
            if missing:
                raise LinkError(f"region {self.region} has no connection to region {missing[0]}.")
            pairs = {other: self._pairs[other] for other in sorted(others)}
        self._pace(pairs.values())
        return self._view(pairs, order)

    def stream(
        self, region: int, number: int, timeout_s: float, look: Callable[[], object] = lambda: None
    ) -> Connection:
        """Open a stream to a region; see `Pair.stream`. Raises LinkError if it is not connected, or cannot be reached."""
        with self._lock:
            pair = self._pairs.get(region)
        if pair is None:
            raise LinkError(f"region {self.region} has no connection to region {region}.")
        return pair.stream(number, timeout_s, look)

    def look(self) -> None:
        """Notice whether bytes of the region that is awaited flow, and which sockets are dead. Call this every second or so."""
        with self._lock:
            pairs = dict(self._pairs)
        seen = {region: pair.look() for region, pair in pairs.items()}
        if self.waits.region in seen:
            moved, before = seen[self.waits.region].moved, self._seen.get(self.waits.region, Seen()).moved
            if moved != before:
                self.waits.moved()
        self._seen = seen
        lost = None if self._limit is not None or self._is_told else part_lost(seen.values())
        if lost is not None:
            self._is_told = True
            logger.warning(LOSES, self.region, 100 * lost)

    def drain(self) -> None:
        """Wait until the others have received all: a path that breaks once this process has ended would cost them the rest."""
        with self._lock:
            connections = [each for pair in self._pairs.values() for each in pair.connections]
        for each in connections:
            each.ask()
        until = awake_s() + self.timeout_s
        have_all = [each.drain(until) for each in connections]
        if not all(have_all):
            logger.warning(
                "region %d ends, and another region has not received all of it within %g s (regions.timeout_s): that region may "
                "lack the last mean. Look at its last output.",
                *(self.region, self.timeout_s),
            )

    def close(self) -> None:
        """Close all connections, and listen no more."""
        for region in self.regions:
            self.drop(region)
        self._port.close()

    def _pair(self, region: int, other: Whereabouts, about: str) -> Pair:
        try:
            agreed = self._share.keys_with(other.share, self._keys, about)
        except ValueError as error:
            raise LinkError(
                f"region {region} says that its key is {other.share.hex()}, and that is none of X25519: what it runs is not this "
                "version of hf_cocodc. Install the same version in all regions."
            ) from error
        how = self.addresses, other.addresses, agreed, self.timeout_s, self._call_from, self._keys
        judge = partial(self._judge, region)
        return Pair(self.region, region, self._port, *how, judge=judge, storage=self.storage)

    def _is_late(self, region: int, broken_at: float, is_denied: bool, is_closed: bool) -> str | None:
        return "unreachable" if awake_s() - broken_at > self.timeout_s else None

    def _judge(
        self, region: int, broken_at: float, is_denied: bool, is_closed: bool
    ) -> ConnectionLost | None:
        why = self.why_lost(region, broken_at, is_denied, is_closed)
        if why is None:
            return None
        return ConnectionLost(CLOSED) if why == "died" else NotBack("it has not come back in time")

    def _view(self, pairs: Mapping[int, Pair], order: int) -> View:
        cut_for = self._asked or MAX_CONNECTIONS  # pairs may have fewer, and all participants must cut alike
        # later the coordinator tells who is lost: a healthy region may send nothing because it encodes, or waits for a frozen one
        timeout_s = self.timeout_s if order == FIRST else None
        explain = partial(self._explain, order == FIRST)
        return View(self.region, pairs, order, cut_for, timeout_s, self._throttle, self.waits, explain)

    def _explain(
        self, is_first: bool, region: int, what: str, waited_s: float, error: Exception
    ) -> LinkError:
        """The error for a failed operation with `region`. It quotes the note that the region left, if any."""
        if is_first:
            time.sleep(_NEWS_S)
        reason = self.note_of(region, _NOTE_S if is_first else 0.0)
        if reason is not None:
            return RegionLostError(
                region, f"region {region} left while region {self.region} waited for {what}: {reason}"
            )
        if isinstance(error, TimeoutError):
            return RegionLostError(
                region,
                f"region {region} went silent in the middle of {what}: it sent nothing for {waited_s:.0f} s (regions."
                f"timeout_s={self.timeout_s:g}). If the link is only slow, raise regions.timeout_s. If the region or "
                "the network between the regions is gone, start all regions again with --resume once it is back.",
            )
        if isinstance(error, NotBack):
            return RegionLostError(
                region,
                f"region {region} cannot be reached: its connections broke while region {self.region} waited for {what}, and "
                f"none came back within {self.timeout_s:g} s (regions.timeout_s). The network between them, or its machine, "
                "is down. Start all regions again with --resume once it is back.",
            )
        return died(region, self.region, what)

    def _widen(self, pair: Pair) -> None:
        """Make the payload connections of a pair that has met: as many as its round trip asks for, and a power of two. Messages
        are cut for MAX_CONNECTIONS, and load so many equally.
        """
        room = max(MAX_SOCKETS // max(self._most_regions - 1, 1) - 2, 1)
        first = self._view({pair.region: pair}, FIRST)
        rtt_s = first.round_trip_s(1 if pair.way == "storage" else _ROUND_TRIPS)
        wanted = 1 << (connections_for(rtt_s, self._rate) - 1).bit_length()
        wanted = self._asked or min(wanted, 1 << (room.bit_length() - 1))
        mine = torch.tensor([wanted], dtype=torch.float64, device="cpu")
        theirs = first.swap(mine, "the number of connections")
        count = max(
            _count_in(each.item(), region) for region, each in zip(first.regions, theirs, strict=True)
        )
        # over a short way nothing is won, and bbr takes more than its share beside others
        congestion = self._congestion if rtt_s >= _LONG_S or not self._may_choose else None
        pair.widen(count, congestion)
        pair.rtt_s = rtt_s

    def _pace(self, pairs: Collection[Pair]) -> None:
        """Let the kernel keep the rate limit for a transfer between these pairs; if it does not, the throttle keeps it.

        Each pair has an equal part of it, and so has each of its connections. They then go on side by side: with a limit so low
        that the first piece would come too late, the throttle lets one go after the other.
        """
        named = tuple((pair.region, id(pair)) for pair in pairs)
        with self._pacing:
            if self._limit is None or named == self._paced:
                return
            rates = {pair: self._limit / len(pairs) / len(pair.bulk) for pair in pairs}
            is_soon = all(LARGEST / rate < _SOON * self.timeout_s for rate in rates.values())
            is_kept = is_soon and all(pair.pace(rate) for pair, rate in rates.items())
            self._throttle.rate = None if is_kept else self._limit
            self._paced = named
        if is_soon and not is_kept and not can_pace():
            say_who_keeps_the_limit(self.region)


def died(region: int, here: int, what: str) -> RegionLostError:
    """The error in region `here` for a region that has closed its connections without a word."""
    return RegionLostError(
        region,
        f"region {region} closed its connection while region {here} waited for {what}: its process has died. Look at its last "
        "output, and start all regions again with --resume; where regions.min lets the others go on, only that region.",
    )


def _count_in(theirs: float, region: int) -> int:
    """The number of connections that a region asks for. Raises RegionLostError if no region of this version asks for it."""
    if theirs not in range(1, _MOST_ASKED + 1):
        raise RegionLostError(
            region,
            f"region {region} asks for {theirs:g} connections, and a pair has 1 .. {_MOST_ASKED} (regions.connections): what it "
            "sends cannot be believed. Look at its last output, and start it again.",
        )
    return int(theirs)
