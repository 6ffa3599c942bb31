"""The picture of a study: differences with their intervals, and loss against bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .conduct import Found
from .spec import Study
from .tables import Row, rows_of

COLOR, GRAY = "#1f77b4", "#888888"
_RATIO, _CLOSE = 1.4, 0.06
"""Points are close together with such a ratio of x, and such a share of the range of y."""


def draw(study: Study, found: Found, path: Path) -> None:
    """Two panels for each cell: the difference of each arm to the reference; its loss against the bytes that it sends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = {cell: rows for cell in study.cells if (rows := rows_of(study, found, cell))}
    if not cells:
        return
    height = sum(1.2 + 0.3 * len(rows) for rows in cells.values())
    figure, panels = pyplot.subplots(
        len(cells), 2, figsize=(13, max(height, 3)), squeeze=False, layout="constrained"
    )
    for (left, right), (cell, rows) in zip(panels, cells.items(), strict=True):
        _differences(left, study, rows)
        _bytes(right, rows)
        left.set_title(cell or study.title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _differences(panel: Any, study: Study, rows: list[Row]) -> None:
    compared = [row for row in rows if row.to_reference is not None]
    for place, row in enumerate(compared):
        assert row.to_reference is not None
        color = COLOR if row.to_reference.decides else GRAY
        panel.errorbar(
            row.to_reference.mean, place, xerr=row.to_reference.half, fmt="o", color=color, capsize=3
        )
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(compared)), [row.arm for row in compared], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel(f"loss less {study.reference}, nats; interval at {study.confidence:.0%}", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _bytes(panel: Any, rows: list[Row]) -> None:
    points = [(row.megabytes, row.loss, row.arm) for row in rows if row.loss is not None]
    for megabytes, loss, _ in points:
        panel.errorbar(megabytes, loss.mean, yerr=loss.half, fmt="o", color=COLOR, capsize=3)
    for place, names in _labels([(megabytes, loss.mean, arm) for megabytes, loss, arm in points]):
        panel.annotate("\n".join(names), place, (4, 11), textcoords="offset points", fontsize=6, va="top")
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.set_xlabel("MB sent by region 0", fontsize=8)
    panel.set_ylabel("loss, nats per byte", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _labels(points: list[tuple[float, float, str]]) -> list[tuple[tuple[float, float], list[str]]]:
    """Where to write which names: those of points that lie close together share a place, from the highest down."""
    ys = [y for _, y, _ in points]
    apart = _CLOSE * (max(ys, default=0.0) - min(ys, default=0.0))
    found: list[tuple[tuple[float, float], list[str]]] = []
    for x, y, name in sorted(points, key=lambda point: -point[1]):
        near = [
            names
            for (left, high), names in found
            if max(x, left) <= _RATIO * min(x, left) and high - y <= apart * len(names)
        ]
        if near:
            near[0].append(name)
        else:
            found.append(((x, y), [name]))
    return found
