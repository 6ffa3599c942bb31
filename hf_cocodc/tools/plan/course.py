"""The course of a training over a link, event by event: a method's schedule, and the times of steps, transfers and landings."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ...engine.account import Measurements
from ...link.base import Arrival
from ...link.records import Trailer
from ...parts.codecs.base import Result
from ...parts.schedules import Schedule, Send

WARM_UP, MEASURED = 3, 4
"""Rounds before the figures count, and rounds that count."""


class Cargo(NamedTuple):
    """Payload bytes that a region sends at a time: a fragment, or one layer of it.

    Attributes:
        early_s: seconds before the end of an inner step at which its outer gradient is known.
        late_s: seconds after the beginning of an inner step until which its landing can wait.
    """

    num_bytes: int
    early_s: float = 0.0
    late_s: float = 0.0


class Carried(NamedTuple):
    """When a transfer's mean is there, and the seconds that the link took, without waiting."""

    ready_s: float
    link_s: float


class Line(Protocol):
    """Carries transfers between the regions, one after the other."""

    def carry(self, part: Cargo, sent_s: float) -> Carried:
        """The transfer of a part that all regions send at this moment."""
        ...


class Work(NamedTuple):
    """What travels of a fragment, in this order; seconds of the training thread at a send, and at a landing without waiting."""

    parts: Sequence[Cargo]
    send_s: float = 0.0
    land_s: float = 0.0


class Course(NamedTuple):
    """How a training goes over a link, once the first rounds are over.

    Attributes:
        utilization: share of the time in which inner steps are made. What a run reports by this name is 1 - `blocked`: all time
            in which training does not wait for the link (`outer/compute_utilization`, the report, the terminal).
        blocked: share of the time in which training waits for the link.
        bytes_per_s: payload that a region sends.
        staleness: most inner steps between a send and its landing.
        needs: inner steps of overlap in which the slowest transfer would hide.
        in_flight: most transfers under way at a time.
        sends: transfers in a round of sync_interval inner steps.
    """

    utilization: float
    blocked: float
    bytes_per_s: float
    staleness: int
    needs: int
    in_flight: int
    sends: float


class _Journey(NamedTuple):
    carried: Sequence[Carried]
    trailer: Trailer


def mean(courses: Sequence[Course]) -> Course:
    """The mean of courses with the same steps: of their times, but the largest staleness, needs and in_flight."""
    seconds = [1 / each.utilization for each in courses]
    shares = [each / sum(seconds) for each in seconds]
    return Course(
        utilization=len(courses) / sum(seconds),
        blocked=sum(share * each.blocked for share, each in zip(shares, courses, strict=True)),
        bytes_per_s=sum(share * each.bytes_per_s for share, each in zip(shares, courses, strict=True)),
        staleness=max(each.staleness for each in courses),
        needs=max(each.needs for each in courses),
        in_flight=max(each.in_flight for each in courses),
        sends=sum(each.sends for each in courses) / len(courses),
    )


def course(
    schedule: Schedule, sync_interval: int, fragments: Sequence[Work], line: Line, step_s: float
) -> Course:
    """Play a schedule on a line: regions are equally fast, and an inner step takes `step_s` seconds.

    As in the engine, the schedule is asked after each inner step with events, and gets what regions would have agreed on. A
    low rank stays at its first value, and all fragments change alike.
    """
    run = _Run(schedule, fragments, line, step_s)
    run.play_until(WARM_UP * sync_interval)
    begin = run.mark()
    run.staleness, run.slowest_s = 0, 0.0
    run.play_until((WARM_UP + MEASURED) * sync_interval)
    end = run.mark()
    steps, seconds, blocked_s, num_bytes, sends = (b - a for a, b in zip(begin, end, strict=True))
    return Course(
        utilization=steps * step_s / seconds,
        blocked=blocked_s / seconds,
        bytes_per_s=num_bytes / seconds,
        staleness=run.staleness,
        needs=math.ceil(run.slowest_s / step_s - 1e-9),
        in_flight=run.in_flight,
        sends=sends / MEASURED,
    )


class _Run:
    """A training under way; `now` is in seconds."""

    def __init__(self, schedule: Schedule, fragments: Sequence[Work], line: Line, step_s: float) -> None:
        self._schedule, self._fragments, self._line, self._step_s = schedule, fragments, line, step_s
        self._state = schedule.init(len(fragments))
        self._measured = Measurements(0.0)
        self._measured.begin([1.0] * len(fragments))
        self._flying: dict[tuple[int, int], _Journey] = {}
        self.step = self.staleness = self.in_flight = 0
        self.now = self.slowest_s = 0.0
        self._blocked_s, self._num_bytes, self._sends = 0.0, 0, 0

    def mark(self) -> tuple[float, ...]:
        """Steps, seconds, blocked seconds, bytes and sends so far."""
        return self.step, self.now, self._blocked_s, self._num_bytes, self._sends

    def play_until(self, last: int) -> None:
        """Train to inner step `last`."""
        while self.step < last:
            following = min(max(self._schedule.next_event(self.step, self._state), self.step + 1), last)
            self.now += (following - self.step) * self._step_s
            self.step = following
            self._measured.note_step(0.0, self.now)
            self._hold_events()

    def _hold_events(self) -> None:
        events, self._state = self._schedule.events(self.step, self._measured.agreed, self._state)
        if not events:
            return
        self._measured.step_time_s = self._step_s
        for event in events:
            if isinstance(event, Send):
                self._send(event.fragment)
            else:
                self._land(event.fragment, event.sent_at)
        self._measured.leave_events(self.now)

    def _send(self, fragment: int) -> None:
        work = self._fragments[fragment]
        self.now += work.send_s
        carried = [self._line.carry(part, self.now - part.early_s) for part in work.parts]
        measured = self._measured
        trailer = Trailer(step_time_s=measured.step_time_s, sync_time_s=measured.sync_time_s)
        self._flying[fragment, self.step] = _Journey(carried, trailer)
        self.in_flight = max(self.in_flight, len(self._flying))
        self._num_bytes += sum(part.num_bytes for part in work.parts)
        self._sends += 1
        self.slowest_s = max(self.slowest_s, carried[-1].ready_s - self.now)

    def _land(self, fragment: int, sent_at: int) -> None:
        work = self._fragments[fragment]
        flight = self._flying.pop((fragment, sent_at), None)
        if flight is not None:
            needed = zip(work.parts, flight.carried, strict=True)
            waited = max(max(each.ready_s - part.late_s for part, each in needed) - self.now, 0.0)
            self.now += waited
            self._blocked_s += waited
            self.staleness = max(self.staleness, self.step - sent_at)
            self._measured.hear(fragment, _arrival(flight))
        self.now += work.land_s  # also where nothing was sent, and a mean of zero lands


def _arrival(flight: _Journey) -> Arrival:
    """What the engine's measurements read of an arrival: times and trailers, and that its values have not changed."""
    nothing: Any = None
    seconds = sum(each.link_s for each in flight.carried)
    return Arrival(Result(nothing, nothing, {}), (flight.trailer,), 0, seconds, 1.0, (0,), nothing)
