"""One picture of a comparison: `python -m tests.benchmarks.picture REPORT.json ... --output FILE.png`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_cocodc.tools.bench.report import read

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd")
BAR = 0.38


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """One panel per report: tokens/s of every contestant, as a share of the tokens/s of regions without a link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(row["link"] for report in reports for row in report["rows"]))
    most = max(len(_contestants(report)) for report in reports)
    size = (1.5 + 5.5 * len(reports), 1.8 + 0.42 * most)
    figure, panels = pyplot.subplots(1, len(reports), figsize=size, squeeze=False, layout="constrained")
    for panel, report in zip(panels[0], reports, strict=True):
        _panel(panel, report, links)
    keys = [pyplot.Rectangle((0, 0), 1, 1, color=color) for _, color in zip(links, COLORS, strict=False)]
    figure.legend(keys, links, loc="outside upper center", ncols=len(links), frameon=False)
    setting = reports[0]["setting"]
    figure.supxlabel(
        f"Llama of {setting['parameters'] / 1e6:.2f}M parameters, H = {setting['H']} inner steps, TCP "
        f"{setting['congestion control']}, {reports[0]['machine']['cores']} cores",
        fontsize=8,
    )
    figure.savefig(path, dpi=150)


def _panel(panel: Any, report: dict[str, Any], links: list[str]) -> None:
    names = _contestants(report)
    here = [link for link in links if any(row["link"] == link for row in report["rows"])]
    for number, link in enumerate(here):
        rows = {row["contestant"]: row for row in report["rows"] if row["link"] == link}
        for place, name in enumerate(names):
            row = rows.get(name)
            height = place + (number - (len(here) - 1) / 2) * BAR
            share = 100 * row["share"] if row and row.get("share") is not None else None
            words = f"{share:.0f} %" if share is not None else "failed" if row else "not run"
            panel.barh(height, share or 0, BAR, color=COLORS[links.index(link)])
            label = panel.text((share or 0) + 1, height, words, va="center", fontsize=7)
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(0, 115)
    panel.set_xticks(range(0, 101, 20))
    panel.set_xlabel("tokens/s, % of the same regions without a link")
    pace = report["setting"]["seconds a step counts as"]
    regions = next(row["regions"] for row in report["rows"] if row.get("regions"))
    panel.set_title(f"{regions} regions, {pace:g} s an inner step", fontsize=10)
    panel.axvline(100, color="gray", linewidth=0.8, linestyle="--", zorder=0)
    panel.spines[["top", "right"]].set_visible(False)


def _contestants(report: dict[str, Any]) -> list[str]:
    """The names of all contestants except the ceiling."""
    return list(dict.fromkeys(row["contestant"] for row in report["rows"] if row["contestant"] != "no link"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    options = parser.parse_args()
    draw([each for path in options.reports for each in read(path)], options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
