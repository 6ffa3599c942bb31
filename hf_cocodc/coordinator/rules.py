"""What the coordinator of a run decides: a pure function. No sockets, threads, clocks or randomness.

`step` takes the state of one run, an event and the time, and returns the next state and the effects. Events are messages
(`Came`), connections that have ended (`Ended`), and `Tick`, several times a second. Effects are messages (`SendTo`), and
`Persist`: the durable part of the state must be on the disk before what follows it.

A run first gathers its regions. Then it trains, with members. Who is lost is decided here, from the members' reports
(`verdict.settle`). Regions that come in or leave are announced here, in one order; a change counts once the trailers of a
transfer show that all members know it. So members need no coordinator at the moment of a change, and none can miss it. Times
are seconds of a clock that stands still while the coordinator does.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from msgspec import structs

from ..errors import short
from ..net.members import Member
from ..settings.regions import MOST_REGIONS
from .hello import RECIPE, first_difference, side_by_side
from .messages import (
    NO_GENERATION,
    Announce,
    Ask,
    AskLeave,
    AskRecipe,
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
    Generation,
    Gone,
    Heard,
    Hears,
    Hello,
    Here,
    Lanes,
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
    RunRecipe,
    Stop,
    StopAt,
    Suspect,
    Terms,
    ToRegion,
    Waiting,
    Welcome,
    host_of,
)
from .verdict import settle

VOID_S = 3.0
"""After so long without a connected member of a run, the next regions of its name may begin a new one."""
RETURN_S = 5.0
"""How long a loss waits for the report of a member whose connection to the coordinator has gone, and that nobody misses."""
CALL_S = 20.0
"""How long members have to call a coordinator that has read its file: they notice within 15 s that it was away."""
LEAST_GRACE_S = 2.0
"""With `grace_s`, a connected member has at least so long for its report."""
HERE_S = 5.0
"""Seconds between two introductions of processes that are not connected to each other."""
PROMISE_S = 10.0
"""How long a question for promises waits for all of them."""
STOP_S = 60.0
"""For so long after a question nobody is let into a run whose regions are to stop: they may not all have done so yet."""
KEPT_DECISIONS = 16
_MOST_DIFFERENCES, _LONGEST_SENTENCE = 100, 1000
_KEPT_RUNS = 16
ANOTHER = "another process of this region has been started"


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
class StoodStill:
    """This coordinator stood still for so long that another one may serve its members. `has_copies`: see `restarted`."""

    has_copies: bool


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class SendTo:
    """Send a message to connection `to`."""

    to: int
    message: ToRegion


@dataclass(frozen=True)
class CloseConnection:
    """End connection `to`: a process of the run then calls again, if it heeds no other coordinator."""

    to: int


@dataclass(frozen=True)
class Persist:
    """`durable` of the new state must be on the disk before anything after this is sent."""


Event = Came | Ended | StoodStill | Tick
Effect = SendTo | CloseConnection | Persist


# ---- the state ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A connected member or newcomer of the run that trains.

    `moved_at`: its step has changed; `op_at`: its transfer has. `is_told`: since its last heartbeat, it has heard that the member
    for which it waits seems to be lost.
    """

    member: Member
    since: float
    heard_at: float
    beat: Beat = Beat()
    beat_at: float = 0.0
    moved_at: float = 0.0
    op_at: float = 0.0
    is_told: bool = False


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A process that is to come in. `ready`: it is less than one interval behind."""

    ready: bool = False
    announced: bool = False


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question for promises: at which inner step all can stop. `answer`: where they do; 0 if not all have promised yet."""

    number: int
    since: float
    whys: Mapping[str, str]
    steps: Mapping[Member, int] = field(default_factory=dict)
    answer: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. Everything from `run` to `ended` is durable.

    Attributes:
        run: unique to what trains now; empty if nothing does.
        generations: of the coordinators of this run, the present one last: members heed no lower one.
        earlier: runs of this name before this one.
        terms, compared: equal in all regions.
        members: who takes part, as far as the members have shown.
        losses: decisions on losses so far; `decisions` has the newest.
        lanes, tokens: of all members and newcomers; tokens as digests.
        lost: tickets of all that were lost.
        changes: changes announced so far; those in `announced` may not be applied yet.
        applied: changes that members are known to have applied.
        electors: members when this coordinator read its file, if there may be copies of it.
        uncalled: who of the expected has not called since then.
        leavers: members that want to leave.
        hellos: connections that wait, with what they have said; `told` has what they wait for.
        agreed: pairs of connections that wait, and have said what may be together in one run.
        pairs: (a, b): process a says that it is connected to process b.
        missed: members whose place another process claims, with the reason.
        asked_at: when the reports were asked for; None if no loss is in hand.
        claims: numbers that commands have claimed, by connection.
        leave_asks: commands that wait for a region to hear that it is to leave.
        alone_since: since when no member is connected.
        away: since when each of the expected and of the newcomers is not connected.
        here_at: when processes were introduced to each other once more.
    """

    name: str
    run: str = ""
    generations: tuple[Generation, ...] = ()
    earlier: tuple[str, ...] = ()
    terms: Terms = Terms(count=1)
    compared: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    lanes: Mapping[Member, Lanes] = field(default_factory=dict)
    tokens: Mapping[Member, str] = field(default_factory=dict)
    losses: int = 0
    lost: frozenset[int] = frozenset()
    decisions: tuple[Decided, ...] = ()
    changes: int = 0
    applied: int = 0
    announced: tuple[Change, ...] = ()
    tickets: int = 0
    ended: Bye | None = None
    electors: tuple[Member, ...] = ()
    uncalled: frozenset[Member] = frozenset()
    leavers: frozenset[Member] = frozenset()
    hellos: Mapping[int, Hello] = field(default_factory=dict)
    told: Mapping[int, Waiting] = field(default_factory=dict)
    seats: Mapping[int, Seat] = field(default_factory=dict)
    newcomers: Mapping[Member, Newcomer] = field(default_factory=dict)
    agreed: frozenset[tuple[int, int]] = frozenset()
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
    here_at: float = 0.0

    @property
    def generation(self) -> Generation:
        return self.generations[-1] if self.generations else NO_GENERATION

    @property
    def has_majority(self) -> bool:
        """Whether most of the electors have called; of just half of them, the lowest must be one. Or all others have died: new
        processes of their regions are there.

        Who calls a coordinator heeds no other one with a copy of its file. So at most one of them decides.
        """
        if self.uncalled <= self.missed.keys():
            return True
        called = [each for each in self.electors if each not in self.uncalled]
        return 2 * len(called) > len(self.electors) or (
            2 * len(called) == len(self.electors) and called[:1] == [*self.electors[:1]]
        )

    @property
    def trains(self) -> bool:
        """Whether there is a run that goes on."""
        return bool(self.run) and self.ended is None

    @cached_property
    def callers(self) -> Mapping[Member, int]:
        """The connection of each process that has one."""
        return {seat.member: who for who, seat in self.seats.items()}

    def seat_of(self, member: Member) -> int | None:
        """The connection of a process; None if it has none."""
        return self.callers.get(member)

    @cached_property
    def there(self) -> frozenset[Member]:
        """All processes of the run, as far as this coordinator knows."""
        return frozenset({*self.expected, *self.newcomers})

    @cached_property
    def expected(self) -> tuple[Member, ...]:
        """Members, and newcomers that are announced: who may take part in a transfer now or soon."""
        return _expected(self.members, self.announced, self.lost)


@lru_cache(maxsize=64)
def _expected(
    members: tuple[Member, ...], announced: tuple[Change, ...], lost: frozenset[int]
) -> tuple[Member, ...]:
    coming = {change.member for change in announced if change.kind == "join"}
    return tuple(sorted(each for each in {*members, *coming} if each.ticket not in lost))


_FIELDS = [each.name for each in fields(Run)]
DURABLE = tuple(_FIELDS[: _FIELDS.index("ended") + 1])
"""The fields of a run that must survive the coordinator's death before anybody hears of them."""


