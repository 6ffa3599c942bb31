"""Finds the journals of runs in folders that people name, and reads them, also damaged ones and those of a run that trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import InputError, short
from ...run.events import wrong_with
from ...run.journal import BEGINNINGS, lines_of, of_newest

Event = Mapping[str, Any]
MOST_NUMBER = 1e30
"""Numbers that are larger, or smaller than its inverse, cannot be drawn; journals of runs that diverge may have them."""

NAME = "journal.jsonl"
_MOST_NAMED = 20
"""Most damaged lines of a journal that are named."""


def figure(event: Event, name: str) -> float | None:
    """A number of an event that can be drawn; None if there is none of this name."""
    value = event.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) >= MOST_NUMBER:
        return None
    return float(value)


Events = list[dict[str, Any]]


@dataclass
class RegionJournal:
    """What one region has written about a run.

    Attributes:
        events: in order; the first is a start or a resume.
        given_up: events of inner steps that were made again after a resume, one list per resume.
        damaged: a sentence for each unreadable line, or for the first of many.
    """

    path: Path
    region: int
    events: Events
    given_up: list[Events] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @cached_property
    def start(self) -> dict[str, Any]:
        """The newest start or resume, whose settings count."""
        return next(event for event in reversed(self.events) if event["kind"] in BEGINNINGS)

    @property
    def has_finished(self) -> bool:
        """Whether the region has reached the end of its run."""
        return any(event["kind"] == "finish" for event in self.events)

    @property
    def has_ended(self) -> bool:
        """Whether the region's training has ended, in whatever way."""
        return self.has_finished or self.events[-1]["kind"] == "error"


def find(folder: Path) -> list[Path]:
    """The journals in the output folder of a run or region; a file is a journal itself. Raises InputError if there is none."""
    if folder.is_file():
        return [folder]
    for place in (folder / "cocodc" / NAME, folder / NAME):
        if place.is_file():
            return [place]
    journals = sorted(folder.glob(f"region-*/cocodc/{NAME}"), key=_order)
    if journals:
        return journals
    if not folder.is_dir():
        raise InputError(
            f"{short(folder)} is not there. Name the output folder of a run (training.output_dir)."
        )
    inside = folder / "simulated"
    if inside.is_dir():
        raise InputError(f"{short(folder)} has no journal of its own; name {short(inside)}.")
    raise InputError(
        f"{short(folder)} has no journal (region-*/cocodc/{NAME}). Name the output folder of a run (training.output_dir), or "
        "that of one region. A run writes its journal once its regions have met."
    )


def _order(path: Path) -> tuple[int, str]:
    digits = path.parts[-3].rpartition("-")[2]
    return (int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 9 else 10**9, str(path))


def read_journal(path: Path) -> RegionJournal | None:
    """Read a journal, and what was given up before its resumes; None if no `start` or `resume` is readable, without which nobody
    knows of which region and run the other lines are. Damaged lines are named, not used. Raises InputError if the file cannot be
    read.
    """
    lines, damaged = _lines(path)
    events, given_up = of_newest(lines)
    first = next((place for place, event in enumerate(events) if event["kind"] in BEGINNINGS), None)
    if first is None:
        return None
    events = events[first:]
    region = events[0]["region"]
    named_lines = damaged[:_MOST_NAMED]
    if damaged[_MOST_NAMED:]:
        named_lines.append(f"{short(path)}: {len(damaged) - _MOST_NAMED} more lines are damaged")
    return RegionJournal(path, region, events, given_up, named_lines)


def _lines(path: Path) -> tuple[Events, list[str]]:
    """The events of a file, and a sentence for each line that is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{short(path)} cannot be read: {error.strerror}. Let this user read it, or leave it out."
        ) from error
    events: Events = []
    damaged: list[str] = []
    for number, content in lines_of(raw):
        wrong = content if isinstance(content, str) else wrong_with(content)
        if isinstance(content, dict) and wrong is None:
            events.append(content)
        else:
            damaged.append(f"{short(path)}, line {number}: {wrong}")
    return events, damaged
