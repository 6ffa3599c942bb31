"""The other charts of a report, on axes of matplotlib that others make."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .journals import MOST_NUMBER, RegionJournal, figure
from .runs import RunRecord
from .spending import sent_over, shares, totals
from .story import Activity, sections
from .timeline import unit_of

CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#8c6d1f")
_STYLES = ("-", "--", ":", "-.")
MOST_POINTS = 600
"""A line has at most about so many points."""
_COARSE = 80

Points = list[tuple[float, float]]
AXES = ("inner step", "tokens of all regions", "sent by a region", "time")
"""What a loss is drawn against."""


def style(place: int) -> dict[str, Any]:
    """How the line of one region, or of one run, looks."""
    return {"color": CYCLE[place % len(CYCLE)], "ls": _STYLES[place // len(CYCLE) % len(_STYLES)]}


def thin(points: Points) -> Points:
    """At most about `MOST_POINTS` of the points: of each stretch the lowest and the highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return points
    kept: Points = []
    for part in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        ends = sorted({min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])})
        kept += [points[place] for place in ends]
    return kept


def binned(points: Points) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of many points, for each stretch of the axis that has one: its middle, and the least, middle and largest value."""
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
    found = []
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
                found.append((kind, [float(event["step"]), run.tokens(event["step"]), sent, time], loss))
    return found


def draw_losses(axes: Sequence[Any], runs: Sequence[RunRecord], which: Sequence[int] = (0, 1, 2, 3)) -> None:
    """Training loss of each region and held-out loss; of several runs each in a colour of its own."""
    from matplotlib.ticker import EngFormatter

    unit = unit_of(max(runs, key=lambda run: run.end))
    for number, run in enumerate(runs):
        held_out: dict[float, tuple[list[float | None], float]] = {}
        for place, journal in enumerate(run.journals):
            found = _losses(run, journal, run.shifts[place])
            for kind, at, loss in found:
                if kind == "evaluate":
                    held_out.setdefault(at[0] or 0.0, (at, loss))
            look = style(place if len(runs) == 1 else number)
            label = (
                f"region {journal.region}"
                if len(runs) == 1
                else f"{run.name}: training"
                if not place
                else None
            )
            look |= {"lw": 1.0, "alpha": 0.85} if len(runs) == 1 else {"lw": 0.6, "alpha": 0.45}
            _lines(
                axes,
                which,
                [(at, loss) for kind, at, loss in found if kind == "log"],
                unit.seconds,
                label,
                look,
            )
        dark = "#000000" if len(runs) == 1 else CYCLE[number % len(CYCLE)]
        label = "held out" if len(runs) == 1 else f"{run.name}: held out"
        look = {
            "color": dark,
            "marker": "o" if len(held_out) < 60 else None,
            "ms": 3.5,
            "lw": 1.4,
            "zorder": 5,
        }
        _lines(axes, which, [held_out[step] for step in sorted(held_out)], unit.seconds, label, look)
    for axis, index in zip(axes, which, strict=True):
        axis.set_xlabel(unit.label if index == 3 else AXES[index])
        if not axis.lines:
            said = "no losses yet" if index != 1 else "the journals do not say\nhow many tokens a step has"
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.5, said, transform=axis.transAxes, ha="center", va="center", color="#666666")
        if index in (1, 2) and axis.lines:
            axis.xaxis.set_major_formatter(EngFormatter("B" if index == 2 else ""))
        plain(axis, "loss (nats per token)")


def _lines(
    axes: Sequence[Any], which: Sequence[int], points: Sequence[tuple[list[float | None], float]], seconds: float,
    label: str | None, look: dict[str, Any],
) -> None:  # fmt: skip
    for axis, index in zip(axes, which, strict=True):
        scale = seconds if index == 3 else 1.0
        line = [(at[index] / scale, loss) for at, loss in points if at[index] is not None]  # type: ignore[operator]
        if line:
            axis.plot(*zip(*thin(line), strict=True), label=label, **look)


def draw_utilisation(axis: Any, run: RunRecord) -> None:
    """Which share of the time each region did not wait for the link or for other regions."""
    unit, edges = unit_of(run), np.linspace(0.0, max(run.end, 1e-6), _COARSE + 1)
    for place, story in enumerate(run.stories):
        found = shares(story, edges)
        there = sum(found.values())
        waiting = found[Activity.FOR_A_REGION] + found[Activity.FOR_THE_LINK]
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(there > 0.05, 100 * (1 - waiting / there), np.nan)
        axis.plot(
            _middles(edges) / unit.seconds, share, lw=1.2, label=f"region {story.region}", **style(place)
        )
    axis.set_ylim(-3, 103)
    axis.set_xlabel(unit.label)
    plain(axis, "utilisation (%)")


def draw_bandwidth(axis: Any, run: RunRecord) -> None:
    """What each region sent."""
    from matplotlib.ticker import EngFormatter

    unit, edges = unit_of(run), np.linspace(0.0, max(run.end, 1e-6), _COARSE + 1)
    for place, story in enumerate(run.stories):
        rate = 8 * sent_over(story, edges) / np.diff(edges)
        axis.plot(
            _middles(edges) / unit.seconds, rate, lw=0.9, label=f"region {story.region}", **style(place)
        )
    axis.set_ylim(bottom=0)
    axis.set_xlabel(unit.label)
    axis.yaxis.set_major_formatter(EngFormatter())
    plain(axis, "sent (bits per inner step)" if run.in_steps else "sent (bits per second)")


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
    unit = unit_of(run)
    for place, story in enumerate(run.stories):
        points = [(f.landed / unit.seconds, value(f)) for f in story.flights if f.landed is not None]
        _band(axis, [(x, y) for x, y in points if y is not None], f"region {story.region}", style(place))
    axis.set_xlabel(unit.label)


def draw_norms(axis: Any, run: RunRecord) -> None:
    """The norm of each region's outer gradients, and of their mean."""
    means: dict[tuple[int, int], tuple[float, float]] = {}
    for place, (journal, story) in enumerate(zip(run.journals, run.stories, strict=True)):
        own = _norms_of(run, journal.region)
        own = [(x, y) for x, y in own if 1 / MOST_NUMBER < y < MOST_NUMBER]
        _band(axis, own, f"region {story.region}", style(place))
        for event in journal.events:
            norm = figure(event, "outer_grad_norm") if event["kind"] == "land" else None
            if norm is not None and norm > 1 / MOST_NUMBER:
                means.setdefault((event["sent_at"], event["fragment"]), (float(event["sent_at"]), norm))
    _band(axis, [means[key] for key in sorted(means)], "mean of the regions", {"color": "#000000", "ls": "-"})
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


