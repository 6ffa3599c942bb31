"""Members of a run show each other that they are alive, and tell each other what training must not wait for.

Each pair of members keeps one TCP connection, of its own kind: no training traffic waits on it, and no store. Every second or
so a member tells its inner step and the last operation that it has completed. A connection that closes, or silence, means
that a member is lost. Regions differ in speed: a member that is alive and makes progress is late, not lost. Half-open
connections need no special care: silence counts at both ends.
"""

import logging
import math
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import MeetingError
from .caller import Caller, Member
from .callers import Callers
from .channel import line_of
from .handlers import Handler, Handlers
from .orders import Orders, attempt
from .secret import Keys
from .signs import Patience, Peer, Seen, Waits

logger = logging.getLogger(__name__)

_FAREWELL_S = 1.0
_OWN_PAUSE_S = 1.0


class Presence:
    """This member's connections to all others.

    One thread does all work, whatever the number of members. No call but `connect` and `close` waits.

    Args:
        run: unique to the run (and lane). Connections of other runs are refused.
        me: this member.
        host: address of this machine that the others reach.
        timeout_s: seconds of silence after which a member is lost.
        stuck_timeout_s: a member that is waited for, and alive, but makes no inner step for so many seconds is lost.
        patient: count a member as lost only while it is waited for.
        keys: of the run's secret: processes that do not prove that they have them are refused, and what members tell each other
            cannot be altered. None without a secret.
        encrypt: whether it cannot be read either.

    Attributes:
        me: this member.
        address: where it listens, HOST:PORT.
        inner_step: told to the others.
        done: the last operation that this member has completed; told to the others.
        doing: what it does besides training, in words; told to the others.
        waits: what this member waits for now.
        grace: returns how many seconds a member that is waited for may be late; None for no limit.
        accept: called in presence's thread with the hello of a newcomer (its region, ticket, address, and what it gave to
            `connect`); returns why it is refused, or None. By default all newcomers are refused.

    Raises:
        OSError: `host` is no address of this machine.
    """

    def __init__(
        self,
        run: str,
        me: Member,
        host: str,
        timeout_s: float,
        stuck_timeout_s: float = math.inf,
        *,
        patient: bool = False,
        keys: Keys | None = None,
        encrypt: bool = False,
    ) -> None:
        self.me = me
        self.inner_step = self.done = 0
        self.doing = ""
        self.waits: Waits | None = None
        self.grace: Callable[[], float | None] = lambda: None
        self.accept: Callable[[dict[str, Any]], str | None] = lambda hello: "regions cannot join this run"
        self._patience = Patience(timeout_s, stuck_timeout_s, patient, lambda: self.grace())
        self._period_s = min(timeout_s / 4, 1.0)
        self._peers: dict[Member, Peer] = {}  # replaced, never changed: any thread may read it
        self._dropped: set[Member] = set()
        self._note: str | None = None
        self._handlers = Handlers()
        self._on_lost: list[Callable[[Member, str], None]] = []
        self._changed = threading.Condition()
        self._asleep_s = 0.0
        self._warned_at = self._beat_at = 0.0
        self._closes_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._orders = Orders(self._selector)
        self._callers = Callers(
            *(run, me, host, self._selector, self._knows, lambda h: self.accept(h), self._adopt),
            *(keys, encrypt),
        )
        self.address = self._callers.address
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-presence", daemon=True)
        self._thread.start()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members that are connected now, without this one."""
        return tuple(sorted(peer.member for peer in self._peers.values() if peer.ended_at is None))

    @property
    def known(self) -> tuple[Member, ...]:
        """All other members that have ever been connected, but those that were dropped or left in good order."""
        return tuple(sorted(peer.member for peer in self._peers.values() if peer.word != "closed"))

    def connect(
        self, peers: Mapping[Member, str], deadline: float, hello: Mapping[str, Any] | None = None
    ) -> None:
        """Connect to members at their addresses. A newcomer calls all; of two members, the one with the larger ticket calls.

        Args:
            peers: addresses of members, HOST:PORT. This member itself may be among them.
            deadline: on the monotonic clock.
            hello: of a newcomer, told to members that do not know it yet; None for a member.

        Raises:
            MeetingError: a member refuses this one.
            RegionLostError: a member was not reached by the deadline.
        """
        wanted = {member: address for member, address in peers.items() if member != self.me}
        refused: dict[Member, str] = {}
        self._orders.give(lambda: self._callers.expect(wanted, hello, refused))
        try:
            with self._changed:
                while missing := sorted(wanted.keys() - self._peers.keys()):
                    for member, why in list(refused.items()):
                        raise MeetingError(f"region {member.region} refuses region {self.me.region}: {why}")
                    if time.monotonic() >= deadline:
                        raise self._callers.not_reached(missing[0], wanted[missing[0]])
                    self._changed.wait(0.1)
        finally:
            self._orders.give(lambda: self._callers.give_up(wanted))

    def tell(self, member: Member, kind: str, **content: Any) -> None:
        """Send a message. It is lost if the member is."""
        self._orders.give(partial(self._write, member, line_of({"kind": kind, **content})))

    def tell_all(self, kind: str, **content: Any) -> None:
        """Send a message to all members that are connected now."""
        line = line_of({"kind": kind, **content})
        for member in self.members:
            self._orders.give(partial(self._write, member, line))

    def on(self, kind: str, handler: Handler) -> None:
        """Call handler(member, content) in presence's thread for each message of this kind. It must return at once.

        The first handler of a kind is also called for what came before; but not of "connected" (its hello; the connection is
        complete), "alive" and "note", which are kinds of ours, as are "left" and "closed" (last words).
        """
        self._orders.give(partial(self._handlers.on, kind, handler))

    def on_lost(self, handler: Callable[[Member, str], None]) -> None:
        """Call handler(member, why) in presence's thread, once for each member that is lost. It must return at once.

        Before there is a handler nobody is lost. A member that is silent, stuck or late stays connected until `drop`: it may
        still have something to say.
        """
        self._on_lost.append(handler)

    def seen(self, region: int) -> Seen | None:
        """What is known of a region; None if it has never been connected."""
        return None if (peer := self._of(region)) is None else peer.seen(self._now())

    def leave_note(self, reason: str) -> None:
        """Tell all members why this region is about to leave; they may quote it."""
        self._note = reason
        self.tell_all("note", text=reason)

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        """The note that a region has left, if any; also after it has gone.

        A note may arrive after the transfer, or the closed connection, that tells of its region's end: wait so long for it.
        """
        deadline = time.monotonic() + wait_s
        while True:
            note = self._note if region == self.me.region else getattr(self._of(region), "note", None)
            if note is not None or time.monotonic() >= deadline:
                return note
            time.sleep(0.02)

    def wait_for(self, region: int, what: str) -> None:
        """Watch `region` until `arrived` is called. Messages call the awaited transfer `what`."""
        if self.waits is None or self.waits[:2] != (region, what):
            self.waits = Waits(region, what, self._now())

    @property
    def awaits(self) -> int | None:
        """The region that is watched; None if there is none."""
        return None if (waits := self.waits) is None else waits.region

    def arrived(self) -> None:
        """End the watch: the awaited transfer is here."""
        self.waits = None

    def waited_s(self) -> float:
        """Seconds since the watch began; 0 without one."""
        return 0.0 if (waits := self.waits) is None else self._now() - waits.since

    def drop(self, member: Member) -> None:
        """Close the connection to a member, after what it was told before, and forget the member for ever."""
        self._orders.give(lambda: self._drop(member))

    def close(self, reason: str | None = None) -> None:
        """Leave: in good order, or for `reason`. The others hear of it, if they listen within a second."""
        if self._closes_at is None:
            if reason is not None:
                self.leave_note(reason)
            self.tell_all("closed" if reason is None else "left")
            self._orders.give(self._begin_to_close)
        self._thread.join(2 * _FAREWELL_S)

    def _now(self) -> float:
        """A clock that stands still while this process does: others do not become late by that."""
        return time.monotonic() - self._asleep_s

    def _of(self, region: int) -> Peer | None:
        """The newest member of a region."""
        found = [peer for peer in self._peers.values() if peer.member.region == region]
        return max(found, key=lambda peer: peer.member.ticket, default=None)

    def _work(self) -> None:
        looked_at = time.monotonic()
        while self._closes_at is None or (self._callers.some_leave and time.monotonic() < self._closes_at):
            ready = self._selector.select(self._period_s / 2)
            pause_s = time.monotonic() - looked_at - self._period_s
            if pause_s > _OWN_PAUSE_S:
                self._asleep_s += pause_s
            looked_at = time.monotonic()
            for key, events in ready:
                if isinstance(key.data, Peer):
                    attempt(self._serve, key.data, events)
                elif key.data is not self._orders:
                    attempt(self._callers.serve, key.data, events)
            self._orders.carry_out()
            attempt(self._callers.look_after)
            for peer in self._peers.values():
                attempt(self._watch, peer)
            self._warn()
            self._beat()
        self._callers.close()
        self._selector.close()
        self._orders.close()

    def _serve(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_READ:
            for message in peer.channel.read():
                self._hear(peer, message)
        if events & selectors.EVENT_WRITE:
            peer.channel.flush()
        self._settle(peer)

    def _settle(self, peer: Peer) -> None:
        """Wait for what the connection needs next, or close it if the other end has."""
        if peer.ended_at is not None or peer.member in self._dropped:
            return
        if peer.channel.ended:
            peer.ended_at = self._now()
            self._selector.unregister(peer.channel.socket)
            peer.channel.close()
        else:
            writes = 0 if peer.channel.unsent_since is None else selectors.EVENT_WRITE
            self._selector.modify(peer.channel.socket, selectors.EVENT_READ | writes, peer)

    def _hear(self, peer: Peer, message: dict[str, Any]) -> None:
        kind = message.pop("kind", None)
        peer.hear(kind, message, self._now(), self.inner_step)
        self._call(kind, peer.member, message)

    def _call(self, kind: Any, member: Member, content: dict[str, Any]) -> None:
        if isinstance(kind, str):
            self._handlers.call(kind, member, content, keep=kind not in ("alive", "note", "connected"))

    def _watch(self, peer: Peer) -> None:
        """See whether a member is lost, and tell of it."""
        loss = (
            None if peer.lost or not self._on_lost else self._patience.loss_of(peer, self.waits, self._now())
        )
        if loss is not None and self._closes_at is None:
            peer.lost = loss.how
            for handler in self._on_lost:
                attempt(handler, peer.member, loss.why)

    def _warn(self) -> None:
        """Say from time to time whom this member waits for."""
        waits, now = self.waits, self._now()
        peer = None if waits is None else self._of(waits.region)
        if waits is None or peer is None or peer.lost:
            return
        if now - max(waits.since, self._warned_at) > self._patience.timeout_s:
            self._warned_at = now
            logger.warning(
                "region %d has waited %.0f s for region %d (%s). Region %d is alive, at step %s.",
                *(self.me.region, now - waits.since, waits.region, waits.what, waits.region, peer.inner_step),
            )

    def _beat(self) -> None:
        if self._closes_at is not None or time.monotonic() - self._beat_at < self._period_s:
            return
        self._beat_at = time.monotonic()
        for peer in self._peers.values():
            if peer.channel.unsent_since is None:  # else it does not read the signs it has
                self._write(peer.member, self._sign())

    def _sign(self) -> bytes:
        said = {"step": self.inner_step, "done": self.done, "awaits": self.awaits, "doing": self.doing}
        return line_of({"kind": "alive", **said})

    def _write(self, member: Member, line: bytes) -> None:
        peer = self._peers.get(member)
        if peer is not None and peer.ended_at is None and self._closes_at is None:
            peer.channel.write(line)
            self._settle(peer)

    def _knows(self, member: Member) -> bool:
        return member in self._peers or member in self._dropped

    def _adopt(self, caller: Caller, hello: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """A connection is complete, with a member that we expected or accepted."""
        assert caller.member is not None
        now = self._now()
        peer = Peer(caller.member, caller.channel, heard_at=now, moved_at=now)
        self._selector.modify(peer.channel.socket, selectors.EVENT_READ, peer)
        self._peers = {**self._peers, peer.member: peer}
        self._write(peer.member, self._sign())
        if self._note is not None:
            self._write(peer.member, line_of({"kind": "note", "text": self._note}))
        self._call("connected", peer.member, hello)
        for message in messages:
            self._hear(peer, message)
        with self._changed:
            self._changed.notify_all()

    def _drop(self, member: Member) -> None:
        self._dropped.add(member)
        peer = self._peers.get(member)
        self._peers = {each: kept for each, kept in self._peers.items() if each != member}
        if peer is not None and peer.ended_at is None:
            self._callers.part_with(peer.channel)

    def _begin_to_close(self) -> None:
        for member in self.members:
            self._callers.part_with(self._peers[member].channel)
        self._closes_at = time.monotonic() + _FAREWELL_S
