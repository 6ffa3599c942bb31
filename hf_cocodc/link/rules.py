"""What a region does with its calls, and with what its coordinator says: a pure function. No sockets, threads or clocks.

Members make the same calls in the same order; one is in hand at a time. In an elastic run a call completes once all its members
say that they hold its result ("have"). If a member is lost before that, everybody freezes and reports, the coordinator decides
which calls stand, and all later ones are void: they are made again, from their start and without the lost members. So a call
counts in all members or in none. In a fixed run every loss ends the run, and nobody waits for a "have".

Changes (regions that come in or leave) are numbered by the coordinator. Each trailer tells how many its region knows. A change
counts from the step after the landing of the first transfer in which all trailers know it: all members change at the same step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..coordinator.messages import Change, Decided, Report
from ..net.letters import Member

LATE = "it was late, or they could not reach it"


class Standing(Enum):
    """What a process is to the run."""

    MEMBER = "member"
    """It takes part."""
    JOINING = "joining"
    """It has no base yet: its calls reach no other region."""
    FOLLOWING = "following"
    """It lands what the members land, from the log of one of them."""
    OUT = "out"
    """The others have gone on without it, or the run has ended in an error."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the training loop; `number` is its place in their order.

    Attributes:
        members: who took part when it was made, when `changes` counted.
        losses: decisions on losses before the present attempt, in which `parties` take part.
        has: whether this member holds its result.
        stands: whether the result counts by a decision.
    """

    number: int
    what: str
    members: tuple[Member, ...]
    changes: int
    losses: int = 0
    parties: tuple[Member, ...] = ()
    begun: bool = False
    has: bool = False
    stands: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process's part in a run.

    Attributes:
        roster: who takes part in calls that are made now; lost members may still be among them.
        changes: changes that count now; `announced` has those that it knows and that do not count yet, without gaps.
        due: changes up to this number count from the next step on.
        losses: decisions on losses; `lost` has the tickets of all members that were lost.
        calls: those that have not completed, in order.
        first, last: numbers of the first and the last call that it takes part in; `last` is None until it leaves.
        submitted, done: numbers of the last call that was made, and of the last that has completed.
        frozen: whether no call may complete before a decision.
        missed: members that this process misses, with the reason.
    """

    me: Member
    elastic: bool
    standing: Standing
    roster: tuple[Member, ...] = ()
    changes: int = 0
    announced: tuple[Change, ...] = ()
    due: int = 0
    losses: int = 0
    lost: frozenset[int] = frozenset()
    calls: tuple[Call, ...] = ()
    first: int = 1
    last: int | None = None
    submitted: int = 0
    done: int = 0
    frozen: bool = False
    missed: Mapping[Member, str] = field(default_factory=dict)

    @property
    def members(self) -> tuple[Member, ...]:
        """Who takes part now, as far as this process knows; itself in any case."""
        return tuple(sorted({self.me, *self.without_lost(self.roster)}))

    @property
    def knows(self) -> int:
        """The number of the newest change that this process knows."""
        return self.changes + len(self.announced)

    @property
    def is_leaving(self) -> bool:
        """Whether this process takes part in no call from the next step on."""
        return self.standing is Standing.MEMBER and any(
            each.kind == "leave" and each.member == self.me and each.number <= self.due
            for each in self.announced
        )

    def without_lost(self, members: Iterable[Member]) -> tuple[Member, ...]:
        return tuple(sorted(each for each in members if each.ticket not in self.lost))


# ---- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """The training loop has made a call."""

    what: str


@dataclass(frozen=True)
class Held:
    """This process holds the result of an attempt."""

    number: int
    losses: int


@dataclass(frozen=True)
class AllHeld:
    """All parties of an attempt have said that they hold its result."""

    number: int
    losses: int


@dataclass(frozen=True)
class Missed:
    """A member is lost, as far as an attempt shows."""

    number: int
    losses: int
    member: Member
    why: str


@dataclass(frozen=True)
class Asked:
    """The coordinator asks for a report."""

    number: int


@dataclass(frozen=True)
class Known:
    """The coordinator announces a change."""

    change: Change


