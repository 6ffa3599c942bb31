"""What a process is to an elastic run: a member, a newcomer, or left behind; and how it becomes one from the other.

A newcomer has a ticket that no other process of the run has. It loads a base (a checkpoint of a member), follows the log of
that member, and says "ready" when it is less than one interval behind. Members that are connected to it admit it with their
trailers. If all trailers of a transfer admit the same ticket, the newcomer is a member from the step after its landing on.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ..errors import LinkError
from ..meeting.presence import Member
from ..meeting.verdict import Decision, Report
from .base import Arrival
from .following import Following
from .log import Epoch, Item, Marker, Sink, Sinks
from .op import Op
from .ops import Ops, left_behind
from .pairing import Pairing
from .roster import RollCall, Roster
from .terms import AUTO_GRACE_S, Events, Reach, State, Terms

logger = logging.getLogger(__name__)


class Membership:
    """What one process is to the run, from its start or its coming back until it is left behind.

    Args:
        reach: how it reaches the others.
        terms: of the run.
        sinks: take the log.
        events: receives what happens.

    Attributes:
        state: what it is now.
        ops: its calls.
        following: the log that it follows, or has followed; None if there is none.
        step: inner steps made so far.
    """

    def __init__(self, reach: Reach, terms: Terms, sinks: Sinks, events: Events) -> None:
        self.me, self.wire, self.presence = reach.me, reach.wire, reach.presence
        self._terms, self._sinks, self._events = terms, sinks, events
        self.state = State.JOINING if reach.members is None else State.MEMBER
        self.ops = Ops(self.me, self.wire, self.presence, self._lose, self._retried)
        self.following: Following | None = None
        self.step = 0
        self._roster = Roster(reach.members or (), limit=terms.limit)
        self._marker: Marker | None = None
        self._has_moved = False
        self._whys: dict[Member, str] = {}
        self._pairing = Pairing(reach, terms, lambda member: self._roster.paired(member))
        presence = self.presence
        presence.grace, presence.accept = self._grace, self._refusal
        presence.on_lost(self._missed)
        presence.on("connected", lambda member, hello: self._roster.came(member))
        presence.on("ready", lambda member, content: self._roster.ready(member))
        presence.on("closed", lambda member, content: self._closed(member))
        self._agreement = reach.agree(self._freeze, self._decided)

    @property
    def members(self) -> tuple[Member, ...]:
        """Who takes part, as far as this process knows now; itself in any case."""
        found = (
            self._marker.members if self.state is State.FOLLOWING and self._marker else self._roster.members
        )
        return tuple(sorted({self.me, *(each for each in found if each.ticket not in self.ops.lost)}))

    @property
    def epoch(self) -> Epoch:
        """Who takes part, and the number of changes of that so far.

        Two members may see a loss and an arrival in another order: only the number and `ops.losses` together say who takes part.
        """
        return Epoch(self.changes + self.ops.losses, tuple(member.region for member in self.members))

    @property
    def roster(self) -> tuple[Member, ...]:
        """Who takes part in calls that are made now; lost members may still be among them."""
        return self._roster.members

    @property
    def changes(self) -> int:
        """Members that have come in or left so far."""
        return self._roster.changes

    @property
    def admits(self) -> int:
        """The ticket of a newcomer that may come in; 0 if there is none."""
        return self._roster.admits(self.ops.lost) if self.state is State.MEMBER else 0

    @property
    def is_leaving(self) -> bool:
        """Whether this member is none from the next inner step on."""
        return self._roster.is_leaving(self.me.region)

    @property
    def strangers(self) -> list[Member]:
        """Members at the last marker to which this newcomer is not connected: they came in after it had asked."""
        if self._marker is None or self.state is State.MEMBER:
            return []
        reached = {member for member in self.presence.members if self._pairing.has(member)}
        there = (member for member in self._marker.members if member.ticket not in self.ops.lost)
        return [member for member in there if member != self.me and member not in reached]

    def tick(self, inner_step: int) -> None:
        """An inner step has ended, and with it the events of the one before."""
        self.presence.inner_step = inner_step
        if self.state is State.MEMBER:
            admitted = self._switch()
            if self._has_moved or admitted:
                self._has_moved = False
                self._sinks.write(partial(self._mark, self._roster.members, admitted))
        self.step = inner_step

    def landed(self, arrival: Arrival) -> None:
        """A transfer has landed."""
        if self.state is State.MEMBER:
            self._roster.landed(arrival.members, arrival.trailers, arrival.changes)
            self._has_moved = True

    def called(self, parties: tuple[Member, ...], said: Sequence[RollCall]) -> tuple[Member, ...]:
        """A roll call has ended: members come in and leave at once. Returns who takes part now, the same in all members."""
        if self.state is not State.MEMBER:
            return parties
        self._roster.called([member.region for member in parties], said)
        admitted = self._switch()
        came = [member for member in self._roster.members if member.ticket in admitted]
        stay = [member for member, each in zip(parties, said, strict=True) if not each.leaves]
        present = tuple(sorted({*stay, *came}))
        self._has_moved = False
        self._sinks.write(partial(self._mark, present, admitted, held=True))
        return present

    def log_to(self, sink: Sink) -> None:
        """Give `sink` the log from now on: first a marker of this step, then what follows."""
        self._sinks.add(sink, self.ops.submitted + 1, self._mark(self._roster.members, ()))

    def pair_with(self, members: Iterable[Member]) -> None:
        """Make the connections for transfers with members that this newcomer sees; blocks.

        Raises:
            LinkError: they could not be made in time.
        """
        self._pairing.make(members)

    def follow(self, source: Iterable[Item]) -> None:
        """Answer calls from a log. The base is loaded."""
        if self.following is not None:
            self.following.fail(LinkError("this region follows the log of another member now."))
        self.following = Following(source, self._without_log)
        self.state = State.FOLLOWING

    def apply(self, marker: Marker) -> bool:
        """Note that all inner steps up to a marker are made. Returns whether this process is a member from now on.

        Raises:
            LeftBehind: members have let it in, and have missed it since.
        """
        if self.state is State.OUT:
            raise left_behind(self.me.region)
        assert self.following is not None and self.state is State.FOLLOWING
        self._marker = marker
        self.ops.lost |= frozenset(marker.lost)
        self.ops.losses = max(self.ops.losses, marker.losses)
        self._agreement.expect(marker.losses)
        self.following.skip(marker.submitted)
        if self.me.ticket not in marker.admitted:
            if not self.strangers:
                self.presence.tell_all("ready")
            return False
        self.ops.begin_after(marker.submitted)
        self._roster = Roster(marker.members, marker.number - marker.losses, self._terms.limit)
        self.state = State.MEMBER
        self._tell_epoch(f"region {self.me.region} has come in")
        return True

    def close(self, reason: str | None, timeout_s: float) -> None:
        """Leave the run, for a reason or in good order: then wait for calls in progress."""
        has_ended = self.state is State.MEMBER and reason is None and self.ops.close(timeout_s)
        if not has_ended:
            self.ops.fail(LinkError("the link is closed."))
            if reason is None and self.state is State.MEMBER:
                reason = f"calls of region {self.me.region} had not ended after {timeout_s:g} s"
        self._end(reason)
        self.wire.close(broken=not has_ended)

    def part(self, reason: str) -> None:
        """Leave the run at once, because this process comes back as another member.

        A process may come back often: its connections are closed, each as soon as no thread of ours waits there any more. The
        others close their ends when they hear that this member is lost, and thereby wake up such a thread.
        """
        self.ops.fail(LinkError("the link is closed."))
        self._end(reason)
        for region in self.wire.regions:
            self.wire.drop(region)

    def _end(self, reason: str | None) -> None:
        self._pairing.end()
        if self.following is not None:
            self.following.fail(LinkError("the link is closed."))
        self._agreement.close()
        self.presence.close(reason)

    def _switch(self) -> tuple[int, ...]:
        """Let members come in and leave, as the trailers of the step that ends have said. Returns the tickets that came in."""
        found = self._roster.apply(self.ops.lost)
        if ("left", self.me) in found:
            self.ops.last = self.ops.submitted
        for kind, member in found:
            facts = {"step": self.step, "epoch": self.epoch.number, "region": member.region}
            self._events.append(
                (kind, facts if kind == "join" else {**facts, "why": "it has left in good order"})
            )
        # a region that leaves does not see what follows
        if found and ("left", self.me) not in found:
            words = {"join": "has come in", "left": "has left in good order"}
            why = ", ".join(f"region {member.region} {words[kind]}" for kind, member in found)
            self._tell_epoch(why, step=self.step)
        return tuple(member.ticket for kind, member in found if kind == "join")

    def _mark(self, members: tuple[Member, ...], admitted: tuple[int, ...], held: bool = False) -> Marker:
        ops = self.ops
        number = self.changes + ops.losses
        return Marker(
            self.step, ops.submitted, number, ops.losses, members, tuple(sorted(ops.lost)), admitted, held
        )

    def _tell_epoch(self, why: str, **facts: int) -> None:
        number, members = self.epoch
        told = {"epoch": number, "losses": self.ops.losses, "members": list(members), "why": why}
        self._events.append(("epoch", {**told, **facts}))
        logger.info("epoch %d: regions %s (%s)", number, ", ".join(map(str, members)), why)

    def _lose(self, member: Member, why: str) -> None:
        self._whys.setdefault(member, why)
        self._agreement.begin({member: why})

    def _missed(self, member: Member, why: str) -> None:
        """Presence has lost a member or a newcomer."""
        if self._roster.has(member) and member.ticket not in self.ops.lost:
            self._lose(member, why)
        else:
            self._forget(member)

    def _closed(self, member: Member) -> None:
        """A process has ended in good order. A newcomer that could not come in does so, and the next one has its number."""
        if not self._roster.has(member):
            self._forget(member)

    def _forget(self, member: Member) -> None:
        self._roster.gone(member)
        self.presence.drop(member)

    def _freeze(self) -> Report:
        done, has = self.ops.freeze()
        is_member = self.state is State.MEMBER
        return Report(
            number=self.ops.losses,
            member=self.me,
            first=self.ops.first if is_member else 0,
            last=self.ops.last,
            done=done,
            has=has,
            members=self.members if is_member else (),
        )

    def _decided(self, decision: Decision) -> None:
        if decision.number < self.ops.losses:
            self.ops.thaw()
            return
        lost = [member for member in decision.lost if member.ticket not in self.ops.lost]
        # asked first: afterwards, another process of the region may be there
        late = [m for m in lost if (seen := self.presence.seen(m.region)) and seen.lost == "late"]
        for member in lost:
            self.wire.drop(member.region)
        tickets = [member.ticket for member in lost]
        if self.me in lost or not self.ops.decided(decision.number, decision.done, tickets):
            self._fall_out(left_behind(self.me.region))
            return
        for member in lost:
            if member in late:
                facts = {"epoch": self.epoch.number, "region": member.region}
                self._events.append(("late", {**facts, "why": self._whys.get(member, "it was late")}))
            self.presence.drop(member)
        self._has_moved = True
        if self.state is State.MEMBER:
            self._tell_epoch(self._lost_in_words(lost))

    def _lost_in_words(self, lost: Iterable[Member]) -> str:
        return "; ".join(
            f"region {member.region} is lost: {self._whys.get(member, 'another region misses it')}"
            for member in lost
        )

    def _fall_out(self, error: BaseException) -> None:
        """The others have gone on without this process, or it can no longer go on with them: all its calls end."""
        self.state = State.OUT
        self.ops.fail(error)
        if self.following is not None:
            self.following.fail(error)

    def _without_log(self, error: BaseException) -> BaseException:
        """The log has ended, and a call waits for its entry. A member has no other way to get this result."""
        if self.state is State.MEMBER:
            error = left_behind(
                self.me.region, f"it has not received all that was sent before it came in: {error}"
            )
            self._fall_out(error)
        return error

    def _retried(self, op: Op) -> None:
        members = [member.region for member in op.parties if member.ticket not in self.ops.lost]
        facts = {"epoch": op.changes + self.ops.losses, "op": op.number, "what": op.what, "members": members}
        lost = [member for member in op.parties if member.ticket in self.ops.lost]
        self._events.append(("retry", {**facts, "why": self._lost_in_words(lost)}))

    def _grace(self) -> float | None:
        """Seconds for which presence may wait for a member, from the beginning of that wait."""
        grace_s = self._terms.grace_s
        if grace_s is None or isinstance(grace_s, float | int):
            return grace_s
        awaited_s = self.ops.awaited_s()
        return None if awaited_s is None else self.presence.waited_s() - awaited_s + AUTO_GRACE_S

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        """Why a newcomer must not connect; None if it may."""
        if self.state is not State.MEMBER:
            return f"region {self.me.region} is no member itself"
        if hello["ticket"] in {0, *self.ops.lost}:
            return f"ticket {hello['ticket']} is of no process that may come in: start it again"
        return self._roster.refuses(int(hello["region"]), self.ops.lost)