def durable(state: Run) -> tuple[Any, ...]:
    """The values of a run's `DURABLE` fields."""
    return tuple(getattr(state, name) for name in DURABLE)


def kept(state: Run) -> Run:
    """What is left of a run once its coordinator has died."""
    return Run(**{name: getattr(state, name) for name in DURABLE})


def restarted(
    state: Run, now: float, has_copies: bool, silent: Mapping[Member, float] = MappingProxyType({})
) -> Run:
    """What a coordinator knows that has read the durable state at this time. No process has called yet.

    Args:
        has_copies: whether another one may go on from the same state. If none can, this one decides whoever calls it.
        silent: seconds for which processes are known to have stood still until now.
    """
    newcomers = {
        each: Newcomer(announced=each in state.expected) for each in state.lanes if each not in state.members
    }
    return replace(
        kept(state),
        electors=state.members if has_copies else (),
        uncalled=frozenset(state.expected),
        newcomers=newcomers,
        alone_since=now,
        away={each: now - silent.get(each, 0.0) for each in (*state.expected, *newcomers)},
    )


def step(state: Run, event: Event, now: float) -> tuple[Run, tuple[Effect, ...]]:
    """The next state, and what is to be done, in order."""
    work = _Work(state, now)
    match event:
        case Came(who, message):
            work.came(who, message)
        case Ended(who, cut):
            work.ended(who, cut)
        case StoodStill(has_copies):
            work.stood_still(has_copies)
        case Tick():
            pass
    # a heartbeat of one says nothing of whom others wait for: the next tick looks at them
    work.proceed(event.who if isinstance(event, Came) and isinstance(event.message, Beat) else None)
    effects: list[Effect] = list(work.effects)
    if durable(work.state) != durable(state):
        effects.insert(0, Persist())
    return work.state, tuple(effects)