@dataclass(frozen=True)
class Landed:
    """A transfer has landed: all its trailers know the changes up to `known`; `changes` of them counted when it was sent."""

    known: int
    changes: int


@dataclass(frozen=True)
class Ticked:
    """An inner step has ended, with all its events."""


@dataclass(frozen=True)
class Followed:
    """The base is loaded: calls are answered from the log of a member from now on."""


@dataclass(frozen=True)
class Marked:
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
class NoMoreCalls:
    """No further call will be made."""


Event = (
    Made
    | Held
    | AllHeld
    | Missed
    | Asked
    | Decided
    | Known
    | Landed
    | Ticked
    | Followed
    | Marked
    | NoMoreCalls
)


# ---- effects ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Begin an attempt of a call."""

    number: int
    losses: int
    parties: tuple[Member, ...]


@dataclass(frozen=True)
class Complete:
    """The result of a call counts."""

    call: Call


@dataclass(frozen=True)
class Abandon:
    """The attempt in hand is void: nobody waits for it any more."""


@dataclass(frozen=True)
class Again:
    """A call is made again, without members that were lost."""

    call: Call


@dataclass(frozen=True)
class Tell:
    """Send a report to the coordinator."""

    report: Report


@dataclass(frozen=True)
class Drop:
    """A member is lost: close the connections to it."""

    member: Member
    why: str


@dataclass(frozen=True)
class Switched:
    """Members have come in and left, from the next step on."""

    joined: tuple[Member, ...]
    left: tuple[Member, ...]


@dataclass(frozen=True)
class Fail:
    """No call of this process will complete. `member`: whose loss ends a fixed run; None if the others went on without it."""

    member: Member | None
    why: str


Effect = Begin | Complete | Abandon | Again | Tell | Drop | Switched | Fail


def step(state: Part, event: Event) -> tuple[Part, tuple[Effect, ...]]:
    """The next state, and what is to be done, in order."""
    work = _MemberWork(state)
    if state.standing is not Standing.OUT:
        work.take(event)
        work.proceed()
    return work.state, tuple(work.effects)


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
                    if not state.elastic:
                        self.complete()
            case AllHeld(number=number, losses=losses):
                if self.is_in_hand(number, losses) and state.calls[0].has:
                    self.complete()
            case Missed(number=number, losses=losses, member=member, why=why):
                if self.is_in_hand(number, losses) and member in state.calls[0].parties:
                    self.miss(member, why)
            case Asked(number=number):
                if number == state.losses:
                    self.freeze()
                    self.report()
            case Decided():
                self.decided(event)
            case Known(change=change):
                newest = state.announced[-1].number if state.announced else state.changes
                # the log tells a newcomer of all changes before those that it hears of
                if change.number == newest + 1 or (
                    change.number > newest and state.standing is not Standing.MEMBER
                ):
                    self.change(announced=(*state.announced, change))
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

    # -- losses

    def is_in_hand(self, number: int, losses: int) -> bool:
        """Whether this is the attempt in hand; one that was abandoned is none."""
        calls = self.state.calls
        return bool(
            calls
            and not self.state.frozen
            and calls[0].begun
            and (calls[0].number, calls[0].losses) == (number, losses)
        )

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
        if not self.state.elastic:
            self.fail(member, why)
            return
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
            self.fail(None, LATE)
            return
        if decision.number > state.losses and state.standing is Standing.MEMBER:
            self.fail(None, "it has missed a decision of the others")
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
            self.effects.append(Drop(each, whys.get(each, "another region misses it")))
        calls = []
        for call in self.state.calls:
            if call.number > decision.done:
                if call.begun:
                    call = replace(call, begun=False, has=False, stands=False)
                    self.effects.append(Again(call))
            elif call.has:
                call = replace(call, stands=True)
            elif call.number >= state.first and state.standing is Standing.MEMBER:
                self.fail(None, "they hold a result that it does not hold")
                return
            calls.append(call)
        self.change(calls=tuple(calls), frozen=False)

    def fail(self, member: Member | None, why: str) -> None:
        self.freeze()
        self.change(standing=Standing.OUT, calls=())
        self.effects.append(Fail(member, why))

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
            self.fail(None, LATE)
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
