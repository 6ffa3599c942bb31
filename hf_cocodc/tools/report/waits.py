"""What a region did, and when: spans of time and transfers, from its journal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...run.journal import BEGINNINGS
from .journals import Event, RegionJournal, figure


class Activity(Enum):
    """What a region's training thread does. Training is all that the others are not: inner steps, data, logs."""

    TRAINING = "training"
    FOR_A_REGION = "waiting for another region"
    FOR_THE_LINK = "waiting for the link"
    HANDLING = "sending and landing"
    EVALUATING = "evaluating"
    SAVING = "saving"


class Span(NamedTuple):
    """From `begin` to `end` a region was busy with something."""

    begin: float
    end: float
    activity: Activity


@dataclass
class Flight:
    """A transfer as one region saw it; times are on the common axis.

    Attributes:
        landed_at: inner step of the landing; None while it is on its way.
        began: when the last region had sent it, and the link began to work; None if unknown.
        arrived: when the mean was here; None if unknown.
        landed: when the params had taken it in; None while it is on its way.
        blocked_s: seconds that training waited for it; `waited` is from when to when.
        last: the region that sent it last; None if unknown.
        late_s: the part of `blocked_s` that would not have been, had no region sent it later than this one.
        is_void: whether it changed nothing.
    """

    fragment: int
    sent_at: int
    landed_at: int | None
    sent: float
    began: float | None = None
    arrived: float | None = None
    landed: float | None = None
    blocked_s: float = 0.0
    waited: tuple[float, float] = (0.0, 0.0)
    bytes_sent: int = 0
    last: int | None = None
    late_s: float = 0.0
    is_void: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """The same in all regions."""
        return self.fragment, self.sent_at


@dataclass
class Story:
    """What one region did.

    Attributes:
        there: from when to when the region took part in the run; times are on the common axis.
        spans: what it did besides training, ordered by beginning; without landings until `blame` adds them.
        flights: its transfers, ordered by landing.
    """

    region: int
    there: list[tuple[float, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.there[-1][1] if self.there else 0.0


def sections(events: Sequence[Event]) -> list[Sequence[Event]]:
    """The events of each process of a region: from one start or resume to the next."""
    edges = [place for place, event in enumerate(events) if event["kind"] in BEGINNINGS]
    return [events[a:b] for a, b in zip(edges, [*edges[1:], len(events)], strict=True)]


def arrival_of(event: Event) -> float | None:
    """When the mean of a landing was here, by the journal's clock; None if the link cannot say."""
    rested = figure(event, "rested_s")
    return None if rested is None else event["time_s"] - rested


def story_of(journal: RegionJournal, offsets: Sequence[float]) -> Story:
    """What a region did. If time stood still, it did all at once.

    `offsets` has what to add to the times of each of its `sections` for the common axis.
    """
    story = Story(journal.region)
    for section, offset in zip(sections(journal.events), offsets, strict=True):
        _tell(story, section, offset)
    story.flights.sort(key=lambda flight: flight.sent if flight.landed is None else flight.landed)
    return story


def _tell(story: Story, section: Sequence[Event], offset: float) -> None:
    def at(event: Event) -> float:
        return float(event["time_s"] + offset)

    begin, end = at(section[0]), max(map(at, section))
    # a region that comes to others that train follows them first
    is_in = not section[0].get("joins")
    sends: dict[tuple[int, int], Event] = {}
    for event in section:
        kind = event["kind"]
        if kind == "join" and event["region"] == story.region:
            begin = begin if is_in else at(event)
            is_in = True
        elif not is_in:
            continue
        elif kind == "away":
            since = at(event) - event["held_s"]
            story.there.append((begin, max(since, begin)))
            sends.clear()
            is_in = False
        elif kind == "send":
            sends[event["fragment"], event["step"]] = event
            story.spans += _held(event, at(event))
        elif kind in ("land", "void"):
            flight = _flight(event, sends.pop((event["fragment"], event["sent_at"]), None), at)
            story.flights.append(flight)
        elif kind in ("evaluate", "save", "pull"):
            took = figure(event, "took_s") or 0.0
            doing = Activity.EVALUATING if kind == "evaluate" else Activity.SAVING
            blocked = min(figure(event, "blocked_s") or 0.0, took)
            since = at(event) - took
            story.spans += _spans(
                (since, since + blocked, Activity.FOR_THE_LINK), (since + blocked, at(event), doing)
            )
    if is_in:
        story.there.append((begin, max(begin, end)))
    for (fragment, step), event in sends.items():
        story.flights.append(Flight(fragment, step, None, at(event)))


def _flight(event: Event, send: Event | None, at: Callable[[Event], float]) -> Flight:
    landed = at(event)
    blocked = figure(event, "blocked_s") or 0.0
    bytes_sent = event.get("bytes_sent") or 0
    sent = landed if send is None else min(at(send), landed)
    flight = Flight(
        event["fragment"], event["sent_at"], event["step"], sent, landed=landed, blocked_s=blocked
    )
    flight.bytes_sent, flight.is_void = bytes_sent, event["kind"] == "void"
    took = max(figure(event, "took_s") or 0.0, blocked)
    flight.waited = (landed - took, landed - took + blocked)
    arrived, on_link = arrival_of(event), figure(event, "transfer_s") or 0.0
    if arrived is None:  # at the earliest when it can have been here
        arrived = min(event["time_s"], event["time_s"] - (landed - sent) + on_link)
    flight.arrived = min(landed + arrived - event["time_s"], landed)
    if send is not None:
        flight.arrived = max(flight.arrived, sent)
    flight.began = max(flight.arrived - on_link, sent if send is not None else -math.inf)
    return flight


def _held(event: Event, end: float) -> list[Span]:
    """What a send took; it may have waited for the transfer before it."""
    took, blocked = figure(event, "took_s") or 0.0, figure(event, "blocked_s") or 0.0
    took = max(took, blocked)
    edge = end - took + blocked
    return _spans((end - took, edge, Activity.FOR_THE_LINK), (edge, end, Activity.HANDLING))


def _landing(flight: Flight) -> list[Span]:
    """What a landing took: waiting for a late region, waiting for the link, and the landing itself."""
    begin, end = flight.waited
    if flight.began is None or flight.landed is None:
        return []
    edge = begin + flight.late_s
    return _spans(
        (begin, edge, Activity.FOR_A_REGION),
        (edge, end, Activity.FOR_THE_LINK),
        (end, flight.landed, Activity.HANDLING),
    )


def _spans(*spans: tuple[float, float, Activity]) -> list[Span]:
    """Those that took time, beyond what rounding leaves: journals have microseconds."""
    return [Span(*each) for each in spans if each[1] - each[0] > 5e-7]


def blame(stories: Sequence[Story]) -> None:
    """Find the region that sent each transfer last, from the sends of all; add what landings waited for to `spans`."""
    sent: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for story in stories:
        for flight in story.flights:
            sent.setdefault(flight.key, []).append((flight.sent, story.region))
    for story in stories:
        for flight in story.flights:
            came = sent[flight.key]
            flight.last = max(came)[1] if len(came) > 1 else None
            if flight.began is not None and flight.last != story.region:
                flight.late_s = min(flight.blocked_s, max(flight.began - flight.sent, 0.0))
            story.spans += _landing(flight)
        story.spans.sort(key=lambda span: span.begin)


def waits(story: Story) -> list[tuple[float, float, Flight]]:
    """From when to when training waited, and for which transfer: the longest first."""
    blocked = [(*flight.waited, flight) for flight in story.flights if flight.blocked_s > 0]
    return sorted(blocked, key=lambda wait: wait[0] - wait[1])
