"""The timeline of a run, on axes of matplotlib that others make: who trained, who waited, what was on its way."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .runs import RunRecord
from .spending import longest_waits, overlapping, shares
from .waits import Activity, Flight, Story

COLORS = {
    Activity.TRAINING: "#d5dee8",
    Activity.FOR_A_REGION: "#d55e00",
    Activity.FOR_THE_LINK: "#e69f00",
    Activity.HANDLING: "#cc79a7",
    Activity.EVALUATING: "#009e73",
    Activity.SAVING: "#0072b2",
}
"""Okabe and Ito's, which color-blind people can tell apart; training is pale, so that all else stands out."""
HATCHES = {
    Activity.FOR_A_REGION: "////",
    Activity.FOR_THE_LINK: "\\\\\\\\",
    Activity.EVALUATING: "....",
    Activity.SAVING: "xxxx",
}
"""Tell the activities apart without colors; short or usual ones have none."""
_HATCHED = "#00000066"
_Look = tuple[str, str | None]
PHASES = {"sent": "#b5b5b5", "on the wire": "#56b4e9", "arrived": "#f0e442"}
"""Of a transfer: sent, but not by all regions; on the wire; the mean is here, but has not landed."""
MOST_BINS = 240
MOST_FLIGHTS = 400
"""Most transfers of all regions that a window shows."""
_MOST_LANES = 8
_TRIES = 12
"""Most times that a window is narrowed: many transfers may have been sent at one moment."""
_FINEST = 1500
"""A window shows no span that is a smaller fraction of it."""
_INK = "#222222"
"""The page replaces it with the color of its text."""
_ON_BARS = "#111111"


class Unit(NamedTuple):
    """What an axis of time counts."""

    seconds: float
    label: str


def unit_of(run: RunRecord, span: float | None = None) -> Unit:
    """The unit for an axis of `span` seconds; of the whole run by default."""
    simulated = ", simulated" if run.start.get("timing") == "simulated" else ""
    span = run.end if span is None else span
    for seconds, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if span >= 3 * seconds:
            return Unit(seconds, f"time since the start ({name}{simulated})")
    return Unit(1.0, f"time since the start (seconds{simulated})")


class Window(NamedTuple):
    """A part of a run that is drawn transfer by transfer."""

    title: str
    begin: float
    end: float


def windows(run: RunRecord) -> list[Window]:
    """The parts of a run worth a look: around its longest wait, and the newest transfers."""
    flights = sorted((f for story in run.stories for f in story.flights), key=lambda flight: flight.sent)
    if not flights:
        return []
    width = _width(run, flights)
    parts = []
    for region, begin, end, _ in longest_waits(run, 1):
        room = max(0.75 * (end - begin), min(0.75 * width, 10 * (end - begin)))
        who = f"Around the longest wait: region {region}, {end - begin:.2f} s"
        parts.append(Window(who, begin - room, end + room))
    last = max(flight.sent if flight.landed is None else flight.landed for flight in flights)
    when = "At the end" if run.has_finished else "The newest transfers"
    parts.append(Window(when, last - 0.95 * width, last + 0.05 * width))
    return [_with_room(run, each) for each in parts]


def _width(run: RunRecord, flights: Sequence[Flight]) -> float:
    """How much of a run shows its ordinary course: two rounds, or less if their transfers would be too thin to see."""
    usual = float(np.median([_ends(flight, run.end) - flight.sent for flight in flights]))
    return min(2 * _round(run), max(20 * usual, 1e-3))


def _round(run: RunRecord) -> float:
    """The usual time between two sends of a fragment in a region; the whole run if there are none."""
    gaps = []
    for story in run.stories:
        before: dict[int, float] = {}
        for flight in sorted(story.flights, key=lambda each: each.sent):
            if flight.fragment in before:
                gaps.append(flight.sent - before[flight.fragment])
            before[flight.fragment] = flight.sent
    usual = float(np.median(gaps)) if gaps else 0.0
    return usual or max(run.end, 1e-3)


