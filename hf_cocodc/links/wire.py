"""The TCP connections between regions, outside torch.distributed's default group, and their errors.

A `Wire` holds a pair of connected ends for each other region. A transfer uses a `View` of it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..coordinator.cipher import check_encryption
from ..coordinator.secret import Keys
from ..errors import LinkError, RegionLostError
from ..threads import NativeThread
from .door import with_door
from .exchange import LARGEST
from .introduction import Way
from .pacing import Share, can_pace, pace, say_who_keeps_the_limit
from .pairs import (
    ASSUMED_RATE,
    MAX_CONNECTIONS,
    MAX_SOCKETS,
    Pair,
    abandon,
    connections_for,
    side_by_side,
)
from .view import FOR_EVER_S, Throttle, View, Waits

TAGS = 64
"""Tags of a view, unless it is made for more."""
END_OF_TAGS = 1 << 30
_FIRST_TAGS = range(END_OF_TAGS, END_OF_TAGS + TAGS)
"""Tags of the first messages of a pair: no other view uses them."""
_INTRODUCTIONS = _FIRST_TAGS.stop
_MOST_ASKED = 64
"""What regions.connections may ask for."""
_THREADS = 16
"""The most connections that are made at the same time."""
_CLOSING_S = 10.0
_SOON = 0.25
"""Share of the time-out in which a piece must have travelled."""

_gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it
_NOTE_S = 0.5
"""The note of a region may arrive so long after its connections have closed. Who goes on without it does not wait for that."""


class Wire:
    """Connections to other regions, which may come and go: a pair of ends for each.

    Args:
        region: this region.
        connections: for payloads, to each other region; None derives the number from the round trip.
        address: the address of this machine that other regions reach.
        timeout_s: seconds after which an operation that another region has begun counts as failed.
        rate_limit: bytes per second that this wire sends at most, to all regions together; None for no limit.
        num_lanes: wires of this region; they share the network.
        is_patient: whether a transfer waits as long as it is not void. A healthy region may send nothing because it waits for a
            frozen one; a time-out would close the connections to it, even after the transfer has become void.
        keys: of the run's secret: both ends of a connection prove that they have them. None without a secret.
        encrypt: whether all that is sent is encrypted.

    Attributes:
        address: see the argument.
        waits: what this region waits for now.
        note_of: the note that a region left about why it leaves, if any; waits for it for so many seconds.

    Raises:
        InputError: it cannot be encrypted here.
    """

    def __init__(
        self,
        region: int,
        connections: int | None = None,
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        rate_limit: float | None = None,
        num_lanes: int = 1,
        is_patient: bool = False,
        keys: Keys | None = None,
        encrypt: bool = False,
    ) -> None:
        if encrypt:
            check_encryption(keys)
        self._secret = keys, encrypt
        self.region, self.timeout_s, self._is_patient = region, timeout_s, is_patient
        self._asked = connections
        self.address = address
        self.note_of: Callable[[int, float], str | None] = lambda region, wait_s: None
        self._rate, self._limit = rate_limit or ASSUMED_RATE / num_lanes, rate_limit
        self._throttle = Throttle(rate_limit)
        self.waits = Waits()
        self._paced: tuple[tuple[int, int], ...] = ()
        self._pacing = threading.Lock()
        self._pairs: dict[int, Pair] = {}
        self._closing: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._device, self._door = with_door(lambda: _gloo.create_device(hostname=address))

    @property
    def regions(self) -> list[int]:
        """The regions to which this wire is connected, in order."""
        return sorted(self._pairs)

    def connect(
        self, region: int, key: str, way: Callable[[str], Way], claim: Callable[[], bool] = lambda: True
    ) -> None:
        """Connect to one other region; blocks until it has called, too. Other pairs may work meanwhile.

        Args:
            region: the other region.
            key, way: see `Pair.meet`.
            claim: called when the connections are there, before they count; returns whether they are still wanted.

        Raises:
            LinkError: the connections could not be made in time, or are not wanted any more.
        """
        pair = self._pair(region)
        with self._door.opened():
            with self._connecting([region]):
                pair.meet(key, way)
            self._widen([pair], alone=True)
        with self._lock:
            is_wanted = claim()
            if is_wanted:
                self._pairs[region] = pair
        if not is_wanted:
            self._close(pair)
            raise LinkError(
                f"region {region} has left, or has come as another process, while they connected."
            )

    def connect_all(self, keys: Mapping[int, str], way: Callable[[int], Callable[[str], Way]]) -> int:
        """Connect to other regions. The longest round trip decides for all pairs.

        Args:
            keys: of all other regions; see `Pair.meet`.
            way: from a region, how to reach it.

        Returns:
            The number of payload connections of each pair, equal in all regions.

        Raises:
            LinkError: the connections could not be made in time.
        """
        others = sorted(keys)
        pairs = [self._pair(other) for other in others]

        def meet(pair: Pair) -> None:
            pair.meet(keys[pair.region], way(pair.region))

        # all regions handle pairs in the same order, and the first pair in it never waits for another one
        with self._door.opened():
            with self._connecting(others):
                side_by_side([partial(meet, pair) for pair in pairs], _THREADS)
            count = self._widen(pairs)
        with self._lock:
            self._pairs |= {pair.region: pair for pair in pairs}
        return count

    def drop(self, region: int) -> None:
        """Close the connections to a region, if there are any. No other pair is touched. Returns at once.

        Operations on them fail, or go on waiting until the other end closes, too. Views that have any must be revoked.
        """
        with self._lock:
            pair = self._pairs.pop(region, None)
        if pair is not None:
            self._close(pair)

    def view(
        self,
        regions: Iterable[int],
        base_tag: int,
        num_tags: int = TAGS,
        connections: int | None = None,
        label: bytes = b"",
    ) -> View:
        """What one transfer uses. All participants give the same regions and tags; no other transfer ever has these tags.

        Args:
            regions: this region and regions to which it is connected.
            base_tag: the first tag.
            num_tags: the number of its tags, all below END_OF_TAGS.
            connections: for how many connections a message is cut into pieces. By default as many as a pair can have: pairs
                that were connected one by one differ, and all participants must cut alike.
            label: what is encrypted is bound to it. Equal in all participants, and different in views that have the same tags,
                one after the other.

        Raises:
            LinkError: a region is not connected.
        """
        if base_tag + num_tags > END_OF_TAGS:
            raise ValueError(f"{base_tag=} with {num_tags=} goes beyond {END_OF_TAGS=}.")
        with self._lock:
            others = set(regions) - {self.region}
            missing = sorted(others - self._pairs.keys())
            if missing:
                raise LinkError(f"region {self.region} has no connection to region {missing[0]}.")
            pairs = {other: self._pairs[other] for other in sorted(others)}
        self._pace(pairs.values())
        return self._view(pairs, range(base_tag, base_tag + num_tags), connections, label)

    def close(self, broken: bool, at_once: bool = False) -> None:
        """Release the connections. Broken ones are kept for ever, see `abandon`. Waits for those that are being closed.

        `at_once`: other regions may wait at their ends, and views still hold this one.
        """
        with self._lock:
            pairs, self._pairs = list(self._pairs.values()), {}
        if broken:
            abandon(pairs)
        elif at_once:
            for pair in pairs:
                self._close(pair)
        until = time.monotonic() + _CLOSING_S
        for closing in self._closing:  # the interpreter must not end meanwhile
            closing.join(max(until - time.monotonic(), 0.0))
        self._door.close()

    def _pair(self, region: int) -> Pair:
        return Pair(self.region, region, self._device, self.timeout_s, *self._secret)

    def _view(
        self, pairs: Mapping[int, Pair], tags: range, connections: int | None = None, label: bytes = b""
    ) -> View:
        cut_for = connections or self._asked or MAX_CONNECTIONS
        timeout_s = FOR_EVER_S if self._is_patient and tags != _FIRST_TAGS else self.timeout_s
        told = self._throttle, self.waits, self._explain, label
        return View(self.region, pairs, tags, cut_for, timeout_s, *told)

    def _explain(self, region: int, what: str, waited_s: float, error: Exception) -> LinkError:
        """The error for a failed operation with `region`. It quotes the note that the region left, if any."""
        reason = self.note_of(region, 0.0 if self._is_patient else _NOTE_S)
        if reason is not None:
            return RegionLostError(
                region, f"region {region} left while region {self.region} waited for {what}: {reason}"
            )
        if "timed out" in str(error).lower():
            return RegionLostError(
                region,
                f"region {region} went silent in the middle of {what}: it sent nothing for {waited_s:.0f} s (regions."
                f"timeout_s={self.timeout_s:g}). If the link is only slow, raise regions.timeout_s. If the region or "
                "the network between the regions is gone, start all regions again with --resume once it is back.",
            )
        return died(region, self.region, what)

    def _widen(self, pairs: Sequence[Pair], alone: bool = False) -> int:
        """Make the payload connections of pairs that have met: as many to each as the longest round trip asks for.

        A pair that is made alone has a power of two: messages are cut for MAX_CONNECTIONS then, and load so many equally.
        """
        found = {pair.region: pair for pair in pairs}
        with self._lock:
            room = max(MAX_SOCKETS // max(len(self._pairs | found), 1) - 1, 1)
        first = self._view(found, _FIRST_TAGS)
        rtt_s = first.round_trip_s()
        wanted = connections_for(rtt_s, self._rate)
        if alone:
            wanted, room = 1 << (wanted - 1).bit_length(), 1 << (room.bit_length() - 1)
        wanted = self._asked or min(wanted, room)
        mine = torch.tensor([wanted], dtype=torch.float64)
        told = first.swap(mine, "the number of connections")
        count = max(_count_in(each.item(), region) for region, each in zip(first.regions, told, strict=True))
        calls = [partial(pair.widen, index, _INTRODUCTIONS) for pair in pairs for index in range(count)]
        with self._connecting(list(found)):
            groups = side_by_side(calls, _THREADS)
        for pair in pairs:
            pair.bulk, groups = groups[:count], groups[count:]
            pair.rtt_s = rtt_s
        return count

    def _close(self, pair: Pair) -> None:
        """Close the connections of a pair, in a thread: it takes a moment, more so if data are under way."""
        closing = NativeThread(pair.close, "hf_cocodc-close")
        self._closing = [each for each in self._closing if each.is_alive()] + [closing]
        closing.start()

    def _pace(self, pairs: Collection[Pair]) -> None:
        """Let the kernel keep the rate limit for a transfer between these pairs; if it does not, the throttle keeps it.

        Each pair has an equal part of it, and so has each of its connections. They then go on side by side: with a limit so low
        that the first piece would come too late, the throttle lets one go after the other.
        """
        named = tuple((pair.region, id(pair)) for pair in pairs)
        with self._pacing:
            if self._limit is None or named == self._paced:
                return
            shares = [
                Share(pair.own_address, pair.address, self._limit / len(pairs) / len(pair.bulk))
                for pair in pairs
            ]
            is_soon = all(LARGEST / each.rate < _SOON * self.timeout_s for each in shares)
            wanted = sum(len(pair.bulk) + 1 for pair in pairs)
            is_kept = is_soon and pace(shares) >= wanted
            self._throttle.rate = None if is_kept else self._limit
            self._paced = named
        if is_soon and not is_kept and not can_pace():
            say_who_keeps_the_limit(self.region)

    @contextlib.contextmanager
    def _connecting(self, regions: Sequence[int]) -> Iterator[None]:
        whom = f"region {regions[0]}" if len(regions) == 1 else "the other regions"
        try:
            yield
        except LinkError as error:  # it says itself what helps
            raise LinkError(f"region {self.region} could not connect to {whom}: {error}") from error
        except (RuntimeError, TimeoutError, ValueError) as error:
            raise LinkError(
                f"region {self.region} could not connect to {whom} from its address {self.address}: "
                f"{str(error).splitlines()[0][:200]}. Every region must reach every other region at its address: "
                "set regions.interface to the network interface of the link."
            ) from error


def died(region: int, here: int, what: str) -> RegionLostError:
    """The error in region `here` for a region that has closed its connections without a word."""
    return RegionLostError(
        region,
        f"region {region} closed its connection while region {here} waited for {what}: its process has died. Look at its last "
        "output, then start all regions again with --resume.",
    )


def _count_in(told: float, region: int) -> int:
    """The number of connections that a region asks for.

    Raises:
        RegionLostError: it is none that a region of this version asks for.
    """
    if told not in range(1, _MOST_ASKED + 1):
        raise RegionLostError(
            region,
            f"region {region} asks for {told:g} connections, and a pair has 1 .. {_MOST_ASKED} (regions.connections): what it "
            "sends cannot be believed. Look at its last output, and start it again.",
        )
    return int(told)
