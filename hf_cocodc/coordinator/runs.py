"""All runs of one coordinator: feeds the rules of each, carries out what they want, and forgets old ones."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from ..errors import short
from ..net.awake import Clock
from ..net.members import Member
from ..settings.regions import HOW_LONG
from .messages import (
    AskStop,
    Back,
    Bye,
    FromCommand,
    FromRegion,
    LeaveNow,
    Note,
    Refuse,
    Resumed,
    StopAt,
    ToRegion,
    Waiting,
    host_of,
)
from .rules import (
    Came,
    CloseConnection,
    Effect,
    Ended,
    Event,
    Persist,
    Run,
    Seat,
    SendTo,
    StoodStill,
    Tick,
    restarted,
    step,
)
from .state import State

logger = logging.getLogger(__name__)

_LONGEST = 600

_UNHEARD_S = 2.0
"""A process that has sent nothing for so long is compared as it was."""
_FROZEN_S = 0.5
"""If the process stood still for longer, what has arrived meanwhile is read before anything is judged."""
_STOOD_S = 10.0
"""If it stood still for longer, another coordinator may serve its members: they drop it after 15 s."""
_KEPT_S = 24 * 3600.0
_MOST_KEPT = 1000
"""Runs without a connection that are remembered."""


def lines(before: Run, event: Event, after: Run, effects: Iterable[Effect]) -> list[str]:
    """One line for each thing that has happened to a run in one step."""
    sentences = [*_said(before, event), *_lines(before, event, after, effects)]
    return [short(f"run {after.name!r}: {line}", _LONGEST) for line in sentences]


def regions(members: Iterable[Member]) -> str:
    """
    >>> regions([Member(1, 4), Member(0, 2)])
    'regions 0, 1'
    """
    numbers = sorted({member.region for member in members})
    return f"region{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers)) or '(none)'}"


def _said(before: Run, event: Event) -> Iterator[str]:
    """What a region says of its own end."""
    match event:
        case Came(who, Note(text=text)) if who in before.seats:
            yield f"region {before.seats[who].member.region} says: {text}"
        case Came(who, Bye(how=how, step=at)) if who in before.seats:
            yield f"region {before.seats[who].member.region} ends at step {at} ({how})"


def _lines(before: Run, event: Event, after: Run, effects: Iterable[Effect]) -> Iterator[str]:
    has_begun = bool(after.run) and after.run != before.run
    if has_begun:
        where = ", ".join(sorted({host_of(each) for each in after.lanes.values()}))
        yield f"{regions(after.members)} have met, from {where}; generation {after.generation.number}"
    yield from _waiting(before, after)
    if before.run == after.run:
        yield from _changes(before, after)
    yield from _connections(before, after, has_begun)
    yield from _messages(after, effects, isinstance(event, Came) and isinstance(event.message, Back))
    if after.ended is not None and before.ended is None:
        place = f"; the model is at {after.ended.place}" if after.ended.place else ""
        yield f"ended at step {after.ended.step} ({after.ended.how}){place}"


def _waiting(before: Run, after: Run) -> Iterator[str]:
    for who, hello in after.hellos.items():
        if who not in before.hellos:
            does = "wants to join" if hello.join else f"of {hello.terms.count} waits for the others"
            yield f"region {hello.region} {does}, from {host_of(hello.lanes)} ({hello.machine})"


def _changes(before: Run, after: Run) -> Iterator[str]:
    """Losses, joins and leaves."""
    if after.losses > before.losses:
        for decided in after.decisions:
            if decided.decision.number >= before.losses:
                for member, why in zip(decided.decision.lost, decided.whys, strict=False):
                    yield f"region {member.region} is lost: {why}"
        yield f"{regions(after.members)} {'goes' if len(after.members) == 1 else 'go'} on"
        return
    come, gone = set(after.members) - set(before.members), set(before.members) - set(after.members)
    if come:
        yield f"{regions(come)} joined; members: {regions(after.members)}"
    if gone:
        yield f"{regions(gone)} left; members: {regions(after.members)}"
    known = {change.number for change in before.announced}
    for change in after.announced:
        if change.number not in known:
            yield f"region {change.member.region} {'comes in' if change.kind == 'join' else 'leaves'} (change {change.number})"


def _connections(before: Run, after: Run, has_begun: bool) -> Iterator[str]:
    """Processes that are connected now, or no longer."""
    if after.asked_at is not None and before.asked_at is None and after.reports:
        missed = {member for report in after.reports.values() for member in report.lost} | {*after.missed}
        reporter = regions(after.reports)
        yield f"{reporter} missed {regions(missed)}: asking the others"
    here = {seat.member for seat in after.seats.values()}
    for seat in before.seats.values():
        if seat.member not in here and seat.member in after.expected and after.ended is None:
            yield f"region {seat.member.region} has no connection to this coordinator any more"
    if not has_begun:
        for member in after.newcomers.keys() - before.newcomers.keys():
            yield f"region {member.region} is a newcomer, with ticket {member.ticket}"
    for member in before.newcomers.keys() - after.newcomers.keys() - set(after.members):
        yield f"region {member.region}, which wanted to join, has gone"


def _messages(after: Run, effects: Iterable[Effect], calls_again: bool) -> Iterator[str]:
    asked = answered = False
    for effect in effects:
        match effect:
            case SendTo(message=Refuse(why=why)):
                yield f"refused: {why}"
            case SendTo(message=Waiting(why=why)) if calls_again:
                yield (
                    f"{why}. The region trains on; once a loss is to be decided, it waits for that, then ends ({HOW_LONG})"
                )
            case SendTo(to=to, message=Resumed()) if to in after.seats:
                yield f"region {after.seats[to].member.region} is back"
            case SendTo(to=to, message=LeaveNow()) if to in after.seats:
                yield f"region {after.seats[to].member.region} is asked to leave"
            case SendTo(message=AskStop()) if not asked and after.question is not None:
                asked = True
                yield f"asked to stop: {'; '.join(f'region {r}: {why}' for r, why in after.question.whys.items())}"
            case SendTo(message=StopAt(step=at)) if not answered:
                answered = True
                yield f"stops at step {at}" if at else "has agreed on no step at which to stop"


@dataclass(frozen=True)
class Lost:
    """A region without which the others have gone on: the inner step that it had said last, if it had; since when; and why."""

    step: int | None
    since: float
    why: str


def overview(
    state: Run,
    now: float,
    gone: Mapping[Member, Seat],
    lost: Mapping[int, Lost] = MappingProxyType({}),
) -> dict[str, Any]:
    """A run as JSON can express it. `gone`: members without a connection, as they were heard of last; `lost`: by region."""
    seats = {member: seat for member, seat in gone.items() if member in state.members}
    seats.update({seat.member: seat for seat in state.seats.values()})
    newest = max((seat for seat in seats.values()), key=lambda seat: seat.beat.landed_at, default=None)
    has_landed = newest is not None and newest.beat.landed_at >= 0
    connected = {seat.member for seat in state.seats.values()}
    return {
        "run": state.run,
        "name": state.name,
        "phase": phase(state),
        "epoch": state.losses + state.applied,
        "losses": state.losses,
        "members": [
            _member(member, seats.get(member), member in connected, seats, state, now)
            for member in state.members
        ],
        "newcomers": [
            {
                "region": member.region,
                "ticket": member.ticket,
                "address": host_of(state.lanes.get(member, ())),
            }
            for member in sorted(state.newcomers)
            if member not in state.members
        ],
        "lost": [
            {"region": region, "step": each.step, "since_s": now - each.since, "why": each.why}
            for region, each in sorted(lost.items())
            if region not in {member.region for member in state.newcomers}
        ],
        "waiting": sorted(hello.region for hello in state.hellos.values()),
        "elastic": state.terms.is_open,
        "count": state.terms.count,
        "least": state.terms.least,
        "most": state.terms.most,
        "max_steps": max((seat.beat.max_steps for seat in seats.values()), default=0) or None,
        "landed_at": newest.beat.landed_at if newest and has_landed else None,
        "cosine": newest.beat.cosine if newest and has_landed else None,
        "landed_s": newest.beat.landed_s + now - newest.beat_at if newest and has_landed else 0.0,
        "ended": state.ended
        and {"how": state.ended.how, "step": state.ended.step, "place": state.ended.place},
    }


def phase(state: Run) -> str:
    """What a run does: "gathering" its regions, "trains", "silent" (no member is connected) or "ended"."""
    if state.ended is not None and not state.hellos:
        return "ended"
    if not state.trains:
        return "gathering"
    if state.alone_since is not None:
        return "silent"
    return "trains"


def _member(
    member: Member,
    seat: Seat | None,
    is_connected: bool,
    seats: Mapping[Member, Seat],
    state: Run,
    now: float,
) -> dict[str, Any]:
    doing = "" if seat is None else seat.beat.doing
    if not is_connected:
        doing = "is not connected to the coordinator"
    return {
        "region": member.region,
        "ticket": member.ticket,
        "address": host_of(state.lanes.get(member, ())),
        "step": 0 if seat is None else seat.beat.step,
        "behind": 0 if seat is None else _behind(seat, seats, now),
        "moved_s": 0.0 if seat is None else now - seat.moved_at,
        "samples": None if seat is None else seat.beat.samples or None,
        "awaits": None if seat is None else seat.beat.awaits,
        "doing": doing,
        "heard_s": None if seat is None else now - seat.heard_at,
    }


def _behind(seat: Seat, seats: Mapping[Member, Seat], now: float) -> int:
    """Inner steps that a member is behind, as far as that is certain: others may have said theirs a moment later."""
    is_heard = now - seat.beat_at <= _UNHEARD_S
    ahead = [each.beat.step for each in seats.values() if not is_heard or each.beat_at <= seat.beat_at]
    return max((step - seat.beat.step for step in ahead), default=0)


@dataclass(eq=False)
class Hosted:
    """A run at this coordinator.

    Attributes:
        key: the id of its secret; runs of different secrets never see each other.
        idle_since: since when it has no connection.
        gone: members without a connection, as they were heard of last.
        lost: regions without which the others have gone on, and that are not back.
        held: for each state that is being written, what is to be said once it is on the disk.
    """

    key: str
    state: Run
    connections: set[int] = field(default_factory=set)
    idle_since: float = 0.0
    gone: dict[Member, Seat] = field(default_factory=dict)
    lost: dict[int, Lost] = field(default_factory=dict)
    held: deque[list[Callable[[], None]]] = field(default_factory=deque)

    def do(self, work: Callable[[], None]) -> None:
        """Say something, once what was decided before is on the disk."""
        if self.held:
            self.held[-1].append(work)
        else:
            work()

    @property
    def is_nothing(self) -> bool:
        """Whether nothing has begun, and nobody is there."""
        return not self.state.run and not self.connections


class Runs:
    """The runs of one coordinator, by the id of their secret and their name.

    Args:
        say: takes a line for the log.
        fail: called with the error if the state cannot be written. Nothing may be sent after that.
        close: ends a connection, soon.
        later: does the first function, in order, without holding this thread; then calls the second one in it, with any error.
        file: keeps what must survive this process; None if nothing must.
    """

    def __init__(
        self,
        send: Callable[[int, ToRegion], None],
        say: Callable[[str], None],
        fail: Callable[[OSError], None],
        close: Callable[[int], None],
        later: Callable[[Callable[[], None], Callable[[BaseException | None], None]], None],
        file: State | None,
    ) -> None:
        self._send, self._say, self._fail, self._close = send, say, fail, close
        self._later, self._file = later, file
        self._has_copies = file is None or file.has_copies
        self._clock, self._has_jumped = Clock(), False
        self._hosted: dict[tuple[str, str], Hosted] = {}
        self._has_failed = False
        now = self._now()
        for key, state in [] if file is None else file.runs:
            run = restarted(state, now, self._has_copies, file.silent(state) if file is not None else {})
            self._hosted[key, state.name] = Hosted(key, run, idle_since=now)

    def come_in(self, key: str, name: str, who: int) -> Hosted:
        """The run of this name, with one more connection."""
        hosted = self._hosted.get((key, name))
        if hosted is None:
            hosted = Hosted(key, Run(name=name))
            self._hosted[key, name] = hosted
        hosted.connections.add(who)
        return hosted

    def came(self, hosted: Hosted, who: int, message: FromRegion | FromCommand) -> None:
        self._step(hosted, Came(who, message))

    def ended(self, hosted: Hosted, who: int, cut: bool = False) -> None:
        """A connection of a run has ended. `cut`: see `Ended`."""
        hosted.connections.discard(who)
        self._step(hosted, Ended(who, cut))
        hosted.idle_since = self._now()
        if hosted.is_nothing:
            self._forget(hosted)

    def _now(self) -> float:
        """Seconds of a clock that stands still while this process does. If it did for long, its runs begin as after a start."""
        stood_s = self._clock.look()
        self._has_jumped |= stood_s > _FROZEN_S
        if stood_s > _STOOD_S:
            for hosted in self._hosted.values():
                if hosted.state.trains:
                    self._step(hosted, StoodStill(self._has_copies))
        return self._clock.now

    def tick(self) -> None:
        """Time has passed. Call this several times a second."""
        self._now()
        if self._has_jumped:  # what has arrived meanwhile is read first
            self._has_jumped = False
            return
        for hosted in list(self._hosted.values()):
            if hosted.connections or hosted.state.trains:
                self._step(hosted, Tick())

    def expire(self) -> None:
        """Forget runs that nobody has asked for in a long time. Call this about once a minute."""
        now = self._now()
        idle = [each for each in self._hosted.values() if not each.connections]
        idle.sort(key=lambda each: each.idle_since, reverse=True)
        for place, hosted in enumerate(idle):
            if place >= _MOST_KEPT or now - hosted.idle_since > _KEPT_S:
                self._forget(hosted)

    def overview(self, key: str, name: str) -> list[dict[str, Any]]:
        """The runs with this secret, or the one with this name (see `overview`)."""
        now = self._now()
        return [
            overview(each.state, now, each.gone, each.lost)
            for each in self._hosted.values()
            if each.key == key and name in ("", each.state.name) and (each.state.run or each.state.hellos)
        ]

    def _forget(self, hosted: Hosted) -> None:
        del self._hosted[hosted.key, hosted.state.name]

    def _step(self, hosted: Hosted, event: Event) -> None:
        """Take the next state, and carry out what follows; unless the rules fail, or it cannot be written."""
        if self._has_failed:
            return
        now = self._now()
        before = hosted.state
        try:
            after, effects = step(before, event, now)
        except Exception:  # a fault of ours: other runs go on
            what = type(event.message if isinstance(event, Came) else event).__name__
            logger.exception("the rules fail for run %r at %s", before.name, what)
            return
        hosted.state = after
        for effect in effects:
            match effect:
                case Persist() if self._file is not None:
                    self._write(hosted, self._file, after)
                case SendTo(to, message):
                    hosted.do(partial(self._send, to, message))
                case CloseConnection(to):
                    hosted.do(partial(self._close, to))
        if (after.run, after.members) != (before.run, before.members):
            self._note_lost(hosted, before, now)
        try:
            for line in lines(before, event, after, effects):
                hosted.do(partial(self._say, line))
        except Exception:  # nor does a line for people hold the run
            logger.exception("no line can be written about run %r", before.name)
        if after.seats is not before.seats:
            self._note_gone(hosted, before)

    def _write(self, hosted: Hosted, file: State, state: Run) -> None:
        """Write a state. What the run is to say from now on is said once that is on the disk; other runs go on meanwhile."""

        def written(error: BaseException | None) -> None:
            if self._has_failed:
                return
            if error is not None:
                self._has_failed = True
                self._fail(error if isinstance(error, OSError) else OSError(0, str(error)))
                return
            for work in hosted.held.popleft():
                work()

        hosted.held.append([])
        self._later(lambda: file.write(hosted.key, state), written)

    def _note_lost(self, hosted: Hosted, before: Run, now: float) -> None:
        state = hosted.state
        steps = {each.member: each.beat.step for each in (*hosted.gone.values(), *before.seats.values())}
        whys = {
            member: why
            for decided in state.decisions
            for member, why in zip(decided.decision.lost, decided.whys, strict=False)
        }
        new = {each.region: Lost(steps.get(each), now, whys[each]) for each in before.members if each in whys}
        known = {**hosted.lost, **new} if state.run == before.run else {}
        here = {each.region for each in state.members}
        hosted.lost = {region: each for region, each in known.items() if region not in here}

    def _note_gone(self, hosted: Hosted, before: Run) -> None:
        here = {seat.member for seat in hosted.state.seats.values()}
        gone = {seat.member: seat for seat in before.seats.values() if seat.member not in here}
        if gone or hosted.gone:
            kept = {**hosted.gone, **gone}
            hosted.gone = {member: kept[member] for member in hosted.state.members if member in kept}