def _with_room(run: RunRecord, window: Window) -> Window:
    """The window within the run, narrowed if it has more transfers than a picture can show."""
    begin, end = max(window.begin, 0.0), min(window.end, run.end)
    for _ in range(_TRIES):
        count = len(_seen(run, begin, end))
        if count <= MOST_FLIGHTS:
            break
        cut = (end - begin) * (1 - 0.9 * MOST_FLIGHTS / count) / 2
        begin, end = begin + cut, end - cut
    return Window(window.title, begin, max(end, begin + 1e-6))


def _seen(run: RunRecord, begin: float, end: float) -> list[Flight]:
    return [f for story in run.stories for f in story.flights if _ends(f, run.end) > begin and f.sent < end]


def _ends(flight: Flight, now: float) -> float:
    return now if flight.landed is None else flight.landed


def draw_shares(axis: Any, run: RunRecord) -> None:
    """One strip per region: the share of the time that it spent on each activity, over the whole run."""
    unit = unit_of(run)
    edges = np.linspace(0.0, max(run.end, 1e-6), MOST_BINS + 1)
    for row, story in enumerate(run.stories):
        floor = np.full(MOST_BINS, float(row) + 0.9)
        for activity, share in shares(story, edges).items():
            if share.max() <= 0:
                continue
            top = floor - 0.8 * share
            steps = np.repeat(edges, 2)[1:-1] / unit.seconds
            look = {"facecolor": COLORS[activity], "hatch": HATCHES.get(activity), "edgecolor": _HATCHED}
            axis.fill_between(steps, np.repeat(floor, 2), np.repeat(top, 2), lw=0, zorder=2, **look)
            floor = top
    _rows(
        axis,
        [(row + 0.5, f"region {story.region}") for row, story in enumerate(run.stories)],
        len(run.stories),
    )
    axis.set_xlim(0, max(run.end, 1e-6) / unit.seconds)
    axis.set_xlabel(unit.label)


def draw_window(axis: Any, run: RunRecord, window: Window) -> None:
    """Each region: what its training thread did, and below that its transfers, those that overlap on separate lines."""
    unit = unit_of(run, window.end - window.begin)
    begin, end = window.begin, window.end
    bars: dict[_Look, list[tuple[float, float, float, float]]] = {}
    ticks, labels, row = [], [], 0.0
    for story in run.stories:
        ticks.append((row + 0.5, f"region {story.region}"))
        for since, until in story.there:
            if until > begin and since < end:
                bars.setdefault(_look(Activity.TRAINING), []).append(
                    (max(since, begin), min(until, end), row + 0.1, 0.8)
                )
        for span in overlapping(story.spans, begin, end):
            if span.end - span.begin < (end - begin) / _FINEST:
                continue
            bars.setdefault(_look(span.activity), []).append((span.begin, span.end, row + 0.1, 0.8))
        row += 1
        lanes = _lanes(story, begin, end, run.end)
        for lane in lanes:
            for flight in lane:
                for color, since, until in _phases(flight, run.end):
                    if until > begin and since < end:
                        bars.setdefault((color, None), []).append(
                            (max(since, begin), min(until, end), row + 0.05, 0.4)
                        )
                labels.append((flight, row + 0.25))
            row += 0.5
        row += 0.3
    for look, rectangles in bars.items():
        _fill(axis, rectangles, look, unit.seconds)
    _mark(axis, labels, window, unit.seconds)
    _rows(axis, ticks, row)
    axis.set_xlim(begin / unit.seconds, end / unit.seconds)
    axis.set_xlabel(unit.label)


def rows_of(run: RunRecord, window: Window) -> float:
    """The height that `draw_window` needs, in rows of a region."""
    return sum(1.3 + 0.5 * len(_lanes(story, window.begin, window.end, run.end)) for story in run.stories)


def _phases(flight: Flight, now: float) -> Iterable[tuple[str, float, float]]:
    end = _ends(flight, now)
    if flight.arrived is None or flight.began is None:
        return [(PHASES["sent"], flight.sent, end)]
    began, arrived = min(flight.began, end), min(flight.arrived, end)
    return [
        (PHASES["sent"], flight.sent, began),
        (PHASES["on the wire"], began, arrived),
        (PHASES["arrived"], arrived, end),
    ]


