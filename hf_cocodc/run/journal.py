"""The record of a run: one JSON line per event, in the order of the events. Summary, pictures and report read only it.

Every line has `kind`, `time_s` (seconds since the run began, by the clock of the link) and `step` (inner step). Norms have no
unit; NaN and infinities become null. Older versions wrote fewer fields. `docs/reference/journal.md` explains the kinds
and their fields; `epoch`, `retry`, `late`, `left` and `join` are only in runs that go on without a lost region
(`regions.on_loss`).

No line is ever deleted. Lines that do not belong to the run move to `journal.1.jsonl`, then to `journal.2.jsonl`, and so on:
all lines of another run in the same folder, or those behind the checkpoint from which a run is resumed. A checkpoint has a hash
of the run's lines: if a resumed run does not find them at the beginning of the journal, it begins a new one. A region that
comes back to a run while the others train appends to its journal.
"""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError, short

Event = dict[str, Any]
BEGINNINGS = ("start", "resume")
"""Each process of a region begins with a line of one of these kinds."""


class Mark(NamedTuple):
    """How far a journal had come when a checkpoint of inner step `step` was saved (None if unknown): its bytes, and their
    SHA-256, which is empty if unknown, as in checkpoints of older versions.
    """

    position: int = 0
    sha256: str = ""
    step: int | None = None

    @classmethod
    def of(cls, path: Path, run: str) -> "Mark":
        """The end of a journal, for a region that comes back to a run; nothing if the journal's last `run` is another one."""
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        events = _events(whole)
        runs = [event.get("run") for event in events if event.get("kind") in BEGINNINGS]
        if not runs or runs[-1] != run:
            return cls()
        return cls(len(whole), hashlib.sha256(whole).hexdigest(), events[-1].get("step"))

    def fits(self, content: bytes) -> bool:
        """Whether a file's content begins with the lines of the run that made the mark."""
        ours = content[: self.position]
        if self.sha256:
            return hashlib.sha256(ours).hexdigest() == self.sha256
        if not ours:
            return True
        last = _events(ours)[-1:]
        behind = self.step is not None and any((event.get("step") or 0) > self.step for event in last)
        return len(ours) == self.position and ours.endswith(b"\n") and bool(last) and not behind


_BEGINNING = Mark()


class Journal:
    """Writes events to a file, which is not touched before the first one; or nowhere, without a path.

    Args:
        path: a new file, or the journal of the run to resume.
        mark: of the checkpoint that the run goes on from. Lines behind it move to another file; all do if the run is another
            one.
        clock: returns seconds.

    Attributes:
        earlier: returns events that other threads have noticed, and forgets them; they are written before the next one.
    """

    def __init__(
        self,
        path: Path | None = None,
        mark: Mark = _BEGINNING,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path = path
        self.earlier: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]] = tuple
        self._clock = clock
        self._began = clock()
        self._later: list[tuple[str, Mapping[str, Any], float]] = []
        self._mark: Mark | None = mark
        self._position, self._sha256 = 0, hashlib.sha256()
        self._failure: OSError | None = None

    def check(self) -> None:
        """Raise InputError if the disk has refused an event; after the first, none is written. An event may come in the middle
        of an outer step, which an error would leave half done: `write` does not raise.
        """
        if self._failure is not None:
            raise InputError(
                f"the journal {self.path} cannot be written: {self._failure.strerror or self._failure}. Make room or change "
                "training.output_dir, then resume."
            ) from self._failure

    def mark(self) -> Mark:
        """How far the journal has come."""
        if self.path is None:
            return Mark()
        if self._mark is not None:
            return self._mark
        return Mark(self._position, self._sha256.hexdigest())

    def write(self, kind: str, **facts: Any) -> None:
        """Append an event. NaN and infinities become null, because JSON cannot express them."""
        later, self._later = self._later, []
        for each in later:
            self._append(*each)
        self.write_earlier()
        self._append(kind, facts)

    def write_later(self, kind: str, **facts: Any) -> None:
        """Append an event of now before the next one; never, if there is none."""
        self._later.append((kind, facts, self._clock()))

    def write_earlier(self) -> None:
        """Append what `earlier` has."""
        for kind, facts in self.earlier():
            self._append(kind, facts)

    def _append(self, kind: str, facts: Mapping[str, Any], at: float | None = None) -> None:
        if self.path is None or self._failure is not None:
            return
        line = {"kind": kind, "time_s": 0.0, **facts}
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        try:
            if self._mark is not None:
                self._open(self.path, self._mark)
                self._mark = None
            clean["time_s"] = round((self._clock() if at is None else at) - self._began, 4)
            written = f"{json.dumps(clean)}\n".encode()
            with self.path.open("ab") as file:
                file.write(written)
            self._note(written)
        except OSError as error:
            self._failure = error

    def write_error(self, step: int, error: BaseException) -> None:
        """Append the error that ends the run; a disk that refuses does not hide it."""
        self.write("error", step=step, message=str(error), exit_code=getattr(error, "exit_code", 1))

    def _open(self, path: Path, mark: Mark) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.is_file() else b""
        to_keep = mark.position if mark.fits(content) else 0
        if content[to_keep:]:
            earlier_name(path).write_bytes(content[to_keep:])
        other = path.with_name(f"{path.name}.new")
        other.write_bytes(content[:to_keep])
        os.replace(other, path)  # a reader notices a new file, but not a file that has shrunk
        self._note(content[:to_keep])
        events = read(path)
        self._began -= events[-1].get("time_s", 0.0) if events else 0.0

    def _note(self, written: bytes) -> None:
        self._position += len(written)
        self._sha256.update(written)


def read(path: Path) -> list[Event]:
    """Read every event of a journal, but for lines that cannot be read."""
    return _events(path.read_bytes())


def _events(content: bytes) -> list[Event]:
    return [event for _, event in lines_of(content) if isinstance(event, dict)]


def lines_of(content: bytes) -> Iterator[tuple[int, Event | str]]:
    """The number of each line, and its event, or why it is none, in words. A last line that is incomplete is left out."""
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line.decode("utf-8"), parse_constant=lambda name: None)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                yield number, f"it is not JSON ({short(error, 60)})"
        else:
            yield number, event if isinstance(event, dict) else "it is not a mapping"


def earlier_name(path: Path) -> Path:
    """The free name for what a file held before: log.1.txt for the first log.txt in a folder, then log.2.txt, and so on."""
    ours = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}")
    matches = (ours.fullmatch(other.name) for other in path.parent.iterdir())
    newest = max((int(match[1]) for match in matches if match), default=0)
    return path.with_name(f"{path.stem}.{newest + 1}{path.suffix}")
