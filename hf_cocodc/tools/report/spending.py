"""What the time of a run was spent on: sums, and shares over time."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...run.journal import BEGINNINGS
from .journals import Event, figure
from .runs import RunRecord
from .waits import Activity, Flight, Span, Story, waits

LEAST_S = 0.05
"""What takes less in every region gets no row."""
GIVEN_UP = "made again after a resume"
NOT_THERE = "not there"


class RegionTotals(NamedTuple):
    """What a region has by an event: bytes sent to all others together, and seconds for which its training was held."""

    bytes_sent: float = 0.0
    blocked_s: float = 0.0


def totals(events: Sequence[Event]) -> list[RegionTotals]:
    """The totals after each event.

    Each event says what it has added; some lines name the totals of their process, which hold more, such as broadcasts. The
    process of a region that has come back counts from 0; one that goes on from its own checkpoint does not. A process also
    counts how long it waited until it was `away`: the region was not in the run then.
    """
    running: list[RegionTotals] = []
    now = before = RegionTotals()
    away_s = 0.0
    for event in events:
        kind, named = event["kind"], figure(event, "bytes_sent")
        held_s = figure(event, "took_s" if kind in ("send", "land", "void") else "blocked_s")
        added = RegionTotals(named or 0.0 if kind in ("land", "void") else 0.0, held_s or 0.0)
        if kind in BEGINNINGS:
            before = now if named is not None and named < now.bytes_sent else RegionTotals()
            now = now._replace(bytes_sent=max(now.bytes_sent, before.bytes_sent + (named or 0.0)))
            away_s = 0.0
        elif kind == "away":
            away_s += event["held_s"]
        elif kind == "log":
            by_log = before.bytes_sent + (figure(event, "outer/bytes_sent") or 0.0)
            now = now._replace(bytes_sent=max(now.bytes_sent, by_log))
        elif kind == "finish":
            now = RegionTotals(
                max(now.bytes_sent, before.bytes_sent + (named or 0.0)),
                before.blocked_s + max(added.blocked_s - away_s, 0.0),
            )
        else:
            now = RegionTotals(now.bytes_sent + added.bytes_sent, now.blocked_s + added.blocked_s)
        running.append(now)
    return running


Row = tuple[str, list[float]]
"""What the time went into, and the seconds of each region."""


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in order, without overlaps.

    >>> union([(0, 2), (1, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def within(spans: Iterable[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """Seconds of the spans between each two edges: (len(edges) - 1,)."""
    knots, total = [-np.inf], [0.0]
    for begin, end in union(spans):
        knots += [begin, end]
        total += [total[-1], total[-1] + end - begin]
    return np.diff(np.interp(edges, knots[1:], total[1:])) if knots[1:] else np.zeros(len(edges) - 1)


def shares(story: Story, edges: np.ndarray) -> dict[Activity, np.ndarray]:
    """The share of each bin that a region spent on each activity; where it was not there, all are 0."""
    widths = np.diff(edges)
    there = within(story.there, edges)
    by_activity: dict[Activity, np.ndarray] = {}
    rest = there
    for activity in Activity:
        if activity is not Activity.TRAINING:
            own = within([span[:2] for span in story.spans if span.activity is activity], edges)
            own = np.minimum(own, rest)  # where two overlap, the first one counts
            rest = rest - own
            by_activity[activity] = own / widths
    return {Activity.TRAINING: rest / widths, **by_activity}


def spent(run: RunRecord) -> list[Row]:
    """What the seconds of each region went into, from the beginning of the run to its last recorded moment."""
    rows: dict[str, list[float]] = {}
    for place, story in enumerate(run.stories):
        for name, seconds in _spent(run, story).items():
            rows.setdefault(name, [0.0] * len(run.stories))[place] += seconds
    order = {name: number for number, name in enumerate(_order(rows))}
    seen = [row for row in rows.items() if max(row[1]) >= LEAST_S]
    return sorted(seen, key=lambda row: order[row[0]])


def _order(names: Iterable[str]) -> list[str]:
    late = sorted(name for name in names if name.startswith("waiting for region"))
    training, *others = (activity.value for activity in Activity)
    return [training, *late, *others, NOT_THERE, GIVEN_UP]


def _spent(run: RunRecord, story: Story) -> dict[str, float]:
    whole = max(run.end, 1e-9)
    of_whole = shares(story, np.array([0.0, whole]))
    spending = {activity.value: whole * float(share[0]) for activity, share in of_whole.items()}
    there = sum(spending.values())
    for region, seconds in _late(story).items():
        spending[f"waiting for region {region}"] = seconds
        spending[Activity.FOR_A_REGION.value] -= seconds
    journal = run.journals[run.stories.index(story)]
    is_lost = bool(run.found) and story.region not in run.found[-1].members
    away = (run.end if is_lost else story.end) - there
    if away > 1.0:
        spending[NOT_THERE] = away
    again = sum(max(each[-1]["time_s"] - each[0]["time_s"], 0.0) for each in journal.given_up)
    if again:
        spending[GIVEN_UP] = again
    return {name: seconds for name, seconds in spending.items() if seconds > 1e-9}


def _late(story: Story) -> dict[int, float]:
    """Seconds that training waited for each region that came last to a transfer."""
    late: dict[int, float] = {}
    for flight in story.flights:
        if flight.last is not None and flight.late_s:
            late[flight.last] = late.get(flight.last, 0.0) + flight.late_s
    return late


def longest_waits(run: RunRecord, most: int) -> list[tuple[int, float, float, Flight]]:
    """The longest waits of all regions: the region, from when to when, and the transfer."""
    candidates = [(story.region, *wait) for story in run.stories for wait in waits(story)[:most]]
    return sorted(candidates, key=lambda wait: wait[1] - wait[2])[:most]


def sent_over(story: Story, edges: np.ndarray) -> np.ndarray:
    """Bytes that a region sent between each two edges; a transfer's spread evenly over its time on the link."""
    flights = [f for f in story.flights if f.bytes_sent and f.landed is not None]
    if not flights:
        return np.zeros(len(edges) - 1)
    total = np.zeros(len(edges))
    for f in flights:
        end = f.landed if f.arrived is None else f.arrived
        begin = f.sent if f.began is None else f.began
        assert end is not None
        total += f.bytes_sent * np.clip((edges - begin) / max(end - begin, 1e-9), 0, 1)
    return np.diff(total)


def overlapping(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """The spans that lie at least partly in a window, cut to it."""
    return [
        Span(max(s.begin, begin), min(s.end, end), s.activity)
        for s in spans
        if s.end > begin and s.begin < end
    ]
