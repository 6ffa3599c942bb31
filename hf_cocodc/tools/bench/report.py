"""The report of a benchmark: a table for people, JSON for programs."""

import datetime
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ... import __version__

Row = dict[str, Any]
"""One line of figures by column: a number, a text, or None if there is no figure."""


@dataclass(frozen=True)
class BenchReport:
    """The figures of one benchmark and its settings.

    Attributes:
        setting: sizes, rates and counts that affect the figures.
        rows: all with the same columns.
        formats: by column, for numbers that need another form than three digits: a format specification, or a function.
        samples: the single measurements behind the rows, in order, by what was measured (with its unit).
    """

    title: str
    setting: Row
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    formats: Mapping[str, str | Callable[[Any], str]] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        titles = list(self.rows[0])
        shown = ([_show(row[title], self.formats.get(title)) for title in titles] for row in self.rows)
        cells = [titles, *shown]
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


def content(reports: Sequence[BenchReport]) -> dict[str, Any]:
    """Reports as JSON-serializable values: `hf_cocodc` (version), `date` (UTC), `machine` and `reports` (a list)."""
    entries = [asdict(report) for report in reports]
    for each in entries:
        del each["formats"]
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"hf_cocodc": __version__, "date": now, "machine": machine(), "reports": entries}


def write(path: Path, reports: Sequence[BenchReport]) -> None:
    """Write the `content` of reports to a file."""
    path.write_text(json.dumps(content(reports), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """The reports in a file of `write`, each with `machine`. Raises OSError if it cannot be read, ValueError if it has none."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not (isinstance(data, dict) and isinstance(data.get("reports"), list)):
        raise ValueError(f"{path} holds no reports of a benchmark")
    return [{**each, "machine": data.get("machine")} for each in data["reports"]]


def machine() -> Row:
    """The machine of the measurement, in general terms."""
    import psutil
    import torch

    from ...parts.tensors.slices import cores

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _show(value: Any, form: str | Callable[[Any], str] | None = None) -> str:
    """A number as text: floats below 1000 with three digits, others in full."""
    if value is None:
        return "-"
    if form is not None:
        return format(value, form) if isinstance(form, str) else form(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
