"""Finds the journals of runs in folders that people name, and reads them, also damaged ones and those of a run that trains."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InputError, short
from ...run.journal import BEGINNINGS, lines_of, of_newest

Event = Mapping[str, Any]
MOST = 2**53
MOST_NUMBERED = 10**5
"""No run has so many regions or fragments."""
MOST_SECONDS = 1e10
MOST_NUMBER = 1e30
"""Numbers that are larger, or smaller than its inverse, cannot be drawn; journals of runs that diverge may have them."""

NAME = "journal.jsonl"
_MOST_NAMED = 20
"""Most damaged lines of a journal that are named."""
_UNKNOWN = 0
"""The number of regions in a journal whose `start` is damaged."""


class Rule(NamedTuple):
    """What holds for a field, and how a message says it."""

    holds: Callable[[Any], bool]
    words: str


def _is_count(value: Any, most: int = MOST) -> bool:
    return type(value) is int and 0 <= value < most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_seconds(value: Any) -> bool:
    return _is_number(value) and 0 <= value < MOST_SECONDS


def _or_none(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.words}, or null")


def _list_of(rule: Rule) -> Rule:
    return Rule(
        lambda value: isinstance(value, list) and len(value) < MOST_NUMBERED and all(map(rule.holds, value)),
        f"a list of which each is {rule.words}",
    )


COUNT = Rule(_is_count, "a whole number, not negative")
NUMBERED = Rule(lambda value: _is_count(value, MOST_NUMBERED), f"a whole number below {MOST_NUMBERED:,}")
NUMBER = Rule(_is_number, "a finite number")
SECONDS = Rule(_is_seconds, "a number of seconds, not negative")
TEXT = Rule(lambda value: isinstance(value, str), "a string")
MAPPING = Rule(lambda value: isinstance(value, dict), "a mapping")
COASTED = Rule(
    lambda value: (
        isinstance(value, dict)
        and all(each.isascii() and each.isdigit() and len(each) < 6 for each in value)
        and all(map(_is_count, value.values()))
    ),
    "a mapping of numbers of regions to inner steps",
)
SOME_SECONDS, SOME_NUMBER = _or_none(SECONDS), _or_none(NUMBER)
_ALWAYS = {"kind": TEXT, "time_s": SECONDS, "step": COUNT}
_START = {"region": NUMBERED, "num_regions": NUMBERED, "num_fragments": NUMBERED, "outer": MAPPING}
_TRANSFER = {"fragment": NUMBERED, "sent_at": COUNT}
_NEEDED: dict[str, dict[str, Rule]] = {
    "start": _START,
    "resume": _START,
    "send": {"fragment": NUMBERED},
    "land": _TRANSFER,
    "void": _TRANSFER,
    "guard": {**_TRANSFER, "regions": MAPPING},
    "epoch": {"epoch": COUNT, "members": _list_of(NUMBERED)},
    "join": {"epoch": COUNT, "region": NUMBERED},
    "late": {"epoch": COUNT, "region": NUMBERED},
    "left": {"epoch": COUNT, "region": NUMBERED},
    "away": {"held_s": SECONDS},
    "note": {"message": TEXT},
}
"""What an event of a kind must have."""
_IF_THERE: dict[str, Rule] = {
    **dict.fromkeys(("blocked_s", "took_s", "transfer_s", "rested_s", "at", "eval_runtime"), SOME_SECONDS),
    **dict.fromkeys(("norm", "outer_grad_norm", "loss"), SOME_NUMBER),
    **dict.fromkeys(("eval_loss", "eval_perplexity", "eval_accuracy"), SOME_NUMBER),
    **dict.fromkeys(("bytes_sent", "num_params", "max_steps"), _or_none(COUNT)),
    **dict.fromkeys(("versions", "training"), MAPPING),
    **dict.fromkeys(("run", "journal", "message", "timing", "why"), TEXT),
    "from_region": NUMBERED,
    "losses": COUNT,
    "coasted": COASTED,
    "norms": _list_of(SOME_NUMBER),
    "members": _list_of(NUMBERED),
}
"""What a field must be if an event has it."""


def wrong_with(event: Event) -> str | None:
    """Why a mapping in a journal's line is no event; None if it is one.

    >>> wrong_with({"kind": "send", "time_s": 1.5, "step": 3, "fragment": 0})
    >>> wrong_with({"kind": "send", "time_s": 1.5, "step": -3})
    'step=-3 is not a whole number, not negative'
    """
    for name, rule in _ALWAYS.items():
        if not rule.holds(event.get(name)):
            return _words(name, event, rule)
    kind = event["kind"]
    needed = _NEEDED.get(kind, {})
    for name, rule in needed.items():
        if not rule.holds(event.get(name)):
            return _words(name, event, rule)
    for name, rule in _IF_THERE.items():
        if name in event and name not in needed and not rule.holds(event[name]):
            return _words(name, event, rule)
    if kind in BEGINNINGS and not isinstance(event["outer"].get("method"), str):
        return "outer has no method"
    return None


def _words(name: str, event: Mapping[str, Any], rule: Rule) -> str:
    if name not in event:
        return f"{name} is missing"
    text = (
        repr(event[name]) if not isinstance(event[name], int) or abs(event[name]) < MOST else "a huge number"
    )
    return f"{name}={text[:40]} is not {rule.words}"


def figure(event: Event, name: str) -> float | None:
    """A number of an event that can be drawn; None if there is none of this name."""
    value = event.get(name)
    return float(value) if _is_number(value) and abs(value) < MOST_NUMBER else None  # type: ignore[arg-type]


Events = list[dict[str, Any]]


@dataclass
class RegionJournal:
    """What one region has written about a run.

    Attributes:
        events: in order; the first is a start or a resume.
        given_up: events of inner steps that were made again after a resume, one list per resume.
        damaged: a sentence for each unreadable line, or for the first of many.
        num_damaged: how many lines are unreadable.
    """

    path: Path
    region: int
    events: Events
    given_up: list[Events] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    num_damaged: int = 0

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
    """Read a journal, and what was given up before its resumes; None if no line is readable. Damaged ones are named, not used.

    Raises:
        InputError: the file cannot be read, or nothing says of which region it is.
    """
    lines, damaged = _lines(path)
    events, given_up = of_newest(lines)
    if not events:
        return None
    first = next((place for place, event in enumerate(events) if event["kind"] in BEGINNINGS), None)
    if first is None:
        named = re.search(r"region-(\d{1,5})$", str(path.parent.parent))
        if named is None:
            raise InputError(
                f"{short(path)} has no line that says of which region it is (its `start` is damaged or missing). Put it into "
                f"region-N/cocodc/{NAME}, where N is the number of the region."
            )
        region = int(named[1])
        num_fragments = 1 + max((event["fragment"] for event in events if event["kind"] == "send"), default=0)
        start = {"region": region, "num_regions": _UNKNOWN, "num_fragments": num_fragments}
        outer = {"method": "unknown"}
        first, events = 0, [{**events[0], "kind": "start", **start, "outer": outer}, *events]
    events = events[first:]
    region = events[0]["region"]
    named_lines = damaged[:_MOST_NAMED]
    if damaged[_MOST_NAMED:]:
        named_lines.append(f"{short(path)}: {len(damaged) - _MOST_NAMED} more lines are damaged")
    return RegionJournal(path, region, events, given_up, named_lines, len(damaged))


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


def unreadable(journals: Sequence[RegionJournal]) -> list[str]:
    """The sentences about damaged lines of several journals."""
    return [sentence for journal in journals for sentence in journal.damaged]