def _lanes(story: Story, begin: float, end: float, now: float) -> list[list[Flight]]:
    """The transfers in a window, on lines without overlaps; those that do not fit on the lines are left out."""
    lanes: list[list[Flight]] = []
    for flight in sorted(story.flights, key=lambda each: each.sent):
        if _ends(flight, now) <= begin or flight.sent >= end:
            continue
        free = next((lane for lane in lanes if _ends(lane[-1], now) <= flight.sent), None)
        if free is not None:
            free.append(flight)
        elif len(lanes) < _MOST_LANES:
            lanes.append([flight])
    return lanes


def _look(activity: Activity) -> _Look:
    """Its color and its hatch."""
    return COLORS[activity], HATCHES.get(activity)


def _fill(axis: Any, bars: Sequence[tuple[float, float, float, float]], look: _Look, seconds: float) -> None:
    """Rectangles (begin, end, bottom, height) as one shape, which is small in a file."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(a / seconds, y), (b / seconds, y), (b / seconds, y + h), (a / seconds, y + h)]
        for a, b, y, h in bars
    ]
    color, hatch = look
    axis.add_collection(PolyCollection(corners, facecolors=color, edgecolors=color, linewidths=0.4, zorder=2))
    if hatch is not None:
        over = PolyCollection(corners, facecolors="none", edgecolors=_HATCHED, linewidths=0, zorder=2.5)
        over.set_hatch(hatch)
        axis.add_collection(over)


def _mark(axis: Any, flights: Sequence[tuple[Flight, float]], window: Window, seconds: float) -> None:
    """A tick at each send and a dot at each landing; the number of the fragment where there is room for it."""
    begin, end = window.begin, window.end
    sent = [(f.sent / seconds, y) for f, y in flights if begin <= f.sent <= end]
    here = [(f, f.landed, y) for f, y in flights if f.landed is not None and begin <= f.landed <= end]
    landed = [(at / seconds, y) for f, at, y in here if not f.is_void]
    void = [(at / seconds, y) for f, at, y in here if f.is_void]
    for points, marker, size in ((sent, "|", 6.0), (landed, "o", 2.6), (void, "x", 4.0)):
        if points:
            axis.plot(
                *zip(*points, strict=True), ls="", marker=marker, ms=size, color=_INK, mew=0.9, zorder=4
            )
    for flight, at, height in here:
        since = max(flight.sent, begin)
        if at - since > (end - begin) / 60:
            look = {"fontsize": 6, "ha": "center", "va": "center", "color": _ON_BARS, "zorder": 5}
            axis.text((since + at) / 2 / seconds, height, str(flight.fragment), **look)


def _rows(axis: Any, ticks: Sequence[tuple[float, str]], bottom: float) -> None:
    axis.set_yticks([place for place, _ in ticks], [label for _, label in ticks])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(bottom, 0)
    axis.grid(axis="x", alpha=0.25, zorder=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def legend(axis: Any, run: RunRecord, with_phases: bool) -> None:
    """What the colors mean, above the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {span.activity for story in run.stories for span in story.spans} | {Activity.TRAINING}
    handles: list[Any] = [
        Patch(facecolor=color, edgecolor=_HATCHED, lw=0, hatch=HATCHES.get(activity), label=activity.value)
        for activity, color in COLORS.items()
        if activity in seen
    ]
    if with_phases:
        names = {
            "sent": "others have not sent",
            "on the wire": "on the wire",
            "arrived": "mean is here",
        }
        handles += [Patch(color=PHASES[phase], label=name) for phase, name in names.items()]
        handles.append(Line2D([], [], color=_INK, marker="|", ls="", ms=7, label="sent"))
        handles.append(Line2D([], [], color=_INK, marker="o", ls="", ms=3, label="landed"))
    axis.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, fontsize=8, frameon=False,
        handlelength=1.2, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip
