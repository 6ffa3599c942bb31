"""Pictures of runs. matplotlib is imported only to draw one."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import InputError
from . import charts, timeline
from .runs import RunRecord
from .summary import summarise

_WIDE = 10.0
_STYLE = {
    "text.parse_math": False,  # names come from other regions
    "svg.fonttype": "none",  # text stays text: small, and one can search for it
    "svg.hashsalt": "hf_cocodc",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "figure.dpi": 100,
}
_IDS = re.compile(r'(<g|<svg)([^>]*?) id="[A-Za-z]+[0-9a-z]*_\d+"')


@contextmanager
def _drawing() -> Iterator[Any]:
    """Gives a function that makes a figure: figure(height in inches).

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("pictures need matplotlib. Run `pip install 'hf-cocodc[plots]'`.") from error

    def figure(height: float) -> Any:
        found = Figure(figsize=(_WIDE, height), layout="constrained")
        FigureCanvasAgg(found)
        return found

    with matplotlib.rc_context({"font.family": "sans-serif", **_STYLE}):
        yield figure


def plot_run(run: RunRecord, path: Path) -> None:
    """Draw a run as one picture: losses, what the time of each region went into, and the transfers around its longest wait.

    Where a run goes on without a lost region, a strip below the losses shows who was there.

    Args:
        path: file to write; its ending decides between PNG and SVG.

    Raises:
        InputError: matplotlib is not installed.
    """
    shown = timeline.windows(run)[:1]
    there = len(run.attendance) if run.found else 0
    heights = [
        3.4,
        *([0.35 + 0.16 * there] if there else []),
        _strips(run),
        *(_rows(run, each) for each in shown),
    ]
    with _drawing() as figure:
        made = figure(sum(heights))
        losses, *rest = made.subplots(len(heights), 1, height_ratios=heights)
        charts.draw_losses([losses], [run], which=[0])
        losses.set_title(_title(run))
        _legend_beside(losses)
        if there:
            charts.draw_attendance(rest.pop(0), run)
        timeline.draw_shares(rest[0], run)
        timeline.legend(rest[0], run, with_phases=False)
        for axis, window in zip(rest[1:], shown, strict=True):
            timeline.draw_window(axis, run, window)
            timeline.legend(axis, run, with_phases=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=130)


def _title(run: RunRecord) -> str:
    title = f"{run.method}, {run.num_regions} regions"
    if run.has_finished and not run.in_steps:
        title += f"; blocked on the link: {summarise(run).blocked()}"
    return title


def _strips(run: RunRecord) -> float:
    """Inches for the strips of all regions, and their legend."""
    return 0.95 + 0.42 * len(run.stories)


def _rows(run: RunRecord, window: timeline.Window) -> float:
    return 1.15 + 0.24 * timeline.rows_of(run, window)


def _legend_beside(axis: Any) -> None:
    handles, labels = charts.legends([axis])
    if handles:
        axis.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def losses(runs: Sequence[RunRecord]) -> str:
    """The losses of runs against steps, tokens, bytes and time, as SVG."""
    with _drawing() as figure:
        made = figure(6.4)
        axes = made.subplots(2, 2).flatten()
        charts.draw_losses(axes, runs)
        _legend_below(made, axes)
        return _svg(made)


def strips(run: RunRecord) -> str:
    """What the time of each region went into, as SVG."""
    with _drawing() as figure:
        made = figure(_strips(run))
        axis = made.subplots()
        timeline.draw_shares(axis, run)
        timeline.legend(axis, run, with_phases=False)
        return _svg(made)


def transfers(run: RunRecord, window: timeline.Window) -> str:
    """A part of a run, transfer by transfer, as SVG."""
    with _drawing() as figure:
        made = figure(_rows(run, window))
        axis = made.subplots()
        timeline.draw_window(axis, run, window)
        timeline.legend(axis, run, with_phases=True)
        return _svg(made)


def attendance(run: RunRecord) -> str:
    """Who took part, as SVG."""
    with _drawing() as figure:
        made = figure(0.7 + 0.2 * len(run.attendance))
        charts.draw_attendance(made.subplots(), run)
        return _svg(made)


def pair(
    run: RunRecord,
    left: Callable[[Any, RunRecord], None],
    right: Callable[[Any, RunRecord], None] | None = None,
) -> str:
    """One chart, or two charts beside each other, as SVG."""
    with _drawing() as figure:
        made = figure(3.0)
        drawn = [left] if right is None else [left, right]
        axes = made.subplots(1, len(drawn), squeeze=False)[0]
        for axis, draw in zip(axes, drawn, strict=True):
            draw(axis, run)
        _legend_below(made, axes)
        return _svg(made)


def _legend_below(made: Any, axes: Sequence[Any]) -> None:
    handles, labels = charts.legends(axes)
    if handles:
        made.legend(handles, labels, loc="outside lower left", ncols=6, frameon=False, fontsize=8)


def _svg(made: Any) -> str:
    """A figure as an SVG element that stands in a page beside others: it has no ids that only name its parts."""
    file = io.StringIO()
    made.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    return _IDS.sub(r"\1\2", text[text.index("<svg") :])