def _norms_of(run: RunRecord, region: int) -> Points:
    """The norms of one region's outer gradients, from its own journal, or from what others have heard of it."""
    found: dict[tuple[int, int], float] = {}
    for journal in run.journals:
        for event in journal.events:
            if event["kind"] == "send" and journal.region == region:
                found[event["step"], event["fragment"]] = figure(event, "norm") or 0.0
            members, norms = event.get("members"), event.get("norms")
            if (
                event["kind"] == "land"
                and members
                and norms
                and len(members) == len(norms)
                and region in members
            ):
                found.setdefault((event["sent_at"], event["fragment"]), norms[members.index(region)] or 0.0)
    return [(float(step), found[step, fragment]) for step, fragment in sorted(found)]


def _band(axis: Any, points: Points, label: str, look: dict[str, Any]) -> None:
    """A line through the middle values, and a pale band from the least to the largest one."""
    if not points:
        return
    middle, low, usual, high = binned(points)
    if low is not high:
        axis.fill_between(middle, low, high, color=look["color"], alpha=0.15, lw=0)
    axis.plot(middle, usual, lw=1.1, marker="." if len(middle) < 40 else None, ms=4, label=label, **look)


def draw_attendance(axis: Any, run: RunRecord) -> None:
    """One row per region: a bar where it took part. A line through all rows at each change."""
    there = run.attendance
    for row, bars in enumerate(there.values()):
        axis.hlines([row] * len(bars), *zip(*bars, strict=True), color="#009e73", lw=6, alpha=0.7)
    for change in run.found[1:]:
        axis.axvline(change.step, color="gray", lw=0.6, ls=":")
    axis.set_yticks(range(len(there)), [f"region {region}" for region in there])
    axis.set_ylim(len(there) - 0.5, -0.5)
    axis.grid(alpha=0.25, axis="x")
    axis.set_xlabel("inner step")


def _middles(edges: np.ndarray) -> np.ndarray:
    return (edges[1:] + edges[:-1]) / 2


def plain(axis: Any, ylabel: str) -> None:
    """The look of all charts."""
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def legends(axes: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """The handles and labels of several axes, each label once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
