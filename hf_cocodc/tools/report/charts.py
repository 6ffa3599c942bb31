"""The pictures of runs: line charts, and the timeline. matplotlib is imported only to draw."""

import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...errors import InputError
from . import timeline
from .journals import MOST_NUMBER, RegionJournal, figure
from .runs import RunRecord
from .spending import sent_over, shares, spent, totals
from .timeline import unit_of
from .waits import Activity, Story, sections

CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#8c6d1f")
_STYLES = ("-", "--", ":", "-.")
_COARSE = 80
"""A line has at most twice as many points."""
_MOST_NAMED = 8
"""Most lines that a description names."""
_WIDE, _NARROW, _LOW = 10.0, 5.2, 3.0
"""Inches: a wide picture, a narrow one, and the height of a narrow one."""
_STYLE = {
    "text.parse_math": False,  # names come from other regions
    "svg.fonttype": "none",  # text stays text: small, and one can search for it
    "svg.hashsalt": "hf_cocodc",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "figure.dpi": 100,
    "hatch.linewidth": 0.6,
}
_IDS = re.compile(r'(<g|<svg)([^>]*?) id="[A-Za-z]+[0-9a-z]*_\d+"')
_INK = re.compile(r"#000000|#222222")
_COLOR = re.compile(r"(?<=: )#([0-9a-f]{6})(?=[;\"])")
IN_THE_DARK = {
    "0072b2": "#4da6e0",
    "d55e00": "#ff8a3d",
    "009e73": "#2fc796",
    "cc79a7": "#e29cc2",
    "e69f00": "#ffb733",
    "56b4e9": "#7cc8f5",
    "7a7a7a": "#a8a8a8",
    "808080": "#a8a8a8",
    "8c6d1f": "#c9a44a",
    "b0b0b0": "#6b7280",
    timeline.COLORS[Activity.TRAINING][1:]: "#39465a",
}
"""What stands on a dark page for a color of the pictures."""

Points = list[tuple[float, float]]
Draw = Callable[[Any, RunRecord], None]
AXES = ("inner step", "tokens of all regions", "sent by a region", "time")
"""What a loss is drawn against."""


class Picture(NamedTuple):
    """An SVG element, and a sentence about what it shows."""

    svg: str
    alt: str


@contextmanager
def _drawing() -> Iterator[Any]:
    """Gives figure(height, width), in inches, which makes a figure. Raises InputError if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("pictures need matplotlib. Run `pip install 'hf-cocodc[plots]'`.") from error

    def figure(height: float, width: float = _WIDE) -> Any:
        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(made)
        return made

    with matplotlib.rc_context(_STYLE):
        yield figure


def _svg(made: Any) -> str:
    """A figure as an SVG element for a page with others: without ids that only name its parts, and in the page's ink."""
    file = io.StringIO()
    none = {"Date": None, "Creator": None, "Format": None, "Type": None}
    made.savefig(file, format="svg", metadata=none, transparent=True)
    text = file.getvalue()
    text = _INK.sub("currentColor", _IDS.sub(r"\1\2", text[text.index("<svg") :]))
    return _COLOR.sub(
        lambda each: f"var(--c{each[1]}, {each[0]})" if each[1] in IN_THE_DARK else each[0], text
    )


def _described(axis: Any) -> str:
    """What a chart of lines shows, in words."""
    lines = [line for line in axis.lines if not line.get_label().startswith("_") and len(line.get_xdata())]
    words = []
    for line in lines[:_MOST_NAMED]:
        values = [y for y in line.get_ydata() if np.isfinite(y)]
        if values:
            words.append(f"{line.get_label()} from {values[0]:.4g} to {values[-1]:.4g}")
    if lines[_MOST_NAMED:]:
        words.append(f"and {len(lines) - _MOST_NAMED} more")
    return f"{axis.get_ylabel()} against {axis.get_xlabel()}: {'; '.join(words) or 'nothing yet'}."


def losses(runs: Sequence[RunRecord]) -> list[Picture]:
    """The losses of runs against steps, tokens, bytes and time, as far as journals have them."""
    wanted = range(4 if any(run.has_times for run in runs) else 3)
    made = [_chart(lambda axis, which=which: draw_losses(axis, runs, which)) for which in wanted]  # type: ignore[misc]
    return [each for each in made if each is not None]


