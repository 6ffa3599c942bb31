"""How every benchmark tells its figures: a table for people, JSON for programs."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Figures of one line by the titles of their columns; a number, a text, or None where there is none."""


@dataclass(frozen=True)
class Report:
    """Figures of one run, with what they were measured with.

    Attributes:
        title: what was measured, in a few words.
        setting: sizes, rates and counts that the figures hang on.
        rows: lines of the table, all with the same columns.
        notes: sentences that the reader needs to judge the figures.
    """

    title: str
    setting: Row
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        """The report as a person reads it."""
        titles = list(self.rows[0])
        cells = [titles, *([_show(row[title]) for title in titles] for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(titles))]
        numbers = [all(not isinstance(row[title], str) for row in self.rows) for title in titles]
        table = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, numbers, strict=True)
            ).rstrip()
            for line in cells
        ]
        rule = "-" * max(map(len, table))
        setting = ", ".join(f"{name}={_show(value)}" for name, value in self.setting.items())
        return [f"{self.title}: {setting}", "", table[0], rule, *table[1:], "", *self.notes]

    def write(self, path: Path) -> None:
        """The report as JSON, with the machine in general terms."""
        write(path, [self])


def write(path: Path, reports: Sequence[Report]) -> None:
    """Reports as JSON, an object each, in a list where there are several."""
    found = [{**asdict(report), "machine": machine()} for report in reports]
    path.write_text(json.dumps(found[0] if len(found) == 1 else found, indent=1) + "\n", encoding="utf-8")


def machine() -> Row:
    """What the figures were measured on, in general terms."""
    import psutil
    import torch

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _show(value: Any) -> str:
    """Three digits of a fraction, all of a whole number."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
