"""Pictures of a run, from its journals. Only this module imports matplotlib, and only to draw a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..run.journal import read
from .members import Change, changes, spans
from .summary import has_finished, summarise


def plot_run(journals: Sequence[Path], path: Path) -> None:
    """Draw one picture: loss of each region, held-out loss of the global model, sends and landings of each fragment.

    Where a run goes on without a lost region, a strip below the losses shows who was there.

    Args:
        journals: one per region, region 0's first. Of regions that were lost, only the losses are drawn.
        path: file to write; its ending decides between PNG and SVG.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("pictures need matplotlib. Run `pip install 'hf-cocodc[plots]'`.") from error
    runs = [read(journal) for journal in journals]
    found = changes(runs)
    there = spans(found, max(event.get("step") or 0 for run in runs for event in run)) if found else {}
    first = next((run for run in runs if has_finished(run)), runs[0]) if found else runs[0]
    num_fragments = first[0]["num_fragments"]
    rows = [4, *([0.3 + 0.25 * len(there)] if there else []), 0.6 + 0.5 * num_fragments]
    height = 5.2 + 0.25 * num_fragments + (0.3 + 0.25 * len(there) if there else 0)
    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    losses, *strip, traffic = figure.subplots(len(rows), 1, sharex=True, height_ratios=rows)
    for run in runs:
        points = [(e["step"], e["loss"]) for e in run if e["kind"] == "log"]
        points += [(start, None) for start, _ in there.get(run[0]["region"], [])]  # no line where it was away
        points.sort(key=lambda point: (point[0], point[1] is not None))
        losses.plot(
            *zip(*points, strict=True), lw=1.2, alpha=0.8, label=f"region {run[0]['region']}, training"
        )
    held_out = [(e["step"], e["eval_loss"]) for e in first if e["kind"] == "evaluate" and "eval_loss" in e]
    if held_out:
        losses.plot(*zip(*held_out, strict=True), "ko-", ms=4, label="held out")
    losses.set_ylabel("loss (nats per token)")
    losses.grid(alpha=0.25)
    losses.legend(frameon=False)
    title = f"{first[0]['outer']['method']}, {first[0]['num_regions']} regions"
    if has_finished(first) if found else all(has_finished(run) for run in runs):
        title += f"; blocked on the link: {summarise(journals).blocked()}"
    losses.set_title(title, loc="left")
    for axis in strip:
        _draw_members(axis, there, found)
    _draw_traffic(traffic, [e for e in first if e["kind"] == "land"], num_fragments)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_members(axis: Any, there: Mapping[int, Sequence[tuple[int, int]]], found: Sequence[Change]) -> None:
    """One row per region: a bar where it took part. A line through all rows at each change."""
    for row, bars in enumerate(there.values()):
        axis.hlines([row] * len(bars), *zip(*bars, strict=True), color="tab:green", lw=6, alpha=0.6)
    for change in found[1:]:
        axis.axvline(change.step, color="gray", lw=0.6, ls=":")
    axis.set_yticks(range(len(there)), [f"region {region}" for region in there])
    axis.set_ylim(len(there) - 0.5, -0.5)
    axis.grid(alpha=0.25, axis="x")


def _draw_traffic(axis: Any, landings: Sequence[dict[str, Any]], num_fragments: int) -> None:
    """One row per fragment: a triangle at the send, a bar during the transfer, a dot at the landing."""
    rows = [landing["fragment"] for landing in landings]
    sent = [landing["sent_at"] for landing in landings]
    landed = [landing["step"] for landing in landings]
    axis.hlines(rows, sent, landed, color="tab:orange", lw=5, alpha=0.5)
    axis.plot(sent, rows, ">", color="tab:orange", ms=6, label="sent")
    axis.plot(landed, rows, ".", color="tab:blue", ms=6, label="landed")
    axis.set_yticks(range(num_fragments), [f"fragment {i}" for i in range(num_fragments)])
    axis.set_ylim(num_fragments - 0.5, -0.5)
    axis.set_xlabel("inner step")
    axis.grid(alpha=0.25, axis="x")
    if landings:
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
