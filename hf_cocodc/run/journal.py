"""The record of a run: one JSON line per event, in the order of the events. Summary, pictures and report read only it.

Every line has `kind`, `time_s` (seconds since the run began, by the clock of the link) and `step` (inner step). Norms have no
unit; NaN and infinities become null. `events.py` has the fields of each kind, `docs/reference/journal.md` explains them; `epoch`,
`retry`, `late`, `left`, `join` and `away` are only in runs that go on without a lost region (`regions.on_loss`).

The file is only appended to, by whatever run writes in the folder. Each `start` and `resume` names its record with a number,
which checkpoints have, too: a reader takes the lines of the newest record, without those behind the checkpoint of a `resume`
(`of_newest`). A region that comes back to a run while the others train goes on with its record, and gives nothing up.
"""

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError, short
from .events import refuse_unknown

Event = dict[str, Any]
BEGINNINGS = ("start", "resume")
"""Each process of a region begins with a line of one of these kinds."""


class Record(NamedTuple):
    """The events of a run in a journal, and those of inner steps that were made again, one list for each resume."""

    events: list[Event]
    given_up: list[list[Event]]


def of_newest(events: Iterable[Event]) -> Record:
    """The newest record in a journal.

    >>> lines = [("start", 0, "a"), ("send", 5, None), ("start", 0, "b"), ("send", 9, None), ("resume", 3, "a")]
    >>> newest = of_newest({"kind": kind, "step": step, "journal": name} for kind, step, name in lines)
    >>> [(event["kind"], event["step"]) for event in newest.events], [len(each) for each in newest.given_up]
    ([('start', 0), ('resume', 3)], [1])
    """
    record = Record([], [])
    records: dict[Any, Record] = {}
    for event in events:
        if event.get("kind") in BEGINNINGS:
            # without a beginning, its line is damaged
            known = records.get(event.get("journal"), None if records else record)
            record = Record([], []) if known is None or event["kind"] == "start" else known
            records[event.get("journal")] = record
            # a region that comes back makes none of its own steps again
            if "from_region" not in event:
                _give_up(record, event)
        record.events.append(event)
    return record


def _give_up(record: Record, resume: Event) -> None:
    behind = [event for event in record.events if _step(event) > _step(resume)]
    if behind:
        record.events[:] = [event for event in record.events if _step(event) <= _step(resume)]
        record.given_up.append(behind)


def _step(event: Event) -> float:
    step = event.get("step")
    return step if isinstance(step, int | float) else 0


def name_of(path: Path, run: str) -> str:
    """The name of the record in which a region that comes back to a run goes on; empty if the journal's last `run` is another."""
    events = _events(path.read_bytes()) if path.is_file() else []
    last = next((event for event in reversed(events) if event.get("kind") in BEGINNINGS), {})
    return str(last.get("journal", "")) if last.get("run") == run else ""


class Journal:
    """Writes events to a file, which is not touched before the first one; or nowhere, without a path.

    Args:
        path: a new file, or one with records of this run or of others.
        name: of the record that is continued; of a new one by default.
        clock: returns seconds.

    Attributes:
        earlier: returns events that other threads have noticed, and forgets them; they are written before the next one.
        on_event: called with each event, also where there is no file.
    """

    def __init__(
        self,
        path: Path | None = None,
        name: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path = path
        self.earlier: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]] = tuple
        self.on_event: Callable[[str, Mapping[str, Any]], None] = lambda kind, facts: None
        self._clock = clock
        self._later: list[tuple[str, Mapping[str, Any], float]] = []
        self._failure: OSError | None = None
        self.go_on(name)

    def go_on(self, name: str) -> None:
        """Continue the record `name` with the next event, which is a `resume`; begin a new one if it is empty."""
        self.name = name or secrets.token_hex(8)
        self._is_open = False
        self._began = self._clock()

    def check(self) -> None:
        """Raise InputError if the disk has refused an event; after the first, none is written. An event may come in the middle
        of an outer step, which an error would leave half done: `write` does not raise.
        """
        if self._failure is not None:
            raise InputError(
                f"the journal {self.path} cannot be written: {self._failure.strerror or self._failure}. Make room or change "
                "training.output_dir, then resume."
            ) from self._failure

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
        self.on_event(kind, facts)
        refuse_unknown(kind, facts)
        if self.path is None or self._failure is not None:
            return
        line = {"kind": kind, "time_s": 0.0, **facts}
        if kind in BEGINNINGS:
            line["journal"] = self.name
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        try:
            if not self._is_open:
                self._open(self.path, clean)
            clean["time_s"] = round((self._clock() if at is None else at) - self._began, 4)
            with self.path.open("ab") as file:
                file.write(f"{json.dumps(clean)}\n".encode())
        except OSError as error:
            self._failure = error

    def write_error(self, step: int, error: BaseException) -> None:
        """Append the error that ends the run; a disk that refuses does not hide it."""
        self.write("error", step=step, message=str(error), exit_code=getattr(error, "exit_code", 1))

    def _open(self, path: Path, line: Event) -> None:
        """Go on behind the last whole line: one that a crash has cut off is none. Seconds go on from the last event kept."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.is_file() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        before = of_newest([*_events(content[:whole]), line]).events[:-1]
        self._began -= before[-1].get("time_s", 0.0) if before else 0.0
        self._is_open = True


def read(path: Path) -> list[Event]:
    """Read the events of the newest record in a journal, but for lines that cannot be read."""
    return of_newest(_events(path.read_bytes())).events


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