class _Work:
    """One step: the state as it changes, and the effects so far."""

    def __init__(self, state: Run, now: float) -> None:
        self.state, self.now = state, now
        self.effects: list[SendTo | CloseConnection] = []

    # -- what comes

    def came(self, who: int, message: FromRegion | FromCommand) -> None:
        match message:
            case Hello(region=region) if not 0 <= region < MOST_REGIONS:
                why = f"region {region} does not exist: regions are numbered 0 .. {MOST_REGIONS - 1}."
                self.refuse(who, "InputError", why)
            case Hello():
                # a process may call again before the end of its first connection is known
                others = {w: hello for w, hello in self.state.hellos.items() if hello.token != message.token}
                self.change(hellos={**others, who: message})
            case Back():
                self.back(who, message)
            case Claim() | AskLeave() | AskRecipe():
                self.command(who, message)
            case Beat() if who in self.state.seats:
                self.beat(self.state.seats[who], who, message)
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
            case Report():
                self.report(who, structs.replace(message, member=member))
            case Paired(member=other) if other in state.there:
                self.change(pairs=state.pairs | {(member, other)})
            case Ready() if member in state.newcomers:
                newcomer = replace(state.newcomers[member], ready=True)
                self.change(newcomers={**state.newcomers, member: newcomer})
            case Leave() if state.trains and member in state.members and state.terms.is_open:
                if not any(each.kind == "leave" and each.member == member for each in state.announced):
                    self.change(leavers=state.leavers | {member})
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
                elif to not in state.there:
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
        if seat is None:
            return
        reports = _without(state.reports, seat.member)  # who has died since it reported cannot go on
        asked_at = state.asked_at if reports or state.missed else None
        self.change(reports=reports, asked_at=asked_at)
        self.tell(Hears(member=seat.member, hears=False, cut=cut))
        if seat.member in state.newcomers:
            self.forget(seat.member)

    def stood_still(self, has_copies: bool) -> None:
        """Begin like a coordinator that has read its file."""
        self.effects += [CloseConnection(who) for who in self.state.seats]
        self.state = replace(
            restarted(self.state, self.now, has_copies),
            hellos=self.state.hellos,
            claims=self.state.claims,
        )

    def forget(self, newcomer: Member) -> None:
        """A newcomer has gone. One that is announced may be a member already: then its loss is decided like any other."""
        state = self.state
        self.change(newcomers=_without(state.newcomers, newcomer))
        if not state.newcomers[newcomer].announced:
            self.keep(each for each in state.lanes if each != newcomer)
            self.tell(Gone(member=newcomer))

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
                if not state.trains or not state.terms.is_open or seat is None:
                    self.send(who, Refuse(error="InputError", why=self.cannot_leave(region)))
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
                if not state.trains or not state.terms.is_open:
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
            case AskRecipe():
                told = state.compared.get(RECIPE)
                if not state.trains:
                    self.send(who, Refuse(error="MeetingError", why=f"run {state.name!r} does not train."))
                elif not state.terms.is_open:
                    why = (
                        f"run {state.name!r} ends when a region is lost: nobody can join it. To change that, stop its regions "
                        "(Ctrl-C), and start all with --resume and --set regions.on_loss=auto."
                    )
                    self.send(who, Refuse(error="InputError", why=why))
                elif not isinstance(told, Mapping):
                    why = (
                        f"run {state.name!r} was started by a script, which has no recipe. Start the same script here: "
                        "hf-cocodc launch --join --coordinator HOST:PORT SCRIPT."
                    )
                    self.send(who, Refuse(error="InputError", why=why))
                else:
                    self.send(who, RunRecipe(recipe=dict(told)))

    def cannot_leave(self, region: int) -> str:
        state = self.state
        if not state.trains:
            return f"no run named {state.name!r} trains here."
        if not state.terms.is_open:
            return (
                f"run {state.name!r} ends when a region is lost: none can leave it. Interrupt it (Ctrl-C), and all stop with a "
                "checkpoint."
            )
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
            heard_at=now,
            beat=beat,
            beat_at=now,
            is_told=False,
            moved_at=now if beat.step != seat.beat.step else seat.moved_at,
            op_at=now if beat.op != seat.beat.op else seat.op_at,
        )
        self.change(seats={**state.seats, who: seat})
        is_known = {*beat.members} <= state.lanes.keys()
        if beat.members and is_known and beat.losses == state.losses and beat.changes > state.applied:
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
            leavers=state.leavers - left,
        )
        self.keep(each for each in state.lanes if each not in left)

    def keep(self, members: Iterable[Member]) -> None:
        """Forget all processes but these."""
        state, stay = self.state, {*members}
        self.change(
            lanes={each: lanes for each, lanes in state.lanes.items() if each in stay},
            newcomers={each: rest for each, rest in state.newcomers.items() if each in stay},
            tokens={each: token for each, token in state.tokens.items() if each in stay},
            pairs=frozenset(pair for pair in state.pairs if stay.issuperset(pair)),
            uncalled=state.uncalled & stay,
        )

    def suspects(self, only: int | None) -> None:
        """Tell members, or `only` one connection's, that wait for one that seems to be lost."""
        state = self.state
        seats = state.seats if only is None else {only: state.seats[only]} if only in state.seats else {}
        waiting = [
            (who, seat, seat.beat.awaits)
            for who, seat in seats.items()
            if seat.beat.awaits is not None and not seat.is_told
        ]
        if not waiting:
            return
        told = dict(state.seats)
        expected, by_region = {*state.expected}, {each.region: each for each in reversed(state.expected)}
        for who, seat, region in waiting:
            other = by_region.get(region)
            if other is None or other == seat.member or seat.member not in expected:
                continue
            doubt = self.doubt(seat, other)
            if doubt is not None:
                how, why = doubt
                self.send(who, Suspect(member=other, op=seat.beat.op, how=how, why=why))
                # not again before its next heartbeat
                told[who] = replace(seat, is_told=True)
        if told != state.seats:
            self.change(seats=told)

    def doubt(self, seat: Seat, other: Member) -> tuple[str, str] | None:
        """How and why a member for which another waits seems to be lost.

        For how long it waits, it says itself: since its last heartbeat, it may have stood still.
        """
        terms, now, beat = self.state.terms, self.now, seat.beat
        at = self.state.seat_of(other)
        theirs = None if at is None else self.state.seats[at]
        # a coordinator that was started a moment ago has heard nobody for long
        silent_s = now - (self.state.away.get(other, now) if theirs is None else theirs.heard_at)
        if theirs is None:
            # in the middle of a transfer nobody is late: then it counts since when nothing has moved
            silent_s = min(silent_s, max(beat.waited_s, beat.idle_s))
        if silent_s > terms.timeout_s:
            return "silent", (
                f"it has given no heartbeat for {silent_s:.0f} s (regions.timeout_s={terms.timeout_s:g}): its process hangs, "
                "or the network between the regions is down"
            )
        # before its first step, one may read for long what another one does not have
        if terms.grace_s is not None and beat.step > 0 and not beat.coasts:
            late_s = beat.waited_s
            if terms.grace_is_auto:  # training may have waited for another region before, or for the link
                late_s = min(late_s, beat.blocked_s or 0.0)
            if late_s > terms.grace_s:
                return "late", f"it is late by more than {terms.grace_s:g} s (regions.grace_s)"
        if theirs is None:
            return None
        stuck_s = min(now - theirs.moved_at, beat.waited_s)
        if stuck_s > terms.stuck_timeout_s:
            return "stuck", (
                f"it is alive, but has been stuck at step {theirs.beat.step} for {stuck_s:.0f} s "
                f"(regions.stuck_timeout_s={terms.stuck_timeout_s:g})"
            )
        idle_s = min(beat.idle_s, now - theirs.op_at)
        # one that waits for a third region, or for nobody, has nothing to send yet: it may encode for long
        is_mutual = beat.op and theirs.beat.op >= beat.op and theirs.beat.awaits == seat.member.region
        if is_mutual and idle_s > terms.timeout_s:
            return "cut", (
                f"both are alive, and nothing of what they send each other has arrived for {idle_s:.0f} s "
                f"(regions.timeout_s={terms.timeout_s:g}): the network between them is down"
            )
        return None

    # -- losses

    def report(self, who: int, report: Report) -> None:
        state = self.state
        if report.number < state.losses:
            self.catch_up(who, report.number)
        elif report.number == state.losses:
            # also once one member has ended: another one may still wait for its last transfer
            missed = {**state.missed, **self.also_missed(state.seats[who], report)}
            self.change(reports={**state.reports, report.member: report}, missed=missed)
            self.ask()

    def also_missed(self, seat: Seat, report: Report) -> dict[Member, str]:
        """Others that the reporter would miss in the same transfer, one time-out after the other."""
        found = {}
        for other in self.state.expected if report.lost else ():
            at = self.state.seat_of(other)
            has_come = at is not None and self.state.seats[at].beat.op >= seat.beat.op
            if has_come or other in {seat.member, *report.lost, *self.state.uncalled}:
                continue
            doubt = self.doubt(seat if at is None else _before(seat, self.state.seats[at]), other)
            if doubt is not None:
                found[other] = doubt[1]
        return found

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
        if state.asked_at is None or not state.has_majority:
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
            if self.now < self.waits_until(member, member in missed):
                return
        self.take(settle(reports.values()))

    def waits_until(self, member: Member, is_missed: bool) -> float:
        """Until when a loss waits for the report of a member. A killed process costs nothing: its connection has ended."""
        state, terms, at = self.state, self.state.terms, self.state.seat_of(member)
        asked_at = state.asked_at or 0.0
        if member in state.missed:
            return 0.0
        if member in state.uncalled:
            return state.away.get(member, 0.0) + CALL_S
        if at is None:
            return 0.0 if is_missed else max(asked_at, state.away.get(member, 0.0)) + RETURN_S
        seat = state.seats[at]
        patience_s = terms.timeout_s
        if terms.grace_s is not None:
            patience_s = min(patience_s, max(terms.grace_s, LEAST_GRACE_S))
        # one that has come back was asked then
        return min(max(asked_at, seat.since), seat.heard_at) + patience_s

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
            reports={},
            missed={},
            asked_at=None,
        )
        self.keep(each for each in state.lanes if each not in decision.lost)
        self.tell(decided)
        if self.state.question is not None and not self.state.question.answer:
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
        """Announce who leaves, and newcomers that are connected to everyone, and ready."""
        state = self.state
        # who has not called may know other changes, from an earlier coordinator
        if not state.trains or state.uncalled:
            return
        if state.leavers:
            for member in sorted(state.leavers):
                self.announce("leave", member)
            self.change(leavers=frozenset())
        state = self.state
        if state.asked_at is not None or self.is_stopping():
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
            patience_s = CALL_S if held in state.uncalled else RETURN_S
            has_gone = self.now - state.away.get(held, self.now) >= patience_s
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
            host = host_of(state.lanes.get(held or rival or Member(-1, -1), ())) or "?"
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
        place = Place(me, hello.lanes)
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
            lanes={**state.lanes, me: hello.lanes},
            tokens={**state.tokens, me: _digest(hello.token)},
        )
        steps = [seat.beat.step for seat in state.seats.values()]
        self.send(
            who,
            Welcome(
                run=state.run,
                generation=state.generation,
                me=me,
                token=hello.token,
                joins=True,
                members=self.places(state.expected),
                others=self.places(each for each in state.newcomers if each not in state.expected),
                differences=_differences([state.compared, hello.compared]),
                losses=state.losses,
                step=max(steps, default=0),
            ),
        )

    # -- stopping

    def ask_to_stop(self, member: Member, why: str) -> None:
        state = self.state
        if not state.trains:
            return
        if state.question is not None and not state.question.answer:
            whys = {**state.question.whys, str(member.region): why}
            self.change(question=replace(state.question, whys=whys))
            return
        number = state.questions + 1
        self.change(
            questions=number,
            question=Question(number=number, since=self.now, whys={str(member.region): why}),
        )
        for who, seat in state.seats.items():
            if seat.member in state.expected:
                self.send(who, AskStop(number=number))

    def is_stopping(self) -> bool:
        """Whether all regions are asked to stop, or do so."""
        question = self.state.question
        return question is not None and (not question.answer or self.now - question.since < STOP_S)

    def answer_if_known(self) -> None:
        state = self.state
        if state.question is None or state.question.answer:
            return
        # a newcomer that is announced may be a member by the time at which the others stop
        if set(state.expected) <= state.question.steps.keys():
            self.answer(max(state.question.steps.values()))
        elif self.now - state.question.since > PROMISE_S:
            self.answer(0)

    def answer(self, at: int) -> None:
        question = self.state.question
        assert question is not None
        self.change(question=replace(question, answer=at) if at else None)
        for who, seat in self.state.seats.items():
            if seat.member in self.state.expected:
                self.send(who, StopAt(number=question.number, step=at, whys=dict(question.whys)))

    # -- the beginning, and coming back

    def proceed(self, signs: int | None) -> None:
        """What follows from the state as it is, whatever has happened. `signs`: the connection whose heartbeat it was, if any."""
        self.note_away()
        self.look_at_majority()
        self.decide()
        self.suspects(signs)
        self.answer_if_known()
        for who, hello in sorted(self.state.hellos.items()):
            if who in self.state.hellos:
                self.greet(who, hello)
        self.gather()
        self.introduce_again()
        self.admit()

    def look_at_majority(self) -> None:
        """Tell those who have called whether this coordinator can decide, if most members do not call."""
        state = self.state
        if state.has_majority:
            for who in state.seats.keys() & state.told.keys():
                self.change(told=_without(self.state.told, who))
                self.send(who, Resumed(generation=state.generation))
        elif any(self.now - state.away.get(each, self.now) >= CALL_S for each in state.uncalled):
            for who in state.seats:
                self.wait(
                    who,
                    f"it was started again, and has not heard of {_named(state.uncalled)} of run {state.name!r} since: a second "
                    "coordinator with a copy of its state file may have them. If they have died, start them again",
                )

    def note_away(self) -> None:
        """Note since when members of the run are not connected, and since when none is."""
        here = self.state.callers.keys()
        # these have not called since this coordinator was started
        for newcomer in self.state.newcomers.keys() - here:
            if self.now - self.state.away.get(newcomer, self.now) >= CALL_S:
                self.forget(newcomer)
        state = self.state
        away = {each: state.away.get(each, self.now) for each in state.there - here}
        if away != state.away:
            self.change(away=away)
        if not here.isdisjoint(state.members):
            if state.alone_since is not None:
                self.change(alone_since=None)
        elif state.run and state.alone_since is None:
            self.change(alone_since=self.now)

    def is_void(self) -> bool:
        """Whether a new run may take its place: no member is connected for a while. Until one begins, members may come back."""
        state = self.state
        begins_anew = {hello.region for hello in state.hellos.values() if not hello.join}
        may_call = any(each.region not in begins_anew for each in state.uncalled)
        patience_s = CALL_S if may_call else VOID_S
        return state.alone_since is not None and self.now - state.alone_since >= patience_s

    def greet(self, who: int, hello: Hello) -> None:
        """A new process: where does it belong?"""
        state = self.state
        if state.trains and state.terms.is_open and hello.terms.is_open and not self.is_void():
            self.welcome_newcomer(who, hello)
        elif hello.join:
            if state.ended is not None:
                self.refuse(who, *end_in_words(state.name, state.ended, "there is nothing to join"))
            elif state.trains and state.terms.is_open:
                self.wait(who, f"no region of run {state.name!r} is connected to this coordinator")
            elif state.trains:
                self.refuse(
                    who,
                    "InputError",
                    f"run {state.name!r} trains, and by its settings it ends when a region is lost: nobody can join it. Start it "
                    "with regions.on_loss=auto in every region.",
                )
            else:
                self.wait(who, f"no run {state.name!r} trains here")

    def gather(self) -> None:
        """Compare the regions that wait for each other, and begin once all are here."""
        state = self.state
        is_open = state.terms.is_open and any(hello.terms.is_open for hello in state.hellos.values())
        if state.trains and is_open and not self.is_void():
            return
        here: dict[int, int] = {}
        agreed: set[tuple[int, int]] = set()
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
            if first is not None and (here[first], who) not in state.agreed:
                one, two = sorted((first, hello.region))
                pair = {first: state.hellos[here[first]], hello.region: hello}
                wrong = first_difference(one, _said(pair[one]), two, _said(pair[two]))
                if wrong is not None:
                    for each in (*here.values(), who):
                        self.refuse(each, "HandshakeError", wrong)
                    return
                agreed.add((here[first], who))
            here[hello.region] = who
        if agreed:
            self.change(agreed=state.agreed | agreed)
        trains = state.trains and state.alone_since is None
        if not here:
            return
        self.tell_absent(here, trains)
        absent = set(range(state.hellos[here[min(here)]].terms.count)) - here.keys()
        coming = {each.region: each for each in state.newcomers}
        if absent and absent <= coming.keys() and state.trains and self.is_void():
            for region in absent:
                self.send_away(
                    coming[region],
                    "RunOver",
                    f"all members of run {state.name!r} have gone, and are started again. Start region {region} again, too.",
                )
        if not absent and not trains:
            self.begin(here)

    def tell_absent(self, here: Mapping[int, int], trains: bool) -> None:
        """Tell the regions that wait for each other, by their connections, who has not come. `trains`: others train."""
        told, why = dict(self.state.told), self.why_waiting()
        news: dict[int, Waiting] = {}  # many get the same
        for who in here.values():
            count = self.state.hellos[who].terms.count
            if count not in news:
                absent = set(range(count)) - here.keys()
                news[count] = Waiting(absent=tuple(sorted(absent)), why=why)
            if (news[count].absent or trains) and told.get(who) != news[count]:
                told[who] = news[count]
                self.send(who, news[count])
        if told != self.state.told:
            self.change(told=told)

    def why_waiting(self) -> str:
        """Why regions that wait for each other may do so in vain: a supervisor may have started one of them again."""
        state, ended = self.state, self.state.ended
        if state.trains and state.alone_since is None:
            return (
                f"run {state.name!r} trains here already, with other processes of its regions. If these are two runs, give "
                "each a name of its own (regions.run, --run or HF_COCODC_RUN, equal in its regions); if not, end the others"
            )
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
        why = f"run {state.name!r} has been begun anew."
        for who in state.seats:  # where the last run has ended, its regions may still be about to
            self.send(who, Refuse(error="RunOver", why=why) if state.trains else Waiting(why=why))
        # the same processes may have begun a run before, and have never heard of it
        name = _digest(state.run, *(hello.token for hello in hellos.values()))
        self.state = replace(
            Run(name=state.name, claims=state.claims),
            run=f"run-{name[:12]}",
            generations=(Generation(state.generation.number + 1, name[12:24]),),
            earlier=(*state.earlier, state.run)[-_KEPT_RUNS:] if state.run else (),
            terms=hellos[min(hellos)].terms,
            compared=hellos[min(hellos)].compared,
            members=members,
            lanes={member: hellos[member.region].lanes for member in members},
            tokens={member: _digest(hellos[member.region].token) for member in members},
            tickets=state.tickets + len(members),
            questions=state.questions,
            hellos={who: hello for who, hello in state.hellos.items() if who not in here.values()},
            seats={here[member.region]: self.seat(member) for member in members},
        )
        places, differences = self.places(members), _differences([each.compared for each in hellos.values()])
        for member in members:
            self.send(
                here[member.region],
                Welcome(
                    run=self.state.run,
                    generation=self.state.generation,
                    me=member,
                    token=hellos[member.region].token,
                    joins=False,
                    members=places,
                    differences=differences,
                ),
            )

    def back(self, who: int, back: Back) -> None:
        """A process that was connected before."""
        state, member = self.state, back.member
        if back.run in state.earlier:
            self.refuse(
                who,
                "RunOver",
                f"run {state.name!r} has been begun anew while region {member.region} was away.",
            )
        elif back.run != state.run:
            self.wait(
                who,
                f"this coordinator does not know run {state.name!r} as region {member.region} trains in it: its state file is "
                "lost, or another one",
            )
        elif state.ended is not None and member not in state.expected:
            if member.ticket in state.lost:
                away = f"that was while region {member.region} was away"
                kind, why = end_in_words(state.name, state.ended, away)
                # "RunOver" tells the members of a run that ends with any loss that another one has its name: they train on
                is_lost = kind == "RunOver" and not state.terms.is_open
                self.refuse(who, "LeftBehind" if is_lost else kind, why)
            else:
                self.send(who, _over(state.ended))
        elif member.ticket in state.lost:
            self.refuse(who, "LeftBehind", "the others have gone on without it")
        elif member not in state.lanes:
            # others have heard that it has gone, and connect to it no more
            self.refuse(who, "LeftBehind", f"the others have taken leave of region {member.region}")
        elif state.tokens.get(member) != _digest(back.token):
            self.refuse(who, "LeftBehind", f"another process is region {member.region} of run {state.name!r}")
        elif (
            back.generation not in state.generations
            or back.losses > state.losses
            or back.changes > state.changes
        ):
            self.wait(
                who,
                f"another coordinator has served run {state.name!r} since the state file of this one was written: it is an old "
                "copy, or two coordinators run",
            )
        else:
            self.seat_again(who, back)

    def seat_again(self, who: int, back: Back) -> None:
        """A member or a newcomer is connected again."""
        state, member = self.state, back.member
        old = state.seat_of(member)
        self.change(
            seats={**_without(state.seats, old), who: self.seat(member)},
            uncalled=state.uncalled - {member},
        )
        if member not in state.newcomers and member not in state.members:
            newcomer = Newcomer(announced=member in state.expected)
            self.change(newcomers={**state.newcomers, member: newcomer})
        self.tell(Hears(member=member, hears=True))
        for other in state.expected:  # this coordinator may have come back without hearing of one
            if self.state.seat_of(other) is None:
                self.send(who, Hears(member=other, hears=False, cut=other in self.state.uncalled))
        self.send(who, Resumed(generation=state.generation))
        self.catch_up(who, back.losses)
        for change in state.announced:
            self.send(who, Announce(generation=state.generation, change=change))
        if state.asked_at is not None and member in state.expected:
            self.send(who, Ask(number=state.losses))
        self.show_newcomers()

    def introduce_again(self) -> None:
        """Introduce newcomers once more to processes to which they are not connected: the network may have been down."""
        state = self.state
        if not state.newcomers or self.now - state.here_at < HERE_S:
            return
        self.change(here_at=self.now)
        waited = [each for each in state.seats.values() if self.now - each.since >= HERE_S]
        # one that has left may still be connected
        seats = {each.member: state.callers[each.member] for each in waited if each.member in state.lanes}
        for newcomer in state.newcomers.keys() & seats.keys():
            for other in seats.keys() - {newcomer}:
                if not {(newcomer, other), (other, newcomer)} <= state.pairs:
                    self.send(seats[other], Here(place=self.place(newcomer)))
                    self.send(seats[newcomer], Here(place=self.place(other)))

    def show_newcomers(self) -> None:
        """Tell all of all newcomers: some may have missed it, or this coordinator has forgotten who is connected to whom."""
        for newcomer in self.state.newcomers:
            self.tell(Here(place=self.place(newcomer)))

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
        return tuple(map(self.place, sorted(members)))

    def place(self, member: Member) -> Place:
        return Place(member, self.state.lanes[member])