def of_run(run: RunRecord, *draws: Draw) -> list[Picture]:
    """Charts of a run, each by itself, without those that have nothing to show."""
    made = [_chart(lambda axis, draw=draw: draw(axis, run)) for draw in draws]  # type: ignore[misc]
    return [each for each in made if each is not None]


def _chart(draw: Callable[[Any], None]) -> Picture | None:
    """A chart; None if nothing is drawn in it."""
    with _drawing() as figure:
        made = figure(_LOW, _NARROW)
        axis = made.subplots()
        draw(axis)
        if not axis.has_data():
            return None
        handles, labels = axis.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        if named:
            made.legend(named.values(), named, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
        return Picture(_svg(made), _described(axis))


def strips(run: RunRecord) -> Picture:
    """What the time of each region went into."""
    with _drawing() as figure:
        made = figure(_height_of_strips(run))
        axis = made.subplots()
        timeline.draw_shares(axis, run)
        timeline.legend(axis, run, with_phases=False)
        rows = dict(spent(run))
        words = []
        for place, story in enumerate(run.stories[:_MOST_NAMED]):
            seconds = {name: row[place] for name, row in rows.items() if row[place]}
            total = sum(seconds.values())
            parts = [f"{100 * each / total:.0f} % {name}" for name, each in seconds.items()]
            words.append(f"region {story.region} {', '.join(parts) or 'trains'}")
        return Picture(_svg(made), f"Shares of the time of each region: {'; '.join(words)}.")


def transfers(run: RunRecord, window: timeline.Window) -> Picture:
    """A part of a run, transfer by transfer."""
    with _drawing() as figure:
        made = figure(_height_of_window(run, window))
        axis = made.subplots()
        timeline.draw_window(axis, run, window)
        timeline.legend(axis, run, with_phases=True)
        seen = [f for story in run.stories for f in story.flights if window.begin < f.sent < window.end]
        waited = max((flight.blocked_s for flight in seen), default=0.0)
        words = f"{len(seen)} transfers of {len(run.stories)} regions, one by one" + (
            f"; training waited at most {waited:.2f} s for one" if waited else ""
        )
        return Picture(_svg(made), f"{window.title}: {words}.")


def _height_of_strips(run: RunRecord) -> float:
    return 0.95 + 0.42 * len(run.stories)


def _height_of_window(run: RunRecord, window: timeline.Window) -> float:
    return 1.15 + 0.24 * timeline.rows_of(run, window)


def style(place: int) -> dict[str, Any]:
    """How the line of one region, or of one run, looks."""
    return {"color": CYCLE[place % len(CYCLE)], "ls": _STYLES[place // len(CYCLE) % len(_STYLES)]}


def binned(points: Points) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each stretch of the axis that has points: its middle, and their least, middle and largest value."""
    xs, ys = np.asarray(points, dtype=float).T
    order = np.argsort(xs, kind="stable")
    xs, ys = xs[order], ys[order]
    if len(xs) <= 2 * _COARSE:
        return xs, ys, ys, ys
    edges = np.linspace(xs[0], xs[-1], _COARSE + 1)[1:-1]
    parts = [part for part in np.split(np.arange(len(xs)), np.searchsorted(xs, edges)) if len(part)]
    rows = [(xs[p].mean(), ys[p].min(), float(np.median(ys[p])), ys[p].max()) for p in parts]
    middle, low, usual, high = np.asarray(rows).T
    return middle, low, usual, high


def _losses(
    run: RunRecord, journal: RegionJournal, shifts: Sequence[float]
) -> list[tuple[str, list[float | None], float]]:
    """(kind, place on each of `AXES`, loss) of every training loss and held-out loss in a journal."""
    entries = []
    done = iter(totals(journal.events))
    for section, shift in zip(sections(journal.events), shifts, strict=True):
        for event in section:
            kind, sent = event["kind"], next(done).bytes_sent
            loss = (
                figure(event, "loss" if kind == "log" else "eval_loss")
                if kind in ("log", "evaluate")
                else None
            )
            if loss is not None:
                time = event["time_s"] + shift
                entries.append((kind, [float(event["step"]), run.tokens(event["step"]), sent, time], loss))
    return entries


def _gaps(story: Story, times: Sequence[float]) -> list[int]:
    """The places of the first values after the region was not there."""
    parts = np.searchsorted([begin for begin, _ in story.there], times, side="right")
    return (1 + np.flatnonzero(np.diff(parts))).tolist()


def draw_losses(axis: Any, runs: Sequence[RunRecord], which: int) -> None:
    """Training loss of each region and held-out loss against one of `AXES`; each of several runs has a color of its own."""
    from matplotlib.ticker import EngFormatter

    unit, is_one = unit_of(max(runs, key=lambda run: run.end)), len(runs) == 1
    scale = unit.seconds if which == 3 else 1.0
    for number, run in enumerate(runs):
        held_out: dict[float, tuple[float, float]] = {}
        for place, journal in enumerate(run.journals):
            points: Points = []
            times: list[float] = []
            for kind, at, loss in _losses(run, journal, run.shifts[place]):
                if (x := at[which]) is None:
                    continue
                if kind == "log":
                    points.append((x / scale, loss))
                    times.append(at[3] or 0.0)
                else:
                    held_out.setdefault(at[0] or 0.0, (x / scale, loss))
            if not points:
                continue
            label = f"region {journal.region}" if is_one else None if place else f"{run.name}: training"
            look = style(place) | {"lw": 1.2} if is_one else style(number) | {"lw": 0.9, "alpha": 0.8}
            parts = itertools.pairwise([0, *_gaps(run.stories[place], times), len(points)])
            _lines(axis, [points[a:b] for a, b in parts], label, look, with_band=is_one)
        if held_out:
            dark = "#000000" if is_one else CYCLE[number % len(CYCLE)]
            label = "held out" if is_one else f"{run.name}: held out"
            marker = "o" if len(held_out) < 60 else None
            line = [held_out[step] for step in sorted(held_out)]
            axis.plot(
                *zip(*line, strict=True), label=label, color=dark, marker=marker, ms=3.5, lw=1.4, zorder=5
            )
    axis.set_xlabel(unit.label if which == 3 else AXES[which])
    if which in (1, 2):
        axis.xaxis.set_major_formatter(EngFormatter("B" if which == 2 else ""))
    plain(axis, "loss (nats per token)")


def draw_learning_rates(axis: Any, run: RunRecord) -> None:
    """The learning rate of each region's inner optimizer."""
    for place, journal in enumerate(run.journals):
        rates = [(e["step"], figure(e, "learning_rate")) for e in journal.events if e["kind"] == "log"]
        points = [(float(step), rate) for step, rate in rates if rate is not None]
        if points:
            _lines(axis, [points], f"region {journal.region}", style(place))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("inner step")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    plain(axis, "learning rate")


def utilization(story: Story, edges: np.ndarray) -> np.ndarray:
    """The % of the time that no send and no landing held a region, as `outer/compute_utilization`; NaN where it was away."""
    by_activity = shares(story, edges)
    there = sum(by_activity.values())
    held = sum(
        by_activity[each] for each in (Activity.FOR_A_REGION, Activity.FOR_THE_LINK, Activity.HANDLING)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there > 0.05, 100 * (1 - held / there), np.nan)


def draw_utilization(axis: Any, run: RunRecord) -> None:
    """`utilization` of each region over time."""
    _over_time(axis, run, utilization, width=1.2)
    axis.set_ylim(-3, 103)
    plain(axis, "utilization (%)")


def draw_bandwidth(axis: Any, run: RunRecord) -> None:
    """What each region sent."""
    from matplotlib.ticker import EngFormatter

    _over_time(axis, run, lambda story, edges: 8 * sent_over(story, edges) / np.diff(edges), width=0.9)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(EngFormatter())
    plain(axis, "sent (bits per second)")


def draw_staleness(axis: Any, run: RunRecord) -> None:
    """How many inner steps lay between the send and the landing of each transfer."""
    _per_landing(axis, run, lambda flight: float(flight.landed_at - flight.sent_at))
    axis.set_ylim(0, max(axis.get_ylim()[1], 1))
    axis.yaxis.get_major_locator().set_params(integer=True)
    plain(axis, "staleness (inner steps)")


def draw_transfer_times(axis: Any, run: RunRecord) -> None:
    """How long the link took for each transfer, once all regions were there."""
    _per_landing(axis, run, lambda flight: None if flight.began is None else flight.arrived - flight.began)
    axis.set_ylim(bottom=0)
    plain(axis, "time on the wire (s)")


def _per_landing(axis: Any, run: RunRecord, value: Callable[[Any], float | None]) -> None:
    for place, story in enumerate(run.stories):
        points = [(float(f.landed_at), value(f)) for f in story.flights if f.landed_at is not None]
        _lines(axis, [[(x, y) for x, y in points if y is not None]], f"region {story.region}", style(place))
    axis.set_xlabel("inner step")


def draw_norms(axis: Any, run: RunRecord) -> None:
    """The norm of each region's outer gradients, and of their mean."""
    means: dict[tuple[int, int], tuple[float, float]] = {}
    for place, (journal, story) in enumerate(zip(run.journals, run.stories, strict=True)):
        own = _norms_of(run, journal.region)
        own = [(x, y) for x, y in own if 1 / MOST_NUMBER < y < MOST_NUMBER]
        _lines(axis, [own], f"region {story.region}", style(place))
        for event in journal.events:
            norm = figure(event, "outer_grad_norm") if event["kind"] == "land" else None
            if norm is not None and norm > 1 / MOST_NUMBER:
                means.setdefault((event["sent_at"], event["fragment"]), (float(event["sent_at"]), norm))
    _lines(
        axis, [[means[key] for key in sorted(means)]], "mean of the regions", {"color": "#000000", "ls": "-"}
    )
    marks = {(e["sent_at"], e["fragment"]) for j in run.journals for e in j.events if e["kind"] == "guard"}
    marked = [means[key] for key in sorted(marks) if key in means]
    if marked:
        axis.plot(
            *zip(*marked, strict=True), "x", color="#d55e00", ms=6, label="clipped or left out by outer.guard"
        )
    seen = [y for line in axis.lines for y in line.get_ydata()]
    if seen and max(seen) > 10 * min(seen):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    axis.set_xlabel("inner step of the send")
    plain(axis, "norm of the outer gradient")


def draw_cosines(axis: Any, run: RunRecord) -> None:
    """The mean cosine between the outer gradients of the regions, which is equal in all journals."""
    landings = [each for journal in run.journals for each in journal.events if each["kind"] == "land"]
    found = [(float(each["sent_at"]), figure(each, "cosine")) for each in landings]
    points = sorted({step: cosine for step, cosine in found if cosine is not None}.items())
    _lines(axis, [points], None, {"color": "#000000", "ls": "-"})
    if points:
        axis.axhline(0, color="#888888", lw=0.6)
    axis.set_ylim(min([-0.05, *(cosine for _, cosine in points)]), 1)
    axis.set_xlabel("inner step of the send")
    plain(axis, "cosine between regions")


def _norms_of(run: RunRecord, region: int) -> Points:
    """The norms of one region's outer gradients, from the landings in any journal."""
    by_transfer: dict[tuple[int, int], float] = {}
    for journal in run.journals:
        for event in journal.events:
            members, norms = event.get("members"), event.get("norms")
            if (
                event["kind"] == "land"
                and members
                and norms
                and len(members) == len(norms)
                and region in members
            ):
                by_transfer.setdefault(
                    (event["sent_at"], event["fragment"]), norms[members.index(region)] or 0.0
                )
    return [(float(step), by_transfer[step, fragment]) for step, fragment in sorted(by_transfer)]


def _lines(
    axis: Any, parts: Sequence[Points], label: str | None, look: dict[str, Any], with_band: bool = True
) -> None:
    """A line through the middle values of each part, with gaps between parts; and a pale band from the least to the largest."""
    xs, ys = [], []
    for part in filter(None, parts):
        middle, low, usual, high = binned(part)
        if with_band and low is not high:
            axis.fill_between(middle, low, high, color=look["color"], alpha=0.15, lw=0)
        xs += [*middle, middle[-1]]
        ys += [*usual, math.nan]
    if xs:
        marker = "." if len(xs) < _COARSE // 2 else None
        axis.plot(xs[:-1], ys[:-1], marker=marker, ms=4, label=label, **{"lw": 1.1, **look})


def _over_time(
    axis: Any, run: RunRecord, value: Callable[[Story, np.ndarray], np.ndarray], width: float
) -> None:
    """A line for each region: `value` of its story between each two edges of the axis of time."""
    unit, edges = unit_of(run), np.linspace(0.0, max(run.end, 1e-6), _COARSE + 1)
    middles = (edges[1:] + edges[:-1]) / 2 / unit.seconds
    for place, story in enumerate(run.stories):
        axis.plot(middles, value(story, edges), lw=width, label=f"region {story.region}", **style(place))
    axis.set_xlabel(unit.label)


def plain(axis: Any, ylabel: str) -> None:
    """The look of all charts."""
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
