"""The record of a run: one JSON line an event, in the order they happened.

Kinds: start, resume, log, send, land, evaluate, finish, error. Every line carries `kind`, `time_s` (seconds since the journal
was opened) and, but for errors, `step` (inner step). The progress display, the summary and the pictures read nothing
else.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class Journal:
    """Writes events to a file; without a path they go nowhere.

    Args:
        path: a new file, or that of the run which is resumed.
        position: bytes of it that belong to the run up to its checkpoint; what lies behind them is cut off.
    """

    def __init__(self, path: Path | None = None, position: int = 0) -> None:
        self.path = path
        self._opened = time.perf_counter()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes()[:position] if path.is_file() else b""
            other = path.with_name(f"{path.name}.new")
            other.write_bytes(before)
            os.replace(other, path)  # who reads along notices another file, not one that shrank
            events = read(path)
            self._opened -= events[-1].get("time_s", 0.0) if events else 0.0

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path is not None else 0

    def write(self, kind: str, **facts: Any) -> None:
        """Append one event; numbers that JSON has no word for (NaN, infinities) become null."""
        if self.path is None:
            return
        line = {"kind": kind, "time_s": round(time.perf_counter() - self._opened, 4), **facts}
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        _append(self.path, clean)


def read(path: Path) -> list[dict[str, Any]]:
    """Every event of a journal; a last line that was cut off by a crash is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events


def append_error(path: Path, message: str, exit_code: int) -> None:
    """Add why a region ended to its journal, which may not exist yet: errors come before training too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, {"kind": "error", "message": message, "exit_code": exit_code})


def forget_errors(path: Path) -> None:
    """Take out why a run that goes on ended before."""
    if path.is_file():
        kept = [event for event in read(path) if event["kind"] != "error"]
        path.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
