"""Elastic regions in one process: connections in memory, on which a region can be made to die, freeze or be cut off.

Every message that a region sends or awaits is a point. A `Fault` strikes one region at one of its points. As with gloo, a
thread that waits for a message of a living region does not wake up when its view is revoked.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.links.elastic import ElasticLink
from hf_cocodc.links.terms import Reach, Terms
from hf_cocodc.links.view import Revoked, Swap
from hf_cocodc.meeting.presence import Member, Seen
from hf_cocodc.meeting.verdict import Decision, Report, settle

T = TypeVar("T")
PATIENCE_S = 20.0
"""No test needs so long; a wait that reaches it is an error."""


def wait_until(condition: Callable[[], Any]) -> None:
    """Until the condition holds; it must, before long."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.001)


class Died(SystemExit):
    """The region's process has died. A thread that raises it ends without a word."""


class Fault(NamedTuple):
    """What happens to a region when it comes to its point number `at` (the first is 1)."""

    region: int
    at: int
    kind: str = "dies"
    """"dies", or "freezes": it does nothing more until `Hub.thaw`."""


@dataclass(eq=False)
class Pending:
    key: tuple
    pair: Pair
    buffer: Tensor | None


@dataclass(eq=False)
class Pair:
    """The connections between two members."""

    region: int
    members: frozenset[int]


