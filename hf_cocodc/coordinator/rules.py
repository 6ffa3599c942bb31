"""What the coordinator of a run decides: a pure function. No sockets, threads, clocks or randomness.

`step` takes the state of one run, an event and the time, and returns the next state and the effects. Events are messages
(`Came`), connections that have ended (`Ended`), and `Tick`, several times a second. Effects are messages (`SendTo`), and
`Persist`: the durable part of the state must be on the disk before what follows it.

A run first gathers its regions. Then it trains, with members. Who is lost is decided here, from the members' reports
(`verdict.settle`). Regions that come in or leave are announced here, in one order; a change counts once the trailers of a
transfer show that all members know it. So members need no coordinator at the moment of a change, and none can miss it. Times
are seconds of a clock that stands still while the coordinator does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from ..net.letters import Member
from .hello import first_difference
from .messages import (
    Announce,
    Ask,
    AskLeave,
    AskStop,
    Back,
    Beat,
    Bye,
    Change,
    Claim,
    Claimed,
    Decided,
    Decision,
    Done,
    FromCommand,
    FromRegion,
    Gone,
    Heard,
    Hears,
    Hello,
    Here,
    Leave,
    LeaveNow,
    Note,
    Noted,
    Over,
    Paired,
    Place,
    Post,
    Posted,
    Promise,
    Ready,
    Refuse,
    Report,
    Resumed,
    Stop,
    StopAt,
    Suspect,
    Terms,
    ToRegion,
    Waiting,
    Welcome,
)
from .verdict import settle

VOID_S = 3.0
"""After so long without a connected member of a run, the next regions of its name may begin a new one."""
REPORT_S = 10.0
"""How long a loss waits for the report of a member that is connected and that nobody misses: it is busy."""
RETURN_S = 5.0
"""How long it waits for one whose connection to the coordinator has gone."""
MISSED_S = 2.0
"""How long it waits for one that another member misses: the two may see each other differently."""
PROMISE_S = 10.0
"""How long a question for promises waits for all of them."""
KEPT_DECISIONS = 16
ANOTHER = "another process of this region has been started"
_TICKETS = 1_000_000
"""A coordinator without its memory gives out tickets from its generation times this number on."""


# ---- events and effects -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Came:
    """A message of connection `who`."""

    who: int
    message: FromRegion | FromCommand


@dataclass(frozen=True)
class Ended:
    """Connection `who` has ended. `cut`: it was reset, or nothing came through; else the other end has closed it."""

    who: int
    cut: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class SendTo:
    """Send a message to connection `to`."""

    to: int
    message: ToRegion


@dataclass(frozen=True)
class Persist:
    """`durable` of the new state must be on the disk before anything after this is sent."""


Event = Came | Ended | Tick
Effect = SendTo | Persist


# ---- the state ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A connected member or newcomer of the run that trains. `moved_at`: its step has changed; `op_at`: its transfer has."""

    member: Member
    since: float
    heard_at: float
    beat: Beat = Beat()
    beat_at: float = 0.0
    moved_at: float = 0.0
    op_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A process that is to come in. `ready`: it is less than one interval behind.

    `losses`: decisions on losses that it knew when this coordinator knew none.
    """

    ready: bool = False
    announced: bool = False
    losses: int = 0


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question for promises: at which inner step all can stop."""

    number: int
    since: float
    whys: Mapping[str, str]
    steps: Mapping[Member, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. Everything from `run` to `known` is durable.

    Attributes:
        run: unique to what trains now; empty if nothing does.
        generation: of the coordinator, for this run: members heed no lower one.
        terms, compared: equal in all regions.
        members: who takes part, as far as the members have shown.
        losses: decisions on losses so far; `decisions` has the newest.
        lost: tickets of all that were lost.
        changes: changes announced so far; those in `announced` may not be applied yet.
        applied: changes that members are known to have applied.
        recovers: whether this coordinator has forgotten the run: it decides nothing before all members are here.
        known: while it recovers, all members that any caller knows.
        assumed_lost: regions that an operator declares lost.
        hellos: connections that wait, with what they have said; `told` has what they wait for.
        pairs: (a, b): process a says that it is connected to process b.
        missed: members whose place another process claims, with the reason.
        asked_at: when the reports were asked for; None if no loss is in hand.
        claims: numbers that commands have claimed, by connection.
        leave_asks: commands that wait for a region to hear that it is to leave.
        alone_since: since when no member is connected.
        away: since when each of `expected` is not connected.
    """

    name: str
    run: str = ""
    generation: int = 0
    terms: Terms = Terms(count=1)
    compared: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    hosts: Mapping[Member, str] = field(default_factory=dict)
    losses: int = 0
    lost: frozenset[int] = frozenset()
    decisions: tuple[Decided, ...] = ()
    changes: int = 0
    applied: int = 0
    announced: tuple[Change, ...] = ()
    tickets: int = 0
    ended: Bye | None = None
    recovers: bool = False
    known: frozenset[Member] = frozenset()
    assumed_lost: frozenset[int] = frozenset()
    hellos: Mapping[int, Hello] = field(default_factory=dict)
    told: Mapping[int, Waiting] = field(default_factory=dict)
    seats: Mapping[int, Seat] = field(default_factory=dict)
    newcomers: Mapping[Member, Newcomer] = field(default_factory=dict)
    pairs: frozenset[tuple[Member, Member]] = frozenset()
    reports: Mapping[Member, Report] = field(default_factory=dict)
    missed: Mapping[Member, str] = field(default_factory=dict)
    asked_at: float | None = None
    question: Question | None = None
    questions: int = 0
    claims: Mapping[int, int] = field(default_factory=dict)
    leave_asks: Mapping[int, int] = field(default_factory=dict)
    alone_since: float | None = None
    away: Mapping[Member, float] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether there is a run that goes on."""
        return bool(self.run) and self.ended is None

    def seat_of(self, member: Member) -> int | None:
        """The connection of a process; None if it has none."""
        return next((who for who, seat in self.seats.items() if seat.member == member), None)

    @property
    def there(self) -> set[Member]:
        """All processes of the run, as far as this coordinator knows."""
        return {*self.expected, *self.newcomers, *self.known}

    @property
    def expected(self) -> tuple[Member, ...]:
        """Members, and newcomers that are announced: who may take part in a transfer now or soon."""
        coming = {change.member for change in self.announced if change.kind == "join"}
        return tuple(sorted(each for each in {*self.members, *coming} if each.ticket not in self.lost))


DURABLE = (
    *("name", "run", "generation", "terms", "members", "hosts", "losses", "lost", "decisions"),
    *("changes", "applied", "announced", "tickets", "ended"),
    # or it would decide with what the first callers knew, if it dies while it recovers
    *("recovers", "known"),
)
"""The fields of a run that must survive the coordinator's death before anybody hears of them. `compared` comes with them."""


def durable(state: Run) -> tuple[Any, ...]:
    """The values of a run's `DURABLE` fields."""
    return tuple(getattr(state, name) for name in DURABLE)


def step(state: Run, event: Event, now: float) -> tuple[Run, tuple[Effect, ...]]:
    """The next state, and what is to be done, in order."""
    work = _Work(state, now)
    match event:
        case Came(who, message):
            work.came(who, message)
        case Ended(who, cut):
            work.ended(who, cut)
        case Tick():
            pass
    work.proceed()
    effects: list[Effect] = list(work.effects)
    if durable(work.state) != durable(state):
        effects.insert(0, Persist())
    return work.state, tuple(effects)


class _Work:
    """One step: the state as it changes, and the effects so far."""

    def __init__(self, state: Run, now: float) -> None:
        self.state, self.now = state, now
        self.effects: list[SendTo] = []

    # -- what comes

    def came(self, who: int, message: FromRegion | FromCommand) -> None:
        match message:
            case Hello():
                self.change(hellos={**self.state.hellos, who: message})
            case Back():
                self.back(who, message)
            case Claim() | AskLeave():
                self.command(who, message)
            case _ if who in self.state.seats:
                seat = replace(self.state.seats[who], heard_at=self.now)
                self.change(seats={**self.state.seats, who: seat})
                self.of_seat(seat, who, message)
            case _:  # its run is over, or it has said nothing of itself
                pass

    def of_seat(self, seat: Seat, who: int, message: FromRegion) -> None:
        """A message of a member or a newcomer."""
        state, member = self.state, seat.member
        match message:
            case Beat():
                self.beat(seat, who, message)
            case Report():
                self.report(who, structs.replace(message, member=member))
            case Paired(member=other) if other in state.there:
                self.change(pairs=state.pairs | {(member, other)})
            case Ready() if member in state.newcomers:
                newcomer = replace(state.newcomers[member], ready=True)
                self.change(newcomers={**state.newcomers, member: newcomer})
            case Leave() if state.trains and member in state.members and state.terms.elastic:
                if not any(each.kind == "leave" and each.member == member for each in state.announced):
                    self.announce("leave", member)
            case Heard():
                for asker, region in state.leave_asks.items():
                    if region == member.region:
                        self.send(asker, Done())
                self.change(leave_asks={a: r for a, r in state.leave_asks.items() if r != member.region})
            case Stop(why=why):
                self.ask_to_stop(member, why)
            case Promise(number=number, step=at):
                question = state.question
                if question is not None and question.number == number:
                    self.change(question=replace(question, steps={**question.steps, member: at}))
            case Note(text=text):
                for neighbor, each in state.seats.items():
                    if each.member != member:
                        self.send(neighbor, Noted(region=member.region, text=text))
            case Post(to=to, topic=topic, content=content):
                receiver = state.seat_of(to)
                if receiver is not None:
                    self.send(receiver, Posted(sender=member, topic=topic, content=content))
                elif to not in state.there and not state.recovers:  # it may only not have called again yet
                    self.send(who, Gone(member=to))
            case Bye():
                self.bye(who, member, message)
            case _:
                pass

    def ended(self, who: int, cut: bool) -> None:
        state = self.state
        seat = state.seats.get(who)
        self.change(
            hellos=_without(state.hellos, who),
            told=_without(state.told, who),
            seats=_without(state.seats, who),
            claims=_without(state.claims, who),
            leave_asks=_without(state.leave_asks, who),
        )
        if seat is not None:
            self.tell(Hears(member=seat.member, hears=False, cut=cut))
        if seat is not None and seat.member in state.newcomers:
            self.forget(seat.member)

    def forget(self, newcomer: Member) -> None:
        """A newcomer has gone. One that is announced may be a member already: then its loss is decided like any other."""
        state = self.state
        self.change(newcomers=_without(state.newcomers, newcomer))
        if not state.newcomers[newcomer].announced:
            self.change(hosts=_without(state.hosts, newcomer))
            self.tell(Gone(member=newcomer))
            self.prune_pairs()

    def send_away(self, newcomer: Member, error: str, why: str) -> None:
        """Refuse a newcomer that was welcome."""
        at = self.state.seat_of(newcomer)
        self.forget(newcomer)
        if at is not None:
            self.refuse(at, error, why)

    def bye(self, who: int, member: Member, bye: Bye) -> None:
        state = self.state
        if bye.how in ("finished", "stopped") and state.trains and member in state.expected:
            self.change(ended=bye)
            for other, seat in state.seats.items():
                if seat.member in state.newcomers:
                    self.send(other, _over(bye))
        elif bye.how == "left" and member in self.state.newcomers:
            self.forget(member)

    def command(self, who: int, message: FromCommand) -> None:
        state = self.state
        match message:
            case AskLeave(region=region):
                seat = next(
                    (
                        each
                        for each in state.members
                        if each.region == region and state.seat_of(each) is not None
                    ),
                    None,
                )
                if not state.trains or seat is None:
                    self.send(who, Refuse(error="InputError", why=self.not_there(region)))
                    return
                self.change(leave_asks={**state.leave_asks, who: region})
                at = state.seat_of(seat)
                assert at is not None
                self.send(at, LeaveNow(why="hf-cocodc leave"))
            case Claim():
                taken = {each.region for each in (*state.expected, *state.newcomers)} | {
                    *state.claims.values(),
                    *(hello.region for hello in state.hellos.values()),
                }
                free = [region for region in range(state.terms.most) if region not in taken]
                if not state.trains or not state.terms.elastic:
                    self.send(who, Refuse(error="MeetingError", why=f"run {state.name!r} does not train."))
                elif not free:
                    why = (
                        f"run {state.name!r} has as many regions as it may have (regions.max={state.terms.most}). Start this one "
                        "again when another has left, or raise regions.max when you start the run anew."
                    )
                    self.send(who, Refuse(error="InputError", why=why))
                else:
                    self.change(claims={**state.claims, who: free[0]})
                    self.send(who, Claimed(region=free[0]))

    def not_there(self, region: int) -> str:
        state = self.state
        if not state.trains:
            return f"no run named {state.name!r} trains here."
        members = ", ".join(str(each.region) for each in state.members)
        if region in {each.region for each in state.members}:
            return (
                f"region {region} of run {state.name!r} is not connected: it may be frozen, or cut off. Look at "
                "hf-cocodc status, or end its process: the others go on without it."
            )
        return f"region {region} takes no part in run {state.name!r}. Its members are: {members}."

    # -- heartbeats, and what follows from them

    def beat(self, seat: Seat, who: int, beat: Beat) -> None:
        state, now = self.state, self.now
        seat = replace(
            seat,
            beat=beat,
            beat_at=now,
            moved_at=now if beat.step != seat.beat.step else seat.moved_at,
            op_at=now if beat.op != seat.beat.op else seat.op_at,
        )
        self.change(seats={**state.seats, who: seat})
        if beat.members and beat.losses == state.losses and beat.changes > state.applied:
            self.applied(beat.changes, beat.members)

    def applied(self, changes: int, members: tuple[Member, ...]) -> None:
        """Members have applied changes: who has come in is a member now, and who has left is none."""
        state = self.state
        newcomers = {each: rest for each, rest in state.newcomers.items() if each not in members}
        left = {each.member for each in state.announced if each.kind == "leave" and each.number <= changes}
        self.change(
            applied=changes,
            announced=tuple(each for each in state.announced if each.number > changes),
            members=tuple(each for each in members if each not in left),
            newcomers=newcomers,
            hosts={each: host for each, host in state.hosts.items() if each not in left},
        )
        self.prune_pairs()

    def prune_pairs(self) -> None:
        """Forget connections of processes that have gone."""
        there = self.state.there
        self.change(pairs=frozenset(pair for pair in self.state.pairs if there.issuperset(pair)))

    def suspects(self) -> None:
        """Tell members that wait for one that seems to be lost."""
        state = self.state
        for who, seat in state.seats.items():
            if seat.beat.awaits is None or seat.member not in state.expected:
                continue
            other = next((each for each in state.expected if each.region == seat.beat.awaits), None)
            if other is None or other == seat.member:
                continue
            doubt = self.doubt(seat, other)
            if doubt is not None:
                how, why = doubt
                self.send(who, Suspect(member=other, op=seat.beat.op, how=how, why=why))
                # not again before its next heartbeat
                self.change(
                    seats={
                        **self.state.seats,
                        who: replace(seat, beat=structs.replace(seat.beat, awaits=None)),
                    }
                )

    def doubt(self, seat: Seat, other: Member) -> tuple[str, str] | None:
        """How and why a member for which another waits seems to be lost."""
        terms, now, beat = self.state.terms, self.now, seat.beat
        since_beat = now - seat.beat_at
        waited_s = beat.waited_s + since_beat
        at = self.state.seat_of(other)
        theirs = None if at is None else self.state.seats[at]
        # a coordinator that was started a moment ago has heard nobody for long
        silent_s = now - (self.state.away.get(other, now) if theirs is None else theirs.heard_at)
        if theirs is None or not terms.elastic:
            # in the middle of a transfer nobody is late: then it counts since when nothing has moved
            silent_s = min(silent_s, max(beat.waited_s, beat.idle_s) + since_beat)
        if silent_s > terms.timeout_s:
            return "silent", (
                f"it has given no heartbeat for {silent_s:.0f} s (regions.timeout_s={terms.timeout_s:g}): its process hangs, "
                "or the network between the regions is down"
            )
        if terms.grace_s is not None:
            counted = beat.blocked_s if terms.grace_is_auto else beat.waited_s
            if counted is not None and counted + since_beat > terms.grace_s:
                return "late", f"it is late by more than {terms.grace_s:g} s (regions.grace_s)"
        if theirs is None:
            return None
        stuck_s = min(now - theirs.moved_at, waited_s)
        if stuck_s > terms.stuck_timeout_s:
            return "stuck", (
                f"it is alive, but has been stuck at step {theirs.beat.step} for {stuck_s:.0f} s "
                f"(regions.stuck_timeout_s={terms.stuck_timeout_s:g})"
            )
        idle_s = min(beat.idle_s + since_beat, now - theirs.op_at)
        if beat.op and theirs.beat.op >= beat.op and idle_s > terms.timeout_s:
            return "cut", (
                f"both are alive, and nothing of what they send each other has arrived for {idle_s:.0f} s "
                f"(regions.timeout_s={terms.timeout_s:g}): the network between them is down"
            )
        return None

    # -- losses

    def report(self, who: int, report: Report) -> None:
        state = self.state
        if not state.terms.elastic:
            return
        if report.number < state.losses:
            self.catch_up(who, report.number)
        elif report.number == state.losses:
            # also once one member has ended: another one may still wait for its last transfer
            self.change(reports={**state.reports, report.member: report})
            self.ask()

    def catch_up(self, who: int, number: int) -> None:
        """Send a process the decisions that it does not know."""
        for decided in self.state.decisions:
            if decided.decision.number >= number:
                self.send(who, structs.replace(decided, generation=self.state.generation))

    def ask(self) -> None:
        """Ask everyone who may take part for a report, once for each loss."""
        state = self.state
        if state.asked_at is None:
            self.change(asked_at=self.now)
            for who, seat in state.seats.items():
                if seat.member in state.expected and seat.member not in state.reports:
                    self.send(who, Ask(number=state.losses))

    def decide(self) -> None:
        """Decide a loss, once enough have reported."""
        state = self.state
        if state.asked_at is None or state.recovers:
            return
        reports = {
            member: structs.replace(
                report,
                lost=tuple(sorted({*report.lost, *(each for each in state.missed if each != member)})),
            )
            for member, report in state.reports.items()
        }
        if not {each for report in reports.values() for each in report.members} & reports.keys():
            return  # nobody who takes part has reported
        missed = {each for report in reports.values() for each in report.lost}
        known = {each for report in reports.values() for each in report.members} | set(state.expected)
        for member in known - reports.keys():
            at = state.seat_of(member)
            if member in missed and (at is None or member in state.missed):
                continue
            if at is None:  # after a start of the coordinator it is away from a time to come on
                patience_s, since = RETURN_S, state.away.get(member, 0.0)
            else:  # one that has come back was asked then
                patience_s, since = MISSED_S if member in missed else REPORT_S, state.seats[at].since
            if self.now - max(state.asked_at, since) < patience_s:
                return
        self.take(settle(reports.values()))

    def take(self, decision: Decision) -> None:
        """A decision counts."""
        state = self.state
        whys = {**state.missed}
        for report in state.reports.values():
            whys.update(zip(report.lost, report.whys, strict=False))
        decided = Decided(
            generation=state.generation,
            decision=decision,
            whys=tuple(whys.get(each, "it has not answered the coordinator") for each in decision.lost),
        )
        self.change(
            losses=decision.number + 1,
            lost=state.lost | {each.ticket for each in decision.lost},
            decisions=(*state.decisions, decided)[-KEPT_DECISIONS:],
            # one that has left already may still have had a part in this transfer
            members=tuple(each for each in decision.members if each in state.expected),
            newcomers={each: rest for each, rest in state.newcomers.items() if each not in decision.members},
            hosts={each: host for each, host in state.hosts.items() if each not in decision.lost},
            reports={},
            missed={},
            asked_at=None,
        )
        self.prune_pairs()
        self.tell(decided)
        if self.state.question is not None:
            self.answer(0)
        for who, seat in state.seats.items():
            if seat.member in decision.lost:
                self.change(seats=_without(self.state.seats, who))

    # -- regions that come and go

    def announce(self, kind: str, member: Member) -> None:
        state = self.state
        change = Change(number=state.changes + 1, kind=kind, member=member)
        self.change(changes=change.number, announced=(*state.announced, change))
        self.tell(Announce(generation=state.generation, change=change))

    def admit(self) -> None:
        """Announce newcomers that are connected to everyone, and ready."""
        state = self.state
        if not state.trains or state.recovers or state.asked_at is not None or state.question is not None:
            return
        for member, newcomer in sorted(state.newcomers.items()):
            others = [each for each in self.state.expected if each != member]
            is_paired = all({(each, member), (member, each)} <= state.pairs for each in others)
            there = {change.member for change in self.state.announced}
            has_room = len(self.state.expected) < state.terms.most
            if newcomer.ready and not newcomer.announced and is_paired and has_room and member not in there:
                self.announce("join", member)
                news = replace(newcomer, announced=True)
                self.change(newcomers={**self.state.newcomers, member: news})

    def welcome_newcomer(self, who: int, hello: Hello) -> None:
        """Let a process of a run that trains come in, or tell it what it waits for."""
        state = self.state
        if state.recovers:
            self.wait(
                who, f"the coordinator has lost its memory of run {state.name!r}, and waits for its members"
            )
            return
        first = min((each for each in state.members), default=None)
        wrong = first_difference(first.region if first else 0, state.compared, hello.region, hello.compared)
        if wrong is not None:
            self.refuse(who, "HandshakeError", wrong)
            return
        held = next((each for each in state.expected if each.region == hello.region), None)
        rival = next((each for each in state.newcomers if each.region == hello.region), None)
        if held is not None and state.seat_of(held) is None:
            why = ANOTHER
            # a member may only be on its way back to a coordinator that was started a moment ago
            has_gone = self.now - state.away.get(held, self.now) >= RETURN_S
            if has_gone and held in state.members and held not in state.missed:
                self.change(missed={**state.missed, held: why})
                self.ask()
            self.wait(
                who, f"the others do not know yet that the earlier process of region {hello.region} has gone"
            )
        elif (
            held is not None
            or rival is not None
            or any(seat.member.region == hello.region for seat in state.seats.values())
        ):
            host = state.hosts.get(held or rival or Member(-1, -1), "?")
            self.wait(
                who,
                f"region {hello.region} is in run {state.name!r} already, as a process at {host}. If that has died, the others "
                "will notice it. If it lives, end it, or join as another region (hf-cocodc train --join takes a free number).",
            )
        elif len({*state.expected, *state.newcomers}) >= state.terms.most:
            self.refuse(
                who,
                "MeetingError",
                f"run {state.name!r} has {len(state.expected)} regions, and {len(state.newcomers)} wait to come in: "
                f"regions.max={state.terms.most}",
            )
        elif state.alone_since is not None:
            # perhaps all have died, and are started again: then this one must begin with them
            self.wait(who, f"no region of run {state.name!r} is connected to this coordinator")
        else:
            self.seat_newcomer(who, hello)

    def seat_newcomer(self, who: int, hello: Hello) -> None:
        state = self.state
        me = Member(hello.region, state.tickets + 1)
        place = Place(me, hello.host)
        self.tell(Here(place=place))
        self.change(
            tickets=me.ticket,
            hellos=_without(state.hellos, who),
            told=_without(state.told, who),
            seats={
                **state.seats,
                who: self.seat(me),
            },
            newcomers={**state.newcomers, me: Newcomer()},
            hosts={**state.hosts, me: hello.host},
        )
        steps = [seat.beat.step for seat in state.seats.values()]
        self.send(
            who,
            Welcome(
                run=state.run,
                generation=state.generation,
                me=me,
                joins=True,
                members=self.places(state.expected),
                others=self.places(each for each in state.newcomers if each not in state.expected),
                compared=(dict(state.compared),),
                losses=state.losses,
                step=max(steps, default=0),
            ),
        )

    # -- stopping

    def ask_to_stop(self, member: Member, why: str) -> None:
        state = self.state
        if not state.trains:
            return
        if state.question is not None:
            whys = {**state.question.whys, str(member.region): why}
            self.change(question=replace(state.question, whys=whys))
            return
        number = state.questions + 1
        self.change(
            questions=number,
            question=Question(number=number, since=self.now, whys={str(member.region): why}),
        )
        for who, seat in state.seats.items():
            if seat.member in state.members:
                self.send(who, AskStop(number=number))

    def answer_if_known(self) -> None:
        state = self.state
        if state.question is None:
            return
        if not state.recovers and set(state.members) <= state.question.steps.keys():
            self.answer(max(state.question.steps.values()))
        elif self.now - state.question.since > PROMISE_S:
            self.answer(0)

    def answer(self, at: int) -> None:
        question = self.state.question
        assert question is not None
        self.change(question=None)
        for who, seat in self.state.seats.items():
            if seat.member in self.state.members:
                self.send(who, StopAt(number=question.number, step=at, whys=dict(question.whys)))

    # -- the beginning, and coming back

    def proceed(self) -> None:
        """What follows from the state as it is, whatever has happened."""
        if self.state.recovers:
            needed = {each for each in self.state.known if each.region not in self.state.assumed_lost}
            # a newcomer knows no members: one of them must have called
            if self.state.members and needed <= {seat.member for seat in self.state.seats.values()}:
                self.recovered()
        self.note_away()
        self.decide()
        self.suspects()
        self.answer_if_known()
        for who, hello in sorted(self.state.hellos.items()):
            if who in self.state.hellos:
                self.greet(who, hello)
        self.gather()
        self.admit()

    def note_away(self) -> None:
        """Note since when members of the run are not connected, and since when none is."""
        state = self.state
        expected, here = state.expected, {seat.member for seat in state.seats.values()}
        away = {each: state.away.get(each, self.now) for each in expected if each not in here}
        if away != state.away:
            self.change(away=away)
        if len(away) < len(expected):
            if state.alone_since is not None:
                self.change(alone_since=None)
        elif state.run and state.alone_since is None:
            self.change(alone_since=self.now)

    def is_void(self) -> bool:
        """Whether a new run may take its place: no member is connected for a while. Until one begins, members may come back."""
        alone_since = self.state.alone_since
        return alone_since is not None and self.now - alone_since >= VOID_S

    def greet(self, who: int, hello: Hello) -> None:
        """A new process: where does it belong?"""
        state = self.state
        if state.trains and state.terms.elastic and hello.terms.elastic and not self.is_void():
            self.welcome_newcomer(who, hello)
        elif hello.join:
            if state.ended is not None:
                self.refuse(who, *end_in_words(state.name, state.ended, "there is nothing to join"))
            elif state.trains and state.terms.elastic:
                self.wait(who, f"no region of run {state.name!r} is connected to this coordinator")
            elif state.trains:
                self.refuse(
                    who,
                    "InputError",
                    f"run {state.name!r} trains, and by its settings it ends when a region is lost: nobody can join it. Give it "
                    "regions.min or regions.on_loss=continue in every region.",
                )
            else:
                self.wait(who, f"no run {state.name!r} trains here")

    def gather(self) -> None:
        """Compare the regions that wait for each other, and begin once all are here."""
        state = self.state
        is_elastic = state.terms.elastic and any(hello.terms.elastic for hello in state.hellos.values())
        if state.trains and is_elastic and not self.is_void():
            return
        here: dict[int, int] = {}
        for who, hello in sorted(state.hellos.items()):
            if hello.join:
                continue
            first = next(iter(here), None)
            if hello.region in here:
                other = state.hellos[here[hello.region]]
                self.refuse(
                    who,
                    "HandshakeError",
                    f"another process is region {hello.region} of run {state.name!r} too: it waits at this coordinator, on host "
                    f"{other.machine}. Give each region its own number (HF_COCODC_REGION, --region). If these are two runs, give "
                    "each a name of its own (regions.run, --run or HF_COCODC_RUN, equal in its regions).",
                )
                continue
            if first is not None:
                one, two = sorted((first, hello.region))
                pair = {first: state.hellos[here[first]], hello.region: hello}
                wrong = first_difference(one, _said(pair[one]), two, _said(pair[two]))
                if wrong is not None:
                    for each in (*here.values(), who):
                        self.refuse(each, "HandshakeError", wrong)
                    return
            here[hello.region] = who
        for who in here.values():
            absent = set(range(state.hellos[who].terms.count)) - here.keys()
            if absent:
                self.tell_waiting(who, Waiting(absent=tuple(sorted(absent)), why=self.why_anew()))
        if not here:
            return
        absent = set(range(state.hellos[here[min(here)]].terms.count)) - here.keys()
        coming = {each.region: each for each in state.newcomers}
        if absent and absent <= coming.keys() and state.trains and self.is_void():
            for region in absent:
                self.send_away(
                    coming[region],
                    "RunOver",
                    f"all members of run {state.name!r} have gone, and are started again. Start region {region} again, too.",
                )
        if absent:
            return
        if not state.trains or state.alone_since is not None:
            self.begin(here)
            return
        for who in here.values():
            self.wait(
                who,
                f"run {state.name!r} trains here already, with other processes of its regions. If these are two runs, give "
                "each a name of its own (regions.run, --run or HF_COCODC_RUN, equal in its regions); if not, end the others",
            )

    def why_anew(self) -> str:
        """How a run has ended, for regions that wait for each other in its place: a supervisor may have started one again."""
        ended = self.state.ended
        if ended is None:
            return ""
        return (
            f"Run {self.state.name!r} has ended at step {ended.step} ({ended.how}); another one begins here once all regions "
            "have come."
        )

    def begin(self, here: Mapping[int, int]) -> None:
        """All regions have met."""
        state = self.state
        hellos = {region: state.hellos[who] for region, who in sorted(here.items())}
        members = tuple(Member(region, state.tickets + 1 + place) for place, region in enumerate(hellos))
        hosts = {member: hellos[member.region].host for member in members}
        for who in state.seats:
            self.send(who, Refuse(error="RunOver", why=f"run {state.name!r} has been begun anew."))
        fresh = Run(name=state.name, generation=state.generation + 1, claims=state.claims)
        self.state = replace(
            fresh,
            run=f"run-{hellos[min(hellos)].token[:12]}",
            terms=hellos[min(hellos)].terms,
            compared=hellos[min(hellos)].compared,
            members=members,
            hosts=hosts,
            tickets=state.tickets + len(members),
            questions=state.questions,
            hellos={who: hello for who, hello in state.hellos.items() if who not in here.values()},
            seats={here[member.region]: self.seat(member) for member in members},
        )
        compared = tuple(dict(hello.compared) for hello in hellos.values())
        for member in members:
            self.send(
                here[member.region],
                Welcome(
                    run=self.state.run,
                    generation=self.state.generation,
                    me=member,
                    joins=False,
                    members=self.places(members),
                    compared=compared,
                ),
            )

    def back(self, who: int, back: Back) -> None:
        """A process that was connected before."""
        state = self.state
        if state.ended is not None and state.run == back.run and not back.is_member:
            self.send(who, _over(state.ended))
            return
        if state.run and (
            state.run != back.run or (state.ended is not None and back.member not in state.expected)
        ):
            away = f"while region {back.member.region} was away"
            if state.run == back.run and state.ended is not None:
                self.refuse(who, *end_in_words(state.name, state.ended, f"that was {away}"))
            else:
                self.refuse(who, "RunOver", f"run {state.name!r} has been begun anew {away}.")
            return
        changes = max((each.number for each in back.announced), default=back.changes)
        # then another coordinator has served this run
        newer = back.generation > state.generation, _decisions(back) > state.losses, changes > state.changes
        if not state.run or (any(newer) and not state.recovers):
            for member, newcomer in state.newcomers.items():
                if not newcomer.announced:  # its ticket may be another one's, too
                    self.send_away(
                        member, "LeftBehind", "its coordinator did not know the others' last decisions"
                    )
            state = self.state
            state = self.state = replace(
                Run(
                    name=state.name,
                    assumed_lost=state.assumed_lost,
                    hellos=state.hellos,
                    claims=state.claims,
                    # these are connected, and do not call again
                    seats=state.seats,
                    newcomers=state.newcomers,
                    pairs=state.pairs,
                ),
                run=back.run,
                terms=back.terms,
                compared=back.compared,
                recovers=True,
                questions=state.questions,
            )
        if back.member.ticket in state.lost:
            # it may have decided otherwise, with a coordinator that has gone
            self.refuse(who, "LeftBehind", "the others have gone on without it")
            return
        # another coordinator may have given out higher ones
        tickets = max(state.tickets, back.member.ticket, *(place.member.ticket for place in back.members))
        self.change(tickets=tickets)
        state = self.state
        if not (state.recovers or back.is_member or back.member in state.hosts):
            # others have heard that it has gone, and connect to it no more
            self.refuse(who, "LeftBehind", f"the others have taken leave of region {back.member.region}")
            return
        # one may have been let in while this coordinator had not heard of the other: the last one stays
        rivals = [
            each for each in state.newcomers if each.region == back.member.region and not back.is_member
        ]
        if max(rivals, default=back.member) > back.member:
            self.refuse(who, "LeftBehind", ANOTHER)
            return
        for rival in [each for each in rivals if each != back.member]:
            self.send_away(rival, "LeftBehind", ANOTHER)
        state = self.state
        seat = self.seat(back.member)
        old = state.seat_of(back.member)
        self.change(seats={**_without(state.seats, old), who: seat})
        self.tell(Hears(member=back.member, hears=True))
        for place in back.members:  # this coordinator may have come back without hearing of one
            if self.state.seat_of(place.member) is None:
                self.send(who, Hears(member=place.member, hears=False))
        if state.recovers:
            self.remember(back)
            return
        self.send(who, Resumed(generation=state.generation))
        self.catch_up(who, back.losses)
        for change in state.announced:
            self.send(who, Announce(generation=state.generation, change=change))
        if state.asked_at is not None and back.is_member:
            self.send(who, Ask(number=state.losses))
        if not back.is_member and back.member not in state.newcomers and back.member not in state.members:
            newcomer = Newcomer(announced=back.member in state.expected)
            self.change(newcomers={**state.newcomers, back.member: newcomer})
        self.show_newcomers()

    def show_newcomers(self) -> None:
        """Tell all of all newcomers: some may have missed it, or this coordinator has forgotten who is connected to whom."""
        for newcomer in self.state.newcomers:
            self.tell(Here(place=Place(newcomer, self.state.hosts.get(newcomer, ""))))

    def remember(self, back: Back) -> None:
        """Take what a caller knows into an empty memory."""
        state = self.state
        announced = {each.number: each for each in (*state.announced, *back.announced)}
        # a decision of which newcomers alone have heard has no effect yet: another one may be made in its place
        in_effect = back.decisions if back.is_member else ()
        decisions = {each.decision.number: each for each in (*state.decisions, *in_effect)}
        newest = (_decisions(back), back.changes) >= (state.losses, state.applied) or not state.members
        applied = max(state.applied, back.changes)
        known, members = set(state.known), set(state.members)
        if back.is_member:  # only the members know who has come in: others may name one that has left since
            known |= {back.member, *(each.member for each in back.announced if each.kind == "join")}
            if newest:
                members = {place.member for place in back.members}
                known |= members
        # not all callers have counted, or heard, that these have gone
        gone = {member for each in decisions.values() for member in each.decision.lost}
        gone |= {
            each.member for each in announced.values() if each.kind == "leave" and each.number <= applied
        }
        losses = max(state.losses, _decisions(back))
        # what was reported of a loss that has been decided, as this call shows, says nothing of the next one
        reports = {each: report for each, report in state.reports.items() if report.number == losses}
        self.change(
            generation=max(state.generation, back.generation),
            losses=losses,
            reports=reports,
            asked_at=state.asked_at if reports or state.missed else None,
            decisions=tuple(each for _, each in sorted(decisions.items()))[-KEPT_DECISIONS:],
            applied=applied,
            announced=tuple(each for _, each in sorted(announced.items()) if each.number > applied),
            changes=max(state.changes, back.changes, *announced, 0),
            members=tuple(sorted(members - gone)),
            hosts={
                **state.hosts,
                **{place.member: place.host for place in back.members},
                back.member: back.host,
            },
            known=frozenset(known - gone),
        )
        if not back.is_member:
            newcomer = Newcomer(losses=back.losses)
            self.change(newcomers={**state.newcomers, back.member: newcomer})

    def recovered(self) -> None:
        """Every member of the newest epoch that anyone knows is here, or declared lost by an operator."""
        state = self.state
        generation = state.generation + 1
        self.change(
            recovers=False,
            known=frozenset(),
            generation=generation,
            # tickets were given out, and lost, of which nobody here knows
            tickets=max(state.tickets, generation * _TICKETS),
        )
        for member, newcomer in state.newcomers.items():
            if newcomer.losses > state.losses:
                self.send_away(member, "LeftBehind", "it has heard of a loss that no member knows")
        state = self.state
        # one of them may not know yet that it has come in, or is about to
        newcomers = {
            each: replace(rest, announced=each in state.expected)
            for each, rest in state.newcomers.items()
            if each not in state.members
        }
        self.change(newcomers=newcomers)
        for who in state.seats:
            self.send(who, Resumed(generation=generation))
            self.catch_up(who, 0)
            for change in state.announced:
                self.send(who, Announce(generation=generation, change=change))
        self.show_newcomers()
        if state.asked_at is not None or state.reports:
            for who, seat in state.seats.items():
                if seat.member in state.expected and seat.member not in state.reports:
                    self.send(who, Ask(number=state.losses))

    # -- helpers

    def seat(self, member: Member) -> Seat:
        """The seat of a process that has connected now."""
        now = self.now
        return Seat(member=member, since=now, heard_at=now, moved_at=now, op_at=now)

    def change(self, **news: Any) -> None:
        self.state = replace(self.state, **news)

    def send(self, to: int, message: ToRegion) -> None:
        self.effects.append(SendTo(to, message))

    def tell(self, message: ToRegion) -> None:
        """Tell all members and newcomers."""
        for who in self.state.seats:
            self.send(who, message)

    def wait(self, who: int, why: str) -> None:
        self.tell_waiting(who, Waiting(why=why))

    def tell_waiting(self, who: int, news: Waiting) -> None:
        if self.state.told.get(who) != news:
            self.change(told={**self.state.told, who: news})
            self.send(who, news)

    def refuse(self, who: int, error: str, why: str) -> None:
        state = self.state
        self.change(
            hellos=_without(state.hellos, who),
            told=_without(state.told, who),
            seats=_without(state.seats, who),
        )
        self.send(who, Refuse(error=error, why=why))

    def places(self, members: Iterable[Member]) -> tuple[Place, ...]:
        return tuple(Place(each, self.state.hosts.get(each, "")) for each in sorted(members))


def _decisions(back: Back) -> int:
    """Decisions that a caller has taken. A newcomer may know the number of one that no member has heard: it is void then."""
    return back.losses if back.is_member else 0


def end_in_words(name: str, ended: Bye | Over, why: str) -> tuple[str, str]:
    """The name of the error of a region that comes to a run that has ended, or back to it, and its words: how and where the run
    has ended, and `why` the region hears it.
    """
    where = f" Its model lies at {ended.place}." if ended.place else ""
    kind = "RunFinished" if ended.how == "finished" else "RunOver"
    return kind, f"run {name!r} has {ended.how} at step {ended.step}: {why}.{where}"


def _over(bye: Bye) -> Over:
    return Over(how=bye.how, step=bye.step, place=bye.place)


def _said(hello: Hello) -> dict[str, Any]:
    """What regions compare, with the number of regions."""
    return {"regions.count": hello.terms.count, **hello.compared}


def _without(mapping: Mapping[Any, Any], key: Any) -> Mapping[Any, Any]:
    return {each: value for each, value in mapping.items() if each != key} if key in mapping else mapping
