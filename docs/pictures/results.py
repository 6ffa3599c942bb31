"""Pictures of results, drawn from the files in `docs/evidence`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from canvas import BLUE, INK, MUTED, ORANGE, RULE, TEAL, Canvas

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence"


class Gap(NamedTuple):
    """A difference of losses, and half of its interval."""

    mean: float
    half: float


class Series(NamedTuple):
    """A line of the picture `gap`: for each number of rounds, the gap to data-parallel training."""

    regions: int
    is_trained: bool
    points: dict[int, Gap]


def measured_gaps() -> list[Series]:
    """The gaps in the tables of the study `parity`."""
    text = (EVIDENCE / "studies" / "parity.md").read_text(encoding="utf-8")
    series: dict[tuple[int, bool], Series] = {}
    for cell in text.split("\n## ")[1:]:
        title = re.match(r"(?:M=(\d+), )?(from scratch|trained start), (\d+) rounds\n", cell)
        row = re.search(r"^\| diloco \| .*?\*{0,2}([+-][\d.]+) ± ([\d.]+)", cell, flags=re.MULTILINE)
        if title is None or row is None:
            continue
        regions, is_trained = int(title[1] or 4), title[2] == "trained start"
        line = series.setdefault((regions, is_trained), Series(regions, is_trained, {}))
        line.points[int(title[3])] = Gap(float(row[1]), float(row[2]))
    order = {4: 0, 2: 1, 8: 2}
    return sorted(series.values(), key=lambda each: (order.get(each.regions, each.regions), each.is_trained))


def gap(series: Sequence[Series]) -> Canvas:
    """The gap to data-parallel training over outer rounds."""
    canvas = Canvas(
        452,
        "The loss of DiLoCo less that of data-parallel training at equal tokens, over the number of outer rounds on a "
        "logarithmic axis, with 95 % intervals, for two, four and eight regions, from scratch and from a trained start.",
    )
    left, right, top, bottom = 84.0, 596.0, 84.0, 384.0
    rounds = sorted({count for each in series for count in each.points})
    ends = [gap.mean + way * gap.half for each in series for gap in each.points.values() for way in (-1, 1)]
    step = _tick(max(*ends, 0.0) - min(*ends, 0.0))
    low, high = math.floor(min(*ends, 0.0) / step), math.ceil(max(*ends, 0.0) / step)
    wide = math.log(max(rounds) / min(rounds)) or 1.0

    def across(count: int) -> float:
        return left + 30 + (right - left - 60) * math.log(count / min(rounds)) / wide

    def up(value: float) -> float:
        return bottom - (bottom - top) * (value / step - low) / (high - low)

    canvas.text(24, 34, "DiLoCo beside data-parallel training, over outer rounds", size=18, bold=True)
    canvas.text(
        24,
        56,
        "Held-out loss less that of data-parallel training at equal tokens, nats per byte",
        color=MUTED,
    )
    for number in range(low, high + 1):
        y = up(number * step)
        canvas.line((left, y), (right, y), color=INK if number == 0 else RULE, width=1)
        canvas.text(left - 10, y + 4, f"{number * step:+.2f}" if number else "0", anchor="end")
    for count in rounds:
        canvas.line((across(count), bottom), (across(count), bottom + 6), color=INK, width=1)
        canvas.text(across(count), bottom + 22, str(count), anchor="middle")
    canvas.small(right + 20, up(0) + 4, "0: data-parallel training")
    canvas.text((left + right) / 2, bottom + 46, "outer rounds (logarithmic)", anchor="middle", color=MUTED)
    colors = {4: BLUE, 2: ORANGE, 8: TEAL}
    for number, line in enumerate(series):
        color, aside = colors.get(line.regions, INK), 5 * (number - (len(series) - 1) / 2)
        dashes = "6 4" if line.is_trained else None
        places = {count: (across(count) + aside, up(gap.mean)) for count, gap in sorted(line.points.items())}
        canvas.line(*places.values(), color=color, width=2, stroke_dasharray=dashes)
        for count, (x, y) in places.items():
            mean, half = line.points[count]
            canvas.line((x, up(mean - half)), (x, up(mean + half)), color=color, width=1.5)
            for edge in (up(mean - half), up(mean + half)):
                canvas.line((x - 4, edge), (x + 4, edge), color=color, width=1.5)
            canvas.dot(x, y, 4.5, "#fff" if line.is_trained else color, stroke=color, stroke_width=2)
        y = top + 14 + 24 * number
        canvas.line(
            (right + 20, y - 4.5), (right + 52, y - 4.5), color=color, width=2, stroke_dasharray=dashes
        )
        fill = "#fff" if line.is_trained else color
        canvas.dot(right + 36, y - 4.5, 4.5, fill, stroke=color, stroke_width=2)
        canvas.text(
            right + 60, y, f"M={line.regions} {'trained start' if line.is_trained else 'from scratch'}"
        )
    y = top + 24 * len(series) + 26
    canvas.small(right + 20, y, "M: number of regions", "bars: 95 % intervals")
    return canvas


def _tick(span: float) -> float:
    """The distance of ticks: at most eight of them over a span."""
    unit = 10.0 ** math.floor(math.log10(span / 8 or 1.0))
    return next(unit * factor for factor in (1, 2, 5, 10) if span <= 8 * unit * factor)


FAST, SLOW = "100 ms, 1000 Mbit/s, lossless", "100 ms, 50 Mbit/s, 0.01 % loss"


def speed() -> Canvas:
    """The share of the speed that contestants keep over two links."""
    from hf_cocodc.tools.bench.report import read

    reports = [read(EVIDENCE / "benchmarks" / f"training-{count}-regions.json")[0] for count in (2, 4)]
    shares = [{(row["link"], row["contestant"]): row["share"] for row in each["rows"]} for each in reports]
    names = [each for link, each in shares[0] if link == FAST and each != "no link"]
    makers = {"accelerate": "Accelerate", "torchft": "torchft", "ours": "hf_cocodc"}
    groups: dict[str, list[str]] = {maker: [] for maker in makers}
    for each in names:
        groups[each.rpartition(" (")[2].removesuffix(")")].append(each)

    def kept_by(name: str) -> str:
        return " and ".join(f"{100 * shares[0][link, name]:.0f} %" for link in (FAST, SLOW))

    bar, row, heading = 12, 31, 30
    top = 122.0
    bottom = top + row * len(names) + heading * len(groups)
    canvas = Canvas(
        bottom + 66,
        "Share of the training speed that is kept over a link of 100 ms, at 1 Gbit/s and at 50 Mbit/s with 0.01 % loss. "
        f"With two regions, Accelerate's DDP keeps {kept_by('DDP (accelerate)')}, Streaming DiLoCo in fp4 of hf_cocodc keeps "
        f"{kept_by('Streaming fp4 (ours)')}.",
    )
    canvas.text(24, 34, "Share of the speed kept over a slow link", size=18, bold=True)
    canvas.text(
        24, 56, "Tokens/s, as a share of the same regions without a link. Round trip: 100 ms.", color=MUTED
    )
    for x, told, strong in ((24.0, "1 Gbit/s, no loss", True), (170.0, "50 Mbit/s, 0.01 % loss", False)):
        for number, color in enumerate((MUTED, BLUE)):
            canvas.box(x + 14 * number, 68, 12, 12, color, fill_opacity=None if strong else 0.45)
        canvas.small(x + 34, 78.5, told)
    panels = (160.0, 486.0)
    wide = 244.0
    for number, left in enumerate(panels):
        pace = reports[number]["setting"]["seconds a step counts as"]
        told = f"{(2, 4)[number]} regions, {pace:g} s an inner step"
        canvas.text(left, 108, told, bold=True)
        for x, edge in ((left, 0), (left + wide, 100)):
            dashes = "4 3" if edge else None
            canvas.line((x, top), (x, bottom), color=MUTED, width=1, stroke_dasharray=dashes)
            canvas.small(x, bottom + 18, f"{edge} %", anchor="middle")
    halo: dict[str, Any] = {"paint_order": "stroke", "stroke": "#fff", "stroke_width": 3}
    y = top
    for maker, group in groups.items():
        canvas.text(24, y + 21, makers[maker], bold=True, color=BLUE if maker == "ours" else INK)
        y += heading
        for each in group:
            canvas.text(panels[0] - 10, y + 16, each.rpartition(" (")[0], anchor="end")
            for left, kept in zip(panels, shares, strict=True):
                for place, link in enumerate((FAST, SLOW)):
                    share, color = kept[link, each], BLUE if maker == "ours" else MUTED
                    high = y + place * bar
                    canvas.box(left, high, wide * share, bar - 1, color, fill_opacity=0.45 if place else None)
                    canvas.text(left + wide * share + 5, high + 9.5, f"{100 * share:.0f} %", size=11, **halo)
            y += row
    setting = reports[0]["setting"]
    canvas.small(
        24,
        bottom + 44,
        f"A Llama of {setting['parameters'] / 1e6:.2f}M parameters, {setting['H']} inner steps a round, TCP "
        f"{setting['congestion control']}, emulated link, {reports[0]['machine']['cores']} cores.",
    )
    return canvas