class Hub:
    """Connects regions.

    Attributes:
        points: how many points each region has passed.
        dead: tickets of the members that have died.
        when_dead: called when a member has died.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        self.points: dict[int, int] = {}
        self.dead: set[int] = set()
        self.links: dict[Member, ElasticLink] = {}
        self.when_dead: dict[Member, Callable[[], None]] = {}
        self.changed = threading.Condition()
        self.messages: dict[tuple, Tensor] = {}
        self.presences: dict[Member, FakePresence] = {}
        self.courts: dict[Member, FakeAgreement] = {}
        self.decisions: list[Decision] = []
        self.ended = False
        self._frozen: dict[int, threading.Event] = {}
        self._missed: dict[Member, dict[Member, str]] = {}
        self._tickets = 0
        self._court = threading.Thread(target=self._decide, name="court", daemon=True)
        self._court.start()

    def member(self, region: int) -> Member:
        """A new process of a region."""
        with self.changed:
            self._tickets += 1
            return Member(region, self._tickets)

    def point(self, me: Member) -> None:
        """A region comes to a point."""
        with self.changed:
            number = self.points[me.region] = self.points.get(me.region, 0) + 1
            struck = [each for each in self.faults if (each.region, each.at) == (me.region, number)]
        for fault in struck:
            if fault.kind == "dies":
                self.kill(me)
            else:
                self.freeze(me)
        self.stay(me)
        if me.ticket in self.dead:
            raise Died

    def freeze(self, me: Member) -> None:
        """The process of a member stops, and the others lose patience."""
        self._frozen.setdefault(me.region, threading.Event())
        for other in list(self.presences.values()):
            if other.me != me:
                other.lose(me, "it was late", "late")

    def thaw(self, region: int) -> None:
        event = self._frozen.pop(region, None)
        if event is not None:
            event.set()

    def is_frozen(self, region: int) -> bool:
        return region in self._frozen

    def stay(self, me: Member) -> None:
        """Do nothing while frozen."""
        event = self._frozen.get(me.region)
        if event is not None:
            assert event.wait(PATIENCE_S), "nobody thaws the region"

    def kill(self, me: Member) -> None:
        """The process of a member dies."""
        with self.changed:
            self.dead.add(me.ticket)
            self.changed.notify_all()
        link = self.links.get(me)
        if link is not None:
            link._life.ops.fail(Died())
            if link._life.following is not None:
                link._life.following.fail(Died())
        self.when_dead.get(me, lambda: None)()
        self.part(me, "its process has died")

    def part(self, me: Member, why: str | None) -> None:
        """The presence of a member ends; `why`: not in good order."""
        own = self.presences.pop(me, None)
        if own is not None:
            own.end()
        for other in list(self.presences.values()):
            other.lose(me, why)

    def miss(self, reporter: Member, lost: Mapping[Member, str]) -> None:
        with self.changed:
            self._missed.setdefault(reporter, {}).update(lost)
            self.changed.notify_all()

    def end(self) -> None:
        """Let every thread end."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        for region in list(self._frozen):
            self.thaw(region)
        for presence in list(self.presences.values()):
            presence.end()

    def _decide(self) -> None:
        """Let the members agree on losses, one after the other."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._missed or self.ended)
                if self.ended:
                    return
                missed, self._missed = self._missed, {}
            settled = {member for decision in self.decisions for member in decision.lost}
            if all(member in settled for lost in missed.values() for member in lost):
                continue
            number = len(self.decisions)
            able = {
                member: court
                for member, court in sorted(self.courts.copy().items())
                if member.ticket not in self.dead and not self.is_frozen(member.region)
            }
            reports: list[Report] = []
            for member, court in able.items():
                report = court.freeze()
                dead = {other for other in report.members if other.ticket in self.dead}
                lost = dead | {other for other in missed.get(member, {}) if other in report.members}
                reports.append(Report(**{**report.__dict__, "number": number, "lost": tuple(sorted(lost))}))
            if not any(report.members for report in reports):
                continue
            decision = settle(reports)
            self.decisions.append(decision)
            for court in list(self.courts.values()):
                court.tell(decision, self)


class FakeAgreement:
    """Agrees on losses at once: `meeting.changes` without messages."""

    def __init__(
        self, hub: Hub, me: Member, freeze: Callable[[], Report], decided: Callable[[Decision], None]
    ) -> None:
        self.freeze, self._decided, self._me, self._hub = freeze, decided, me, hub
        hub.courts[me] = self

    def begin(self, lost: Mapping[Member, str]) -> None:
        self._hub.miss(self._me, lost)

    def expect(self, number: int) -> None:
        assert number <= len(self._hub.decisions)

    def tell(self, decision: Decision, hub: Hub) -> None:
        if self._me.ticket in hub.dead:
            return
        if hub.is_frozen(self._me.region):  # hears of it when it wakes up

            def later() -> None:
                hub.stay(self._me)
                self._decided(decision)

            threading.Thread(target=later, daemon=True).start()
        else:
            self._decided(decision)

    def close(self) -> None:
        self._hub.courts.pop(self._me, None)


class FakePresence:
    """`meeting.presence.Presence` without sockets."""

    def __init__(self, hub: Hub, me: Member) -> None:
        self._hub, self.me = hub, me
        self.inner_step = self.done = 0
        self.awaits: int | None = None
        self.grace: Callable[[], float | None] = lambda: None
        self.accept: Callable[[dict[str, Any]], str | None] = lambda hello: "no"
        self._peers: dict[Member, str] = {}
        self._handlers: dict[str, list[Callable[[Member, Any], None]]] = {}
        self._on_lost: list[Callable[[Member, str], None]] = []
        self._heard: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._since = 0.0
        hub.presences[me] = self
        self._thread = threading.Thread(target=self._work, name="presence", daemon=True)
        self._thread.start()

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(sorted(member for member, lost in list(self._peers.items()) if lost in ("", "late")))

    def connect(self, members: Iterable[Member]) -> None:
        """Connect to members that expect this one, or accept it."""
        for member in members:
            other = self._hub.presences.get(member)
            if member == self.me or member in self._peers:
                continue
            if other is None:
                raise LinkError(f"region {member.region} has gone")
            refused = other.accept({"region": self.me.region, "ticket": self.me.ticket})
            if refused:
                raise LinkError(refused)
            self.meet(other)

    def meet(self, other: FakePresence) -> None:
        for one, two in ((self, other), (other, self)):
            one._peers[two.me] = ""
            one.post(two.me, "connected", {"region": two.me.region, "ticket": two.me.ticket})

    def post(self, member: Member, kind: str, content: Any) -> None:
        def hear() -> None:
            self._hub.stay(self.me)
            for handler in self._handlers.get(kind, []):
                handler(member, content)

        self._heard.put(hear)

    def lose(self, member: Member, why: str | None, how: str = "closed") -> None:
        def hear() -> None:
            self._hub.stay(self.me)
            if self._peers.get(member) == "":
                self._peers[member] = how
                for handler in self._on_lost if why else ():
                    handler(member, why or "")

        self._heard.put(hear)

    def tell(self, member: Member, kind: str, **content: Any) -> None:
        self._hub.point(self.me)
        other = self._hub.presences.get(member)
        if other is not None and self._peers.get(member) in ("", "late"):
            other.post(self.me, kind, content)

    def tell_all(self, kind: str, **content: Any) -> None:
        for member in self.members:
            self.tell(member, kind, **content)

    def on(self, kind: str, handler: Callable[[Member, Any], None]) -> None:
        self._handlers.setdefault(kind, []).append(handler)

    def on_lost(self, handler: Callable[[Member, str], None]) -> None:
        self._on_lost.append(handler)

    def seen(self, region: int) -> Seen:
        found = [(member, lost) for member, lost in self._peers.items() if member.region == region]
        return Seen(0.0, 0, 0.0, 0, None, max(found)[1] if found else "")

    def drop(self, member: Member) -> None:
        self._peers[member] = self._peers.get(member) or "dropped"

    def wait_for(self, region: int, what: str) -> None:
        self.awaits, self._since = region, time.monotonic()

    def arrived(self) -> None:
        self.awaits = None

    def waited_s(self) -> float:
        return time.monotonic() - self._since

    def leave_note(self, reason: str) -> None:
        pass

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        return None

    def close(self, reason: str | None = None) -> None:
        self._hub.part(self.me, reason)

    def end(self) -> None:
        self._heard.put(None)

    def _work(self) -> None:
        while (hear := self._heard.get()) is not None:
            try:
                hear()
            except Died:
                return


class FakeWire:
    """`links.wire.Wire` in memory."""

    connections = 2

    def __init__(self, hub: Hub, me: Member) -> None:
        self._hub, self._me = hub, me
        self._pairs: dict[int, Pair] = {}

    @property
    def regions(self) -> list[int]:
        return sorted(self._pairs)

    def connect(self, region: int, key: str, store: Any, claim: Callable[[], bool] = lambda: True) -> None:
        low, high = map(int, key.rpartition("/")[2].split("-"))
        with self._hub.changed:
            self._hub.messages[key, self._me.ticket] = torch.empty(0)
            self._hub.changed.notify_all()
            other = low + high - self._me.ticket
            met = self._hub.changed.wait_for(
                lambda: (key, other) in self._hub.messages or other in self._hub.dead, PATIENCE_S
            )
        if not met or other in self._hub.dead:
            raise LinkError(f"region {region} did not come")
        if not claim():
            raise LinkError(f"region {region} is not wanted any more")
        self._pairs[region] = Pair(region, frozenset((low, high)))

    def drop(self, region: int) -> None:
        self._pairs.pop(region, None)

    def view(self, regions: Collection[int], base_tag: int, label: bytes = b"") -> FakeView:
        missing = set(regions) - {self._me.region} - set(self._pairs)
        if missing:
            raise LinkError(f"no connection to region {missing}")
        pairs = {region: self._pairs[region] for region in regions if region != self._me.region}
        return FakeView(self._hub, self._me, pairs, base_tag)

    def close(self, broken: bool) -> None:
        self._pairs = {}


class FakeView:
    """`links.view.View` in memory."""

    connections, rtt_s, is_limited = 2, 0.0, False

    def __init__(self, hub: Hub, me: Member, pairs: Mapping[int, Pair], base_tag: int) -> None:
        self._hub, self._me = hub, me
        self.regions = sorted((me.region, *pairs))
        self.region, self.num_regions = self.regions.index(me.region), len(self.regions)
        self._pairs = {place: pairs[r] for place, r in enumerate(self.regions) if r != me.region}
        self.others = list(self._pairs)
        self._tag, self._last = base_tag, base_tag + 64
        self._revoked = False

    def tag(self) -> int:
        self._check()
        self._tag += 1
        assert self._tag < self._last
        return self._tag

    def send(self, region: int, payload: Tensor, tag: int, index: int, what: str) -> Pending:
        self._hub.point(self._me)
        pair = self._pairs[region]
        self._check()
        with self._hub.changed:
            key = (pair.members, self._me.ticket, tag, index)
            assert key not in self._hub.messages, "a tag was used twice"
            self._hub.messages[key] = payload.clone()
            self._hub.changed.notify_all()
        return Pending(key, pair, None)

    def receive(self, region: int, buffer: Tensor, tag: int, index: int, what: str) -> Pending:
        self._check()
        pair = self._pairs[region]
        [other] = pair.members - {self._me.ticket}
        return Pending((pair.members, other, tag, index), pair, buffer)

    def wait(self, pending: Iterable[Pending], what: str, patience: Any = None) -> None:
        for each in pending:
            self._hub.point(self._me)
            self._check()
            if patience is not None:
                patience.wait_for(each.pair.region, what)
            if each.buffer is not None:
                self._receive(each, what)
            self._check()
        if patience is not None:
            patience.arrived()

    def begin_swap(self, own: Tensor, what: str) -> Swap:
        tag = self.tag()
        got = {other: torch.empty_like(own) for other in self.others}
        receives: list[Any] = []
        sends: list[Any] = []
        for other in self.others:
            receives.append(self.receive(other, got[other].view(torch.uint8), tag, -1, what))
            sends.append(self.send(other, own.view(torch.uint8), tag, -1, what))
        return Swap([got.get(place, own) for place in range(self.num_regions)], sends, receives)

    def revoke(self) -> None:
        self._revoked = True

    def _receive(self, pending: Pending, what: str) -> None:
        hub, pair = self._hub, pending.pair

        def is_over() -> bool:
            return pending.key in hub.messages or bool(pair.members & hub.dead) or hub.ended

        with hub.changed:
            assert hub.changed.wait_for(is_over, PATIENCE_S), f"{self._me} waits for ever for {what}"
            found = hub.messages.get(pending.key)
        if self._me.ticket in hub.dead:
            raise Died
        self._check()
        if found is None:
            raise RegionLostError(pair.region, f"region {pair.region} closed its connection")
        assert pending.buffer is not None
        pending.buffer.copy_(found)

    def _check(self) -> None:
        if self._revoked or self._hub.ended:
            raise Revoked("the view was revoked")


class Regions:
    """Regions of an elastic run, each in threads of its own.

    Args:
        count: number of regions at the start.
        faults: strike them.
        limit: see `Terms`.
    """

    def __init__(self, count: int, faults: Iterable[Fault] = (), limit: int | None = None) -> None:
        self.hub = Hub(faults)
        self._limit = limit
        members = [self.hub.member(region) for region in range(count)]
        self.first = members
        presences = [FakePresence(self.hub, member) for member in members]
        for index, one in enumerate(presences):
            for other in presences[:index]:
                one.meet(other)
        self.links = [self._link(member, members) for member in members]

    def come_back(self, link: ElasticLink) -> None:
        """Let a process without which the others have gone on be a newcomer."""
        member = self.hub.member(link.region)
        FakePresence(self.hub, member)
        link.part()
        link.begin_again(self.reach(member, None))
        self.hub.links[member] = link

    def newcomer(self, region: int) -> ElasticLink:
        """A process that wants to come in; it has met nobody yet."""
        member = self.hub.member(region)
        FakePresence(self.hub, member)
        return self._link(member, None)

    def reach(self, member: Member, members: Collection[Member] | None) -> Reach:
        wire, presence = FakeWire(self.hub, member), self.hub.presences[member]
        for other in members or ():
            if other != member:
                wire._pairs[other.region] = Pair(other.region, frozenset((member.ticket, other.ticket)))

        def agree(freeze: Callable[[], Report], decided: Callable[[Decision], None]) -> FakeAgreement:
            return FakeAgreement(self.hub, member, freeze, decided)

        return Reach(member, wire, presence, agree, members)  # type: ignore[arg-type]

    def _link(self, member: Member, members: Collection[Member] | None) -> ElasticLink:
        terms = Terms(lambda: None, "run", self._limit)  # type: ignore[arg-type, return-value]
        link = ElasticLink(self.reach(member, members), terms, timeout_s=PATIENCE_S)
        self.hub.links[member] = link
        return link

    def run(self, body: Callable[[int, ElasticLink], T]) -> dict[int, T]:
        """body(region, link) for every region at once; results of the regions that have not died.

        Raises:
            BaseException: the first error of a body.
        """
        found: dict[int, T] = {}
        errors: list[BaseException] = []

        def live(region: int, link: ElasticLink) -> None:
            try:
                result = body(region, link)
                link.close()
                found[region] = result
            except Died:
                pass
            except BaseException as error:
                errors.append(error)
                link.close(str(error))

        threads = [
            threading.Thread(target=live, args=(link.region, link), name=f"region {link.region}", daemon=True)
            for link in self.links
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        stuck = [thread.name for thread in threads if thread.is_alive()]
        self.hub.end()
        if errors:
            raise errors[0]
        assert not stuck, f"{stuck} did not end"
        return found
