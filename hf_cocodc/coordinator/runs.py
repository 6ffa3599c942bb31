"""All runs of one coordinator: feeds the rules of each, carries out what they want, and forgets old ones."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import short
from .hello import differences
from .messages import FromCommand, FromRegion, Hello, Member, ToRegion, Waiting, Ways
from .news import lines
from .overview import overview
from .rules import Came, Ended, Event, Persist, Run, Seat, SendTo, Tick, step
from .state import StateFile, with_time_to_return

logger = logging.getLogger(__name__)

_FROZEN_S = 1.0
"""Nobody looks at the clock for so long: the process stood still."""
_KEPT_S = 24 * 3600.0
_MOST_KEPT = 1000
"""Runs without a connection that are remembered."""
_APART_S = 5.0
_MOST_BOARDS = 100
_MOST_ON_BOARD = 64


class Clock:
    """Seconds of a clock that stands still while this process does.

    Attributes:
        has_jumped: whether the process stood still since somebody set this to False.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._lost_s = 0.0
        self.has_jumped = False

    def __call__(self) -> float:
        now = time.monotonic()
        if now - self._last > _FROZEN_S:
            self._lost_s += now - self._last
            self.has_jumped = True
        self._last = now
        return now - self._lost_s


@dataclass(eq=False)
class Hosted:
    """A run at this coordinator.

    Attributes:
        key: the id of its secret; runs of different secrets never see each other.
        connections: of regions and commands.
        idle_since: since when there is none.
        gone: members without a connection, as they were heard of last.
        waits_since: since when regions wait for each other.
        told_apart: pairs (connection, name of another run) that have heard that they may mean the same run.
        ways: by which way each process is connected to each region.
    """

    key: str
    state: Run
    connections: set[int] = field(default_factory=set)
    idle_since: float = 0.0
    gone: dict[Member, Seat] = field(default_factory=dict)
    waits_since: float | None = None
    told_apart: set[tuple[int, str]] = field(default_factory=set)
    ways: dict[Member, dict[int, str]] = field(default_factory=dict)

    def note_ways(self, who: int, told: Ways) -> None:
        """A process has told by which ways it is connected."""
        seat = self.state.seats.get(who)
        if seat is not None:
            there = {seat.member, *self.state.members}
            self.ways = {member: ways for member, ways in self.ways.items() if member in there}
            self.ways[seat.member] = dict(
                zip(told.regions, (short(each, 20) for each in told.ways), strict=False)
            )

    @property
    def is_nothing(self) -> bool:
        """Whether nothing has begun, and nobody is there."""
        return not self.state.run and not self.connections


