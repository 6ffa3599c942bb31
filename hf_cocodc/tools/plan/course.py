"""The course of a training over a link: sends and landings at their steps, and what training waits for."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

WARM_UP, MEASURED = 2, 2
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
        utilization: share of the time in which inner steps are made. What a run reports by this name also counts evaluation and
            saving as used (`outer/compute_utilization`, the report, the terminal).
        blocked: share of the time in which training waits for the link.
        bytes_per_s: payload that a region sends; sends_per_s: in so many transfers.
        staleness: most inner steps between a send and its landing.
        slowest_s: seconds of the slowest transfer by itself, with its wait for the line.
        needs: inner steps of overlap in which it would hide.
        in_flight: most transfers under way at a time.
    """

    utilization: float
    blocked: float
    bytes_per_s: float
    sends_per_s: float
    staleness: int
    slowest_s: float
    needs: int
    in_flight: int


class Rhythm(NamedTuple):
    """When fragments are sent, in inner steps.

    Attributes:
        interval: a round.
        sends: sends in a round, evenly spaced; the fragments take turns.
        together: all fragments are sent at each of them.
        overlap: inner steps between a send and its landing.
    """

    interval: int
    sends: int = 1
    together: bool = True
    overlap: int = 0


def course(rhythm: Rhythm, fragments: Sequence[Work], line: Line, step_s: float, late: float = 1.0) -> Course:
    """How a training with this rhythm goes: regions are equally fast, and an inner step takes `step_s` seconds.

    A transfer during which training goes on takes `late` times as long as the line says; the line is busy no longer.
    """
    run = _Run(rhythm.overlap, fragments, line, step_s, late)
    begin = end = run.mark()
    for number in range((WARM_UP + MEASURED) * rhythm.sends + 1):
        run.go_to(number * rhythm.interval // rhythm.sends)
        if number == WARM_UP * rhythm.sends:
            begin, run.slowest_s = run.mark(), 0.0
        end = run.mark()
        run.send(range(len(fragments)) if rhythm.together else [number % len(fragments)])
    steps, seconds, blocked_s, num_bytes, sends = (b - a for a, b in zip(begin, end, strict=True))
    return Course(
        utilization=steps * step_s / seconds,
        blocked=blocked_s / seconds,
        bytes_per_s=num_bytes / seconds,
        sends_per_s=sends / seconds,
        staleness=rhythm.overlap,
        slowest_s=run.slowest_s,
        needs=math.ceil(run.slowest_s / step_s - 1e-9),
        in_flight=run.in_flight,
    )


class _Journey(NamedTuple):
    work: Work
    sent_at: int
    carried: Sequence[Carried]


class _Run:
    """A training under way; `now` is in seconds."""

    def __init__(
        self, overlap: int, fragments: Sequence[Work], line: Line, step_s: float, late: float
    ) -> None:
        self._overlap, self._fragments, self._line, self._step_s = overlap, fragments, line, step_s
        self._more = late - 1 if overlap else 0.0
        self._flying: deque[_Journey] = deque()
        self._step = self.in_flight = self._num_bytes = self._sends = 0
        self.slowest_s = self._now = self._blocked_s = 0.0

    def mark(self) -> tuple[float, ...]:
        """Steps, seconds, blocked seconds, bytes and sends so far."""
        return self._step, self._now, self._blocked_s, self._num_bytes, self._sends

    def go_to(self, step: int) -> None:
        """Train to an inner step; what is due before it lands."""
        while self._flying and self._flying[0].sent_at + self._overlap < step:
            self._train_to(self._flying[0].sent_at + self._overlap)
            self._land(self._flying.popleft())
        self._train_to(step)

    def send(self, fragments: Sequence[int]) -> None:
        """Send fragments; then what is due at this step lands."""
        self._sends += len(fragments)
        for fragment in fragments:
            work = self._fragments[fragment]
            self._now += work.send_s
            carried = [self._line.carry(part, self._now - part.early_s) for part in work.parts]
            self._flying.append(_Journey(work, self._step, carried))
            self._num_bytes += sum(part.num_bytes for part in work.parts)
            self.slowest_s = max(self.slowest_s, carried[-1].ready_s - self._now)
        self.in_flight = max(self.in_flight, len(self._flying))
        while self._flying and self._flying[0].sent_at + self._overlap <= self._step:
            self._land(self._flying.popleft())

    def _train_to(self, step: int) -> None:
        self._now += (step - self._step) * self._step_s
        self._step = step

    def _land(self, journey: _Journey) -> None:
        needed = zip(journey.work.parts, journey.carried, strict=True)
        ready_s = max(each.ready_s + self._more * each.link_s - part.late_s for part, each in needed)
        waited_s = max(ready_s - self._now, 0.0)
        self._blocked_s += waited_s
        self._now += waited_s + journey.work.land_s
