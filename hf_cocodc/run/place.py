"""Where a region of an elastic run is: how it reaches the others, whether it meets them at the start or joins them."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ..errors import LinkError, MeetingError
from ..links.terms import Reach
from ..links.wire import Wire
from ..meeting import live
from ..meeting.board import take_ticket
from ..meeting.changes import Changes
from ..meeting.handshake import compare_two
from ..meeting.presence import Member, Presence
from ..meeting.proof import Proof
from ..meeting.secret import Keys
from ..meeting.store import SteadyStore, StoreAwayError, connect_store
from ..meeting.verdict import Decision, Report
from ..settings import RegionConfig
from .donor import Offer
from .hellos import show_differences
from .status import tell
from .waiting import Waiting

logger = logging.getLogger(__name__)

_AGAIN_S = 2.0
_PATIENCE_S = 10.0
_TRIES = 4
"""A newcomer waits for members for a part of `regions.timeout_s` at a time: who dies meanwhile is not in the next record."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What stays as it is, however often a region comes back.

    Attributes:
        region: this one.
        regions: its settings, resolved.
        name: of the run.
        hello: what this region tells the others of itself.
        host: address of this machine that the others reach.
        pin_memory: see `ElasticLink`.
        keys: of the run's secret; None if there is none.
        largest_base: bytes that a base of this model has at most.
    """

    region: int
    regions: RegionConfig
    name: str
    hello: Mapping[str, Any]
    host: str
    pin_memory: bool
    keys: Keys | None = None
    largest_base: int = 1 << 50

    @property
    def rate(self) -> float | None:
        """Bytes per second to send at most."""
        limit = self.regions.rate_limit
        return None if limit is None else limit * 1e6 / 8

    def store(self) -> dist.Store:
        """Another connection to the store."""
        assert self.regions.store is not None
        return connect_store(self.regions.store, self.regions.timeout_s, self.keys)

    def steady_store(self) -> SteadyStore:
        assert self.regions.store is not None
        return SteadyStore(self.regions.store, keys=self.keys)

    def presence(self, run: str, me: Member) -> Presence:
        times = self.regions.timeout_s, self.regions.stuck_timeout_s
        return Presence(run, me, self.host, *times, keys=self.keys, encrypt=bool(self.regions.encrypt))

    def prove(self, offer: Offer) -> Proof | None:
        """One end of the conversation in which a donor and a newcomer prove themselves; None without a secret."""
        about = {"for": "base", **offer._asdict()}
        return None if self.keys is None else Proof(self.keys, about, bool(self.regions.encrypt))

    def reach(
        self, run: str, presence: Presence, members: tuple[Member, ...] | None, losses: int = 0
    ) -> Reach:
        """How this process reaches the others.

        Args:
            run: unique to the run.
            presence: connected to them.
            members: with whom it has met; None for a newcomer.
            losses: decisions on losses that the run has had.
        """
        asked = self.regions.connections
        wire = Wire(
            self.region,
            asked if isinstance(asked, int) else None,
            self.host,
            self.regions.timeout_s,
            self.rate,
            note_of=presence.note_of,
            is_patient=True,  # presence tells who is lost
            keys=self.keys,
            encrypt=bool(self.regions.encrypt),
        )
        wait_s = self.regions.wait_s
        assert wait_s is not None
        changes = partial(Changes, self.steady_store(), run, presence.me, presence)
        agree = Agreeing(partial(changes, number=losses, wait_s=wait_s))
        return Reach(presence.me, wire, presence, agree, members)


class Agreeing:
    """Makes what agrees on losses, for a link, and keeps it.

    Args:
        make: from a function that freezes this member and one that takes a decision.
    """

    def __init__(self, make: Callable[..., Changes]) -> None:
        self._make = make
        self.changes: Changes | None = None

    def __call__(self, freeze: Callable[[], Report], decided: Callable[[Decision], None]) -> Changes:
        self.changes = self._make(freeze=freeze, decided=decided)
        return self.changes


def find(place: Place) -> live.Record | None:
    """The run that this region joins; None if it is to meet the others.

    Raises:
        MeetingError: it is to join, and there is no run.
    """
    wait_s = place.regions.start_timeout_s
    until = time.monotonic() + wait_s
    waiting = Waiting(place.region, place.name, str(place.regions.store), wait_s)
    while True:
        record = alive(place)
        if record is not None or not place.regions.join:
            return record
        if time.monotonic() > until:
            raise MeetingError(
                f"no run {place.name!r} trains at the store {place.regions.store}, and this region is to join one. Start the run "
                "first, or give its name (regions.run, --run); to begin a new run, start without --join."
            )
        waiting.say("a run to join")
        time.sleep(_AGAIN_S)


class RunTrains(Exception):
    """A region waits for others to begin a run, and the run trains already: its members did not answer when the region looked."""

    def __init__(self, record: live.Record) -> None:
        super().__init__(f"run {record.name!r} trains")
        self.record = record


def watch(place: Place) -> Callable[[], None]:
    """For a region that waits for others to meet: a function that raises RunTrains if the run trains after all.

    One new record does not say so: a process that was frozen may write one before it knows that its run has gone on without it.
    """
    store = place.steady_store()
    last, looked_at = live.read(store, place.name), time.monotonic()
    changed_at = -math.inf

    def look() -> None:
        nonlocal last, looked_at, changed_at
        now = time.monotonic()
        if now < looked_at + live.BEAT_S / 2:
            return
        looked_at = now
        with contextlib.suppress(StoreAwayError):  # the meeting notices it itself
            record = live.read(store, place.name)
            if record is not None and record != last:
                if now - changed_at < live.ALIVE_S:
                    raise RunTrains(record)
                changed_at = now
            last = record

    return look


def find_again(place: Place, run: str) -> live.Record:
    """A run of which this region knows. Its members may be frozen for a while, or the store away.

    Raises:
        LinkError: the run has ended, or does not answer.
    """
    store, wait_s = place.steady_store(), place.regions.start_timeout_s
    until, has_said = time.monotonic() + wait_s, False
    while True:
        with contextlib.suppress(StoreAwayError):
            if live.has_ended(store, run):
                raise LinkError(f"the run {place.name!r} has ended.")
            record = live.read_alive(store, place.name)
            if record is not None and record.run == run:
                return record
            if record is not None:
                raise LinkError(f"the run {place.name!r} has ended, and another run of that name trains.")
        left_s = until - time.monotonic()
        if left_s < 0:
            raise LinkError(
                f"the run {place.name!r} has not answered at the store for {wait_s:g} s (regions.start_timeout_s)."
            )
        if not has_said:
            has_said = True
            say_why_it_waits(place.region, f"the run {place.name!r} does not answer at the store", left_s)
        time.sleep(_AGAIN_S)


def alive(place: Place) -> live.Record | None:
    """The run of this name that trains; None if there is none."""
    try:
        return live.read_alive(place.steady_store(), place.name)
    except StoreAwayError:
        if place.regions.join:
            return None
        raise


def connected(place: Place, record: live.Record) -> tuple[Presence, dict[Member, str], live.Record]:
    """Presence with all members of a run, their addresses, and its newest record.

    Raises:
        HandshakeError: this region differs from them.
        MeetingError: they refuse it.
        LinkError: one of them cannot be reached, or the run has ended.
    """
    # by then, a process of this region that has died is no member any more
    until = time.monotonic() + place.regions.timeout_s + _PATIENCE_S
    try_s = max(place.regions.timeout_s / _TRIES, 2 * live.BEAT_S)
    said = ""
    while True:
        first = record.members[0].region
        compare_two(first, record.hello, place.region, place.hello)
        addresses = {Member(each.region, each.ticket): each.address for each in record.members}
        presence = None
        try:
            presence = place.presence(record.run, Member(place.region, take_ticket(place.store())))
            presence.connect(addresses, min(until, time.monotonic() + try_s), {})
            show_differences([record.hello, place.hello])
            return presence, addresses, record
        except LinkError as error:  # a member that has just died is still in the record; or the store is away
            if presence is not None:
                presence.close()
            if "regions.max" in str(error):
                raise
            held = taken(record, place.region) if "takes part already" in str(error) else None
            left_s = until - time.monotonic()
            if left_s < 0:
                raise (MeetingError(held) if held else error) from None
            if said != (held or str(error)):
                said = held or str(error)
                say_why_it_waits(place.region, said, left_s)
        time.sleep(_AGAIN_S)
        record = find_again(place, record.run)


def say_why_it_waits(region: int, why: str, left_s: float) -> None:
    """Say that a newcomer cannot join yet, and for how long it tries again."""
    words = f"cannot join yet, and tries again for {left_s:.0f} s: {why}"
    logger.warning("region %d %s", region, words)
    tell("waiting for its place", news=words)


def taken(record: live.Record, region: int) -> str | None:
    """Which process of a region takes part, and how another one takes its place; None if there is none."""
    for member in record.members:
        if member.region == region:
            return (
                f"region {region} is in run {record.name!r} already, as the process at {member.address}. If that has died, the "
                "others will notice it. If it lives, end it, or join as another region (hf-cocodc train --join takes a free "
                "number)."
            )
    return None