class Runs:
    """Args:
    send: sends a message to connections.
    say: takes a line for the log.
    fail: called with the error if the state cannot be written. Nothing may be sent after that.
    file: keeps what must survive this process, and what did; None if nothing shall.
    assumed_lost: regions that an operator declares lost.
    """

    def __init__(
        self,
        send: Callable[[int, ToRegion], None],
        say: Callable[[str], None],
        fail: Callable[[OSError], None],
        file: StateFile | None = None,
        assumed_lost: Iterable[int] = (),
    ) -> None:
        self._send, self._say, self._fail, self._file = send, say, fail, file
        self._assumed_lost = frozenset(assumed_lost)
        self.clock = Clock()
        self._hosted: dict[tuple[str, str], Hosted] = {}
        self._boards: dict[tuple[str, str], dict[int, Any]] = {}
        self._has_failed = False
        now = self.clock()
        for key, state in [] if file is None else file.runs:
            found = replace(with_time_to_return(state, now), assumed_lost=self._assumed_lost)
            self._hosted[key, state.name] = Hosted(key, found, idle_since=now)

    def come_in(self, key: str, name: str, who: int) -> Hosted:
        """The run of this name, with one more connection."""
        hosted = self._hosted.get((key, name))
        if hosted is None:
            hosted = Hosted(key, Run(name=name, assumed_lost=self._assumed_lost))
            self._hosted[key, name] = hosted
        hosted.connections.add(who)
        return hosted

    def came(self, hosted: Hosted, who: int, message: FromRegion | FromCommand) -> None:
        self._step(hosted, Came(who, message))

    def ended(self, hosted: Hosted, who: int) -> None:
        """A connection of a run has ended."""
        hosted.connections.discard(who)
        self._step(hosted, Ended(who))
        hosted.idle_since = self.clock()
        if hosted.is_nothing:
            self._forget(hosted)

    def tick(self) -> None:
        """Time has passed: several times a second."""
        now = self.clock()
        if self.clock.has_jumped:  # what has arrived meanwhile is read first
            self.clock.has_jumped = False
            return
        for hosted in list(self._hosted.values()):
            if hosted.connections or hosted.state.trains:
                self._step(hosted, Tick())
            self._note_waiting(hosted, now)
        self._tell_apart(now)

    def expire(self) -> None:
        """Forget runs that nobody has asked for in a long time; about once a minute."""
        now = self.clock()
        idle = [each for each in self._hosted.values() if not each.connections]
        idle.sort(key=lambda each: each.idle_since, reverse=True)
        for place, hosted in enumerate(idle):
            if place >= _MOST_KEPT or now - hosted.idle_since > _KEPT_S:
                self._forget(hosted)

    def overview(self, key: str, name: str) -> list[dict[str, Any]]:
        """The runs with this secret, or the one with this name (see `overview.overview`)."""
        now = self.clock()
        return [
            overview(each.state, now, each.gone, each.ways)
            for each in self._hosted.values()
            if each.key == key and name in ("", each.state.name) and (each.state.run or each.state.hellos)
        ]

    def on_board(self, key: str, name: str, region: int, told: dict[str, Any]) -> dict[int, Any]:
        """Keep what a region's doctor tells, and return what all of this run have told."""
        board = self._boards.pop((key, name), {})
        board.pop(region, None)
        self._boards[key, name] = board = dict([*board.items(), (region, told)][-_MOST_ON_BOARD:])
        while len(self._boards) > _MOST_BOARDS:
            del self._boards[next(iter(self._boards))]
        return board

    def _forget(self, hosted: Hosted) -> None:
        del self._hosted[hosted.key, hosted.state.name]

    def _step(self, hosted: Hosted, event: Event) -> None:
        """Take the next state, and carry out what follows; unless the rules fail, or it cannot be written."""
        if self._has_failed:
            return
        before = hosted.state
        try:
            after, effects = step(before, event, self.clock())
        except Exception:  # a fault of ours: other runs go on
            what = type(event.message if isinstance(event, Came) else event).__name__
            logger.exception("the rules fail for run %r at %s", before.name, what)
            return
        for line in lines(before, event, after, effects):
            self._say(line)
        hosted.state = after
        for effect in effects:
            match effect:
                case Persist():
                    try:
                        if self._file is not None:
                            self._file.write(hosted.key, after)
                    except OSError as error:
                        self._has_failed = True
                        self._fail(error)
                        return
                case SendTo(to, message):
                    self._send(to, message)
        if after.seats is not before.seats:
            self._note_gone(hosted, before)

    def _note_gone(self, hosted: Hosted, before: Run) -> None:
        here = {seat.member for seat in hosted.state.seats.values()}
        gone = {seat.member: seat for seat in before.seats.values() if seat.member not in here}
        if gone or hosted.gone:
            kept = {**hosted.gone, **gone}
            hosted.gone = {member: kept[member] for member in hosted.state.members if member in kept}

    def _note_waiting(self, hosted: Hosted, now: float) -> None:
        if not _gathering(hosted.state):
            hosted.waits_since = None
            hosted.told_apart.clear()
        elif hosted.waits_since is None:
            hosted.waits_since = now

    def _tell_apart(self, now: float) -> None:
        """Tell regions of two runs with as many regions that both wait: they may have meant one name."""
        waiting = [
            each
            for each in self._hosted.values()
            if each.waits_since is not None and now - each.waits_since > _APART_S
        ]
        for one, other in itertools.permutations(waiting[:_MOST_ON_BOARD], 2):
            if one.key != other.key:
                continue
            for who, hello in _gathering(one.state).items():
                theirs = [
                    each for each in _gathering(other.state).values() if each.terms.count == hello.terms.count
                ]
                if theirs and (who, other.state.name) not in one.told_apart:
                    one.told_apart.add((who, other.state.name))
                    why = _other_run(one.state.name, hello, other.state.name, theirs[0])
                    self._send(who, Waiting(absent=_absent(one.state, hello), why=why))


def _gathering(state: Run) -> Mapping[int, Hello]:
    """Connections of regions that wait for the others."""
    return {} if state.trains else {who: hello for who, hello in state.hellos.items() if not hello.join}


def _absent(state: Run, hello: Hello) -> tuple[int, ...]:
    return tuple(sorted(set(range(hello.terms.count)) - {each.region for each in _gathering(state).values()}))


def _other_run(name: str, mine: Hello, other: str, theirs: Hello) -> str:
    """What another run at this coordinator has other than this one."""
    found = differences(mine.compared, theirs.compared)
    shown = "; ".join(f"{field} ({own} here, {there} there)" for field, own, there, _ in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f"Region {theirs.region} of {theirs.terms.count} of run {other!r} waits at this coordinator too, on host "
        f"{theirs.machine}; this is run {name!r}. It differs in {shown or 'nothing else'}{more}. If both belong to one run, "
        "give them the same name: set regions.run (--run, HF_COCODC_RUN) in every region."
    )
