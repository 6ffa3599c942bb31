"""What a region does with its calls, with what its coordinator says, and with its connections: a pure function.

No sockets, threads or clocks: `tcp` executes the effects, and the simulation does, too.

Members make the same calls in the same order; one is in hand at a time. A call completes once all its members say that they
hold its result ("have"). If a member is lost before that, everybody freezes and reports, the coordinator decides which calls
stand, and all later ones are void: they are made again, from their start and without the lost members. So a call counts in all
members or in none. Where a lost region ends the run (`Terms.is_open`), the others so hold the same when they end.

Changes (regions that come in or leave) are numbered by the coordinator. Each trailer tells how many its region knows. A change
counts from the step after the landing of the first transfer in which all trailers know it: all members change at the same step.

Processes connect to each other in pairs. A connection that does not come about is tried again as long as it is wanted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..coordinator.messages import (
    Announce,
    Ask,
    Decided,
    FromRegion,
    Gone,
    Hears,
    Here,
    Noted,
    Paired,
    Place,
    Refuse,
    Report,
    Resumed,
    Suspect,
    ToRegion,
    Waiting,
)
from ..errors import LeftBehind, LinkError, RegionLostError, RunFinished, RunOver
from ..net.members import Member
from .part import Call, Part, Standing

_OVER: Mapping[str, type[LinkError]] = {each.__name__: each for each in (RunOver, RunFinished)}
_CLOSED_S = 5.0
"""The coordinator may lose a process so much earlier than the others do."""
_RETURN_S = 5.0
"""A restarted router breaks all connections of a region at once. The region has so long to call the coordinator again: it
notices the break with its next heartbeat."""
LATE = "it was late, or they could not reach it"


# ---- events -------------------------------------------------------------------------------------------------------


class Event:
    """What may happen."""


@dataclass(frozen=True)
class Made(Event):
    """The training loop has made a call."""

    what: str


@dataclass(frozen=True)
class Held(Event):
    """This process holds the result of an attempt."""

    number: int
    losses: int


@dataclass(frozen=True)
class AllHeld(Event):
    """All parties of an attempt have said that they hold its result."""

    number: int
    losses: int


@dataclass(frozen=True)
class Missed(Event):
    """A member is lost, as far as an attempt shows."""

    number: int
    losses: int
    member: Member
    why: str


@dataclass(frozen=True)
class HeardFrom(Event):
    """The coordinator has said something. `awaits`: for which region the attempt in hand waits. `now`: see `awake_s`."""

    message: ToRegion
    awaits: int | None = None
    now: float = 0.0


@dataclass(frozen=True)
class Away(Event):
    """The connection to the coordinator has ended."""


@dataclass(frozen=True)
class Waited(Event):
    """Time has passed: since the attempt in hand waits for region `awaits`, since a loss waits and nobody decides it, and since
    there is no coordinator that decides.
    """

    awaits: int | None
    waited_s: float
    undecided_s: float
    away_s: float


@dataclass(frozen=True)
class Connected(Event):
    """A connection that is wanted is there."""

    member: Member


@dataclass(frozen=True)
class NotConnected(Event):
    """A connection has not come about in time."""

    member: Member
    why: str


@dataclass(frozen=True)
class Failed(Event):
    """This process cannot go on."""


@dataclass(frozen=True)
class Landed(Event):
    """A transfer has landed: all its trailers know the changes up to `known`; `changes` of them counted when it was sent."""

    known: int
    changes: int


@dataclass(frozen=True)
class Ticked(Event):
    """An inner step has ended, with all its events."""


@dataclass(frozen=True)
class Followed(Event):
    """The base is loaded: calls are answered from the log of a member from now on."""


@dataclass(frozen=True)
class Marked(Event):
    """A newcomer has made all inner steps up to a marker of the log that it follows. The values are those of the members.

    `members` take part from the next step on; `is_in`: this process is one of them. `submitted`: calls that they had made.
    """

    submitted: int
    changes: int
    losses: int
    lost: tuple[int, ...]
    members: tuple[Member, ...]
    is_in: bool


@dataclass(frozen=True)
class Led(Event):
    """The leader of this region has made calls alone, for all ranks, up to this number."""

    number: int


@dataclass(frozen=True)
class NoMoreCalls(Event):
    """No further call will be made."""


# ---- effects ------------------------------------------------------------------------------------------------------


class Effect:
    """What is to be done."""


@dataclass(frozen=True)
class Begin(Effect):
    """Begin an attempt of a call."""

    number: int
    losses: int
    parties: tuple[Member, ...]


@dataclass(frozen=True)
class Complete(Effect):
    """The result of a call counts."""

    call: Call


@dataclass(frozen=True)
class Abandon(Effect):
    """The attempt in hand is void: nobody waits for it any more."""


@dataclass(frozen=True)
class Again(Effect):
    """A call is made again, without members that were lost."""

    call: Call


@dataclass(frozen=True)
class Tell(Effect):
    """Tell a message to the coordinator."""

    message: FromRegion


@dataclass(frozen=True)
class HangUp(Effect):
    """End the connection to this coordinator, and call again."""

    why: str


@dataclass(frozen=True)
class Connect(Effect):
    """Connect to a process. `again`: that has failed a moment ago."""

    member: Member
    again: bool = False


@dataclass(frozen=True)
class Disconnect(Effect):
    """Close the connections to a process."""

    member: Member


@dataclass(frozen=True)
class Drop(Effect):
    """A member is lost."""

    member: Member
    why: str
    is_late: bool = False


@dataclass(frozen=True)
class Switched(Effect):
    """Members have come in and left, from the next step on."""

    joined: tuple[Member, ...]
    left: tuple[Member, ...]


@dataclass(frozen=True)
class Fail(Effect):
    """No call of this process will complete. `member`: who is lost, where nobody has decided it."""

    error: type[LinkError]
    why: str
    member: Member | None = None


def step(state: Part, event: Event) -> tuple[Part, tuple[Effect, ...]]:
    """The next state, and what is to be done, in order."""
    work = _MemberWork(state)
    if isinstance(event, HeardFrom) and isinstance(
        event.message, Noted
    ):  # also after the end: it may tell the reason
        work.change(notes={**state.notes, event.message.region: event.message.text})
    elif state.standing is not Standing.OUT:
        work.take(event)
        work.proceed()
    return work.state, tuple(work.effects)


def why_lost(
    part: Part, other: Member, broken_at: float, is_refused: bool, is_closed: bool, now: float
) -> Literal["died", "unreachable"] | None:
    """Why a process is lost whose connections broke at `broken_at` and have not come back; None while they may.

    `is_refused`: whether its machine refuses new ones, or a router or proxy before it: that alone says nothing of the process.
    `is_closed`: whether it has closed one of the broken ones in good order, and not reset it, as far as this process has seen.
    """
    closed_at = part.closed.get(other, -math.inf)
    if is_refused and is_closed:  # the system of a killed process resets a connection that has unread bytes
        closed_at = max(closed_at, part.cut.get(other, -math.inf))
    if closed_at >= broken_at - _CLOSED_S and (is_refused or now - max(broken_at, closed_at) > _RETURN_S):
        return "died"
    return "unreachable" if now - broken_at > part.terms.timeout_s else None


class _MemberWork:
    """One step: the state as it changes, and the effects so far."""

    def __init__(self, state: Part) -> None:
        self.state = state
        self.effects: list[Effect] = []

    def take(self, event: Event) -> None:
        state = self.state
        match event:
            case Made(what=what):
                number = state.submitted + 1
                call = Call(number=number, what=what, members=state.roster, changes=state.changes)
                self.change(submitted=number, calls=(*state.calls, call))
            case Held(number=number, losses=losses):
                if self.is_in_hand(number, losses):
                    self.head(has=True)
            case AllHeld(number=number, losses=losses):
                if self.is_in_hand(number, losses) and state.calls[0].has:
                    self.complete()
            case Missed(number=number, losses=losses, member=member, why=why):
                if self.is_in_hand(number, losses) and member in state.calls[0].parties:
                    self.miss(member, why)
            case HeardFrom(message=message, awaits=awaits, now=now):
                if self.heeds(message):
                    self.hear(message, awaits, now)
            case Away():
                self.change(answers=False, undecided="", cut={})
            case Waited():
                self.waited(event)
            case Connected(member=member):
                self.connected(member)
            case NotConnected(member=member, why=why):
                self.not_connected(member, why)
            case Failed():
                self.leave()
            case Landed(known=known, changes=changes):
                if state.standing is Standing.MEMBER and changes == state.changes:
                    self.change(due=max(state.due, min(known, state.knows)))
            case Ticked():
                if state.standing is Standing.MEMBER:
                    self.switch()
            case Followed() if state.standing is Standing.JOINING:
                self.change(standing=Standing.FOLLOWING)
            case Marked():
                self.marked(event)
            case Led(number=number) if state.standing is Standing.MEMBER and not state.calls:
                self.change(submitted=number, done=number)
            case NoMoreCalls():
                self.change(last=state.submitted)

    def proceed(self) -> None:
        """Begin the call that is next, or complete one that stands."""
        while not self.state.frozen and self.state.calls and self.state.standing is Standing.MEMBER:
            state, call = self.state, self.state.calls[0]
            if call.stands:
                self.complete()
            elif call.begun:
                return
            else:
                parties = state.without_lost(call.members)
                self.head(begun=True, parties=parties, losses=state.losses)
                self.effects.append(Begin(call.number, state.losses, parties))

    # -- the coordinator

    def heeds(self, message: ToRegion) -> bool:
        """Whether a message counts: one of an older coordinator does not, nor of a second one with a copy of its file."""
        generation = getattr(message, "generation", None)
        counts = self.state.generation
        if generation is None or generation == counts:
            return True
        if generation.number <= counts.number:
            which = "an older one" if generation.number < counts.number else "a second one"
            why = f"{which} has answered: its generation is {generation.number}, and another {counts.number} counts"
            self.effects.append(HangUp(why))
            return False
        self.change(generation=generation)
        return True

    def hear(self, message: ToRegion, awaits: int | None, now: float) -> None:
        state = self.state
        match message:
            case Ask(number=number) if number == state.losses:
                self.freeze()
                self.report()
            case Decided():
                self.decided(message)
            case Announce(change=change):
                newest = state.announced[-1].number if state.announced else state.changes
                # the log tells a newcomer of all changes before those that it hears of
                if change.number == newest + 1 or (
                    change.number > newest and state.standing is not Standing.MEMBER
                ):
                    self.change(announced=(*state.announced, change))
            case Suspect():
                self.suspect(message, awaits)
            case Hears(member=member, hears=hears, cut=cut):
                closed, cuts = (
                    {each: at for each, at in known.items() if each != member}
                    for known in (state.closed, state.cut)
                )
                if not hears and not cut:
                    closed[member] = now
                elif not hears and state.answers:  # one that has just come back waits for all
                    cuts[member] = now
                self.change(closed=closed, cut=cuts)
            case Waiting(why=why):
                self.change(answers=False, undecided=why)
            case Resumed():
                self.change(answers=True, undecided="")
                for other in state.paired.values():  # it may have forgotten
                    self.effects.append(Tell(Paired(member=other)))
                if state.frozen:
                    self.report()
            case Here(place=place):
                self.meet(place)
            case Gone(member=member):
                self.change(gone=state.gone | {member})
                self.disconnect(member)
            case Refuse(error=kind, why=why):
                if kind == "RunOver" and not state.terms.is_open:  # it needs no coordinator before a loss
                    self.change(answers=False, undecided=why)
                else:
                    self.fail(_OVER.get(kind, LeftBehind), why)

    def suspect(self, suspect: Suspect, awaits: int | None) -> None:
        """A member for which this one waits seems to be lost. It is only if this one still waits for it."""
        state, call, member = self.state, self.state.in_hand, suspect.member
        if call is None or call.number != suspect.op or awaits != member.region or member not in call.parties:
            return
        if suspect.how == "late":
            self.change(late=state.late | {member})
        self.miss(member, suspect.why)

    def waited(self, waited: Waited) -> None:
        """Give up in the end, without a coordinator that decides who is lost."""
        state, terms, call = self.state, self.state.terms, self.state.in_hand
        if state.answers:
            return
        limit, limit_s, for_s = (
            ("wait_s", terms.wait_s, waited.undecided_s)
            if terms.is_open
            else ("timeout_s", terms.timeout_s, waited.away_s)
        )
        if state.frozen and for_s > limit_s:
            said = "answered" if not state.undecided else "decided"
            way_out = (
                f"{state.undecided.rstrip('. ')}. Start all regions again with --resume."
                if state.undecided
                else "Start it again with its state file, then all regions with --resume."
            )
            saves = (
                ""
                if terms.is_open
                else " It saves no checkpoint of this step: others may hold other results."
            )
            lost = min(state.missed, default=None)
            known = (
                "" if lost is None else f"region {lost.region} is lost ({state.missed[lost].rstrip('. ')}). "
            )
            self.fail(
                LinkError if lost is None else RegionLostError,
                f"{known}Region {state.me.region} waits to hear who goes on after a loss, and the coordinator has not {said} for "
                f"{for_s:.0f} s (regions.{limit}={limit_s:g}): {way_out}{saves}",
                lost,
            )
        if call is None or waited.waited_s <= terms.stuck_timeout_s:
            return
        for member in call.parties:
            if member.region == waited.awaits:
                why = f"it sent nothing for {waited.waited_s:.0f} s while region {state.me.region} waited for {call.what}"
                self.miss(member, why)

    # -- connections

    def meet(self, place: Place) -> None:
        """A newcomer is to be connected. The coordinator may say so again."""
        state, newcomer = self.state, place.member
        if newcomer == state.me:
            return
        self.change(lanes={**state.lanes, newcomer: place.lanes})
        if state.is_paired(newcomer):
            self.effects.append(Tell(Paired(member=newcomer)))
        elif newcomer not in state.meeting and self.state.wants(newcomer):
            earlier = state.paired.get(newcomer.region)
            if earlier is not None:  # it has left
                self.disconnect(earlier)
            self.change(
                notes={region: text for region, text in state.notes.items() if region != newcomer.region}
            )
            self.connect(newcomer)

    def connect(self, other: Member, again: bool = False) -> None:
        self.change(meeting=self.state.meeting | {other})
        self.effects.append(Connect(other, again))

    def connected(self, other: Member) -> None:
        state = self.state
        self.change(
            paired={**state.paired, other.region: other},
            meeting=state.meeting - {other},
            unpaired={each: why for each, why in state.unpaired.items() if each != other},
        )
        self.effects.append(Tell(Paired(member=other)))

    def not_connected(self, other: Member, why: str) -> None:
        state = self.state
        self.change(meeting=state.meeting - {other}, unpaired={**state.unpaired, other: why})
        if self.state.wants(other):
            self.connect(other, again=True)

    def disconnect(self, member: Member) -> None:
        state = self.state
        if state.is_paired(member):
            self.change(paired={region: each for region, each in state.paired.items() if each != member})
            self.effects.append(Disconnect(member))

    # -- losses

    def is_in_hand(self, number: int, losses: int) -> bool:
        """Whether this is the attempt in hand; one that was abandoned is none."""
        call = self.state.in_hand
        return call is not None and (call.number, call.losses) == (number, losses)

    def complete(self) -> None:
        call, *rest = self.state.calls
        self.change(done=call.number, calls=tuple(rest))
        self.effects.append(Complete(call))

    def freeze(self) -> None:
        """Complete nothing until a decision. The thread that makes an attempt may hang: it is left alone."""
        if not self.state.frozen:
            self.change(frozen=True)
            if self.state.calls and self.state.calls[0].begun:
                self.effects.append(Abandon())

    def miss(self, member: Member, why: str) -> None:
        self.freeze()
        self.change(missed={**self.state.missed, member: why})
        self.report()

    def report(self) -> None:
        state = self.state
        is_member = state.standing is Standing.MEMBER
        missed = sorted(each for each in state.missed if each.ticket not in state.lost)
        self.effects.append(
            Tell(
                Report(
                    number=state.losses,
                    member=state.me,
                    first=state.first if is_member else 0,
                    last=state.last,
                    done=state.done,
                    has=bool(state.calls) and state.calls[0].has,
                    lost=tuple(missed),
                    whys=tuple(state.missed[each] for each in missed),
                    members=state.members if is_member else (),
                )
            )
        )

    def decided(self, decided: Decided) -> None:
        state, decision = self.state, decided.decision
        if decision.number < state.losses:
            return
        if state.me in decision.lost:
            self.fail(LeftBehind, LATE)
            return
        if decision.number > state.losses and state.standing is Standing.MEMBER:
            self.fail(LeftBehind, "it has missed a decision of the others")
            return
        self.freeze()
        lost = [each for each in decision.lost if each.ticket not in state.lost]
        self.change(
            losses=decision.number + 1,
            lost=state.lost | {each.ticket for each in lost},
            missed={each: why for each, why in state.missed.items() if each not in decision.lost},
        )
        whys = dict(zip(decision.lost, decided.whys, strict=False))
        for each in lost:
            self.disconnect(each)
            self.effects.append(Drop(each, whys.get(each, "another region misses it"), each in state.late))
        calls = []
        for call in self.state.calls:
            if call.number > decision.done:
                if call.begun:
                    call = replace(call, begun=False, has=False, stands=False)
                    self.effects.append(Again(call))
            elif call.has:
                call = replace(call, stands=True)
            elif call.number >= state.first and state.standing is Standing.MEMBER:
                self.fail(LeftBehind, "they hold a result that it does not hold")
                return
            calls.append(call)
        self.change(calls=tuple(calls), frozen=False)

    def fail(self, error: type[LinkError], why: str, member: Member | None = None) -> None:
        self.leave()
        self.effects.append(Fail(error, why, member))

    def leave(self) -> None:
        """Take no part any more."""
        self.freeze()
        self.change(standing=Standing.OUT, calls=())

    # -- regions that come and go

    def switch(self) -> None:
        state = self.state
        now = [each for each in state.announced if each.number <= state.due]
        if not now:
            return
        joined = tuple(each.member for each in now if each.kind == "join")
        left = tuple(each.member for each in now if each.kind == "leave")
        roster = tuple(sorted({*state.without_lost(state.roster), *joined} - {*left}))
        self.change(
            roster=roster,
            changes=now[-1].number,
            announced=tuple(each for each in state.announced if each.number > now[-1].number),
        )
        if state.me in left:
            self.change(last=state.submitted)
        self.effects.append(Switched(joined, left))

    def marked(self, marker: Marked) -> None:
        state = self.state
        if state.me.ticket in marker.lost:
            self.fail(LeftBehind, LATE)
            return
        for member in marker.members if marker.is_in else ():
            if member != state.me and not state.is_paired(member):
                why = state.unpaired.get(member, "it has not come about yet")
                self.fail(LeftBehind, f"it has no connection to region {member.region}: {why}")
                return
        losses = max(state.losses, marker.losses)
        self.change(
            lost=state.lost | frozenset(marker.lost),
            losses=losses,
            frozen=state.frozen and losses == state.losses,
            roster=marker.members,
            changes=max(state.changes, marker.changes),
            due=max(state.due, marker.changes),
            announced=tuple(each for each in state.announced if each.number > marker.changes),
        )
        if marker.is_in:
            submitted = marker.submitted
            self.change(
                standing=Standing.MEMBER, submitted=submitted, done=submitted, first=submitted + 1, calls=()
            )

    # -- helpers

    def head(self, **news: Any) -> None:
        """Change the call in hand."""
        first, *rest = self.state.calls
        self.change(calls=(replace(first, **news), *rest))

    def change(self, **news: Any) -> None:
        self.state = replace(self.state, **news)