def _named(members: Iterable[Member]) -> str:
    return " and ".join(f"region {each.region}" for each in sorted(members))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]


def end_in_words(name: str, ended: Bye | Over, why: str) -> tuple[str, str]:
    """The name of the error of a region that comes to a run that has ended, or back to it, and its words: how and where the run
    has ended, and `why` the region hears it.
    """
    where = f" Its model is at {ended.place}." if ended.place else ""
    kind = "RunFinished" if ended.how == "finished" else "RunOver"
    return kind, f"run {name!r} has {ended.how} at step {ended.step}: {why}.{where}"


def _over(bye: Bye) -> Over:
    return Over(how=bye.how, step=bye.step, place=bye.place)


def _said(hello: Hello) -> dict[str, Any]:
    """What regions compare, with the number of regions."""
    return {"regions.count": hello.terms.count, **hello.compared}


def _differences(compared: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(
        short(sentence, _LONGEST_SENTENCE) for sentence in side_by_side(compared)[:_MOST_DIFFERENCES]
    )


def _before(seat: Seat, other: Seat) -> Seat:
    """A member that waits, as it was at the last heartbeat of another one, which may have come since."""
    beat, earlier_s = seat.beat, max(seat.beat_at - other.beat_at, 0.0)
    blocked_s = None if beat.blocked_s is None else max(beat.blocked_s - earlier_s, 0.0)
    return replace(
        seat,
        beat=structs.replace(beat, waited_s=max(beat.waited_s - earlier_s, 0.0), blocked_s=blocked_s),
    )


def _without(mapping: Mapping[Any, Any], key: Any) -> Mapping[Any, Any]:
    return {each: value for each, value in mapping.items() if each != key} if key in mapping else mapping
