"""Pictures of a run, from its journals. Only this module imports matplotlib, and only to draw a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..run.journal import read
from .summary import summarise


def plot_run(journals: Sequence[Path], path: Path) -> None:
    """Draw one picture: loss of each region, held-out loss of the global model, sends and landings of each fragment.

    Args:
        journals: one per region, region 0's first.
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
    num_fragments = runs[0][0]["num_fragments"]
    figure = Figure(figsize=(9, 5.2 + 0.25 * num_fragments), layout="constrained")
    FigureCanvasAgg(figure)
    losses, traffic = figure.subplots(2, 1, sharex=True, height_ratios=[4, 0.6 + 0.5 * num_fragments])
    for run in runs:
        points = [(e["step"], e["loss"]) for e in run if e["kind"] == "log"]
        losses.plot(
            *zip(*points, strict=True), lw=1.2, alpha=0.8, label=f"region {run[0]['region']}, training"
        )
    held_out = [(e["step"], e["eval_loss"]) for e in runs[0] if e["kind"] == "evaluate" and "eval_loss" in e]
    if held_out:
        losses.plot(*zip(*held_out, strict=True), "ko-", ms=4, label="held out")
    losses.set_ylabel("loss (nats per token)")
    losses.grid(alpha=0.25)
    losses.legend(frameon=False)
    title = f"{runs[0][0]['outer']['method']}, {runs[0][0]['num_regions']} regions"
    if all(any(event["kind"] == "finish" for event in run) for run in runs):
        title += f"; blocked on the link: {summarise(journals).blocked()}"
    losses.set_title(title, loc="left")
    _draw_traffic(traffic, [e for e in runs[0] if e["kind"] == "land"], num_fragments)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


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
