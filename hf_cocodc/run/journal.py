"""The record of a run: one JSON line per event, in the order of the events.

Kinds: start, resume, log, send, land, evaluate, finish, error. Every line has `kind`. Every line except an error also has
`time_s` (seconds since the journal was opened) and `step` (inner step). The progress display, the summary and the pictures
read only the journal.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class Journal:
    """Writes events to a file, or nowhere without a path.

    Args:
        path: a new file, or the journal of the run to resume.
        position: number of bytes that belong to the run up to its checkpoint; the rest of the file is cut off.
    """

    def __init__(self, path: Path | None = None, position: int = 0) -> None:
        self.path = path
        self._opened = time.perf_counter()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes()[:position] if path.is_file() else b""
            other = path.with_name(f"{path.name}.new")
            other.write_bytes(before)
            os.replace(other, path)  # a reader notices a new file, but not a file that has shrunk
            events = read(path)
            self._opened -= events[-1].get("time_s", 0.0) if events else 0.0

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path is not None else 0

    def write(self, kind: str, **facts: Any) -> None:
        """Append one event. NaN and infinities become null, because JSON cannot express them."""
        if self.path is None:
            return
        line = {"kind": kind, "time_s": round(time.perf_counter() - self._opened, 4), **facts}
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        _append(self.path, clean)


def read(path: Path) -> list[dict[str, Any]]:
    """Read every event of a journal, except a last line that a crash cut off."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return events


def append_error(path: Path, message: str, exit_code: int) -> None:
    """Append the error that ended a region. Its journal may not exist yet: errors also happen before training."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, {"kind": "error", "message": message, "exit_code": exit_code})


def forget_errors(path: Path) -> None:
    """Remove the errors of the earlier run from the journal of a run that is resumed."""
    if path.is_file():
        kept = [event for event in read(path) if event["kind"] != "error"]
        path.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
