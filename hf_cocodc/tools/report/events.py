"""What holds for the events of a journal that people give us: it may be damaged, or written by somebody else."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...run.journal import BEGINNINGS

Event = Mapping[str, Any]
MOST = 2**53
MOST_NUMBERED = 10**5
"""No run has so many regions or fragments."""
MOST_SECONDS = 1e10
MOST_NUMBER = 1e30
"""No number that can be drawn is larger, or smaller than its inverse. Journals of runs that diverge may have larger ones."""


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
    "unread": {"region": NUMBERED, "from_step": COUNT, "to_step": COUNT, "samples": _or_none(COUNT)},
}
"""What an event of a kind must have."""
_IF_THERE: dict[str, Rule] = {
    **dict.fromkeys(("blocked_s", "took_s", "transfer_s", "rested_s", "at", "eval_runtime"), SOME_SECONDS),
    **dict.fromkeys(("norm", "outer_grad_norm", "loss", "eval_loss", "eval_perplexity"), SOME_NUMBER),
    **dict.fromkeys(("bytes_sent", "num_params", "max_steps"), _or_none(COUNT)),
    **dict.fromkeys(("versions", "training"), MAPPING),
    **dict.fromkeys(("run", "message", "timing", "why"), TEXT),
    "from_region": NUMBERED,
    "coasted": COASTED,
    "norms": _list_of(SOME_NUMBER),
    "members": _list_of(NUMBERED),
}
"""What a field must be if an event has it."""


def wrong_with(event: Event) -> str | None:
    """Why a mapping that a journal's line holds is no event; None if it is one.

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
    """A number of an event that can be drawn; None if it has none of this name."""
    value = event.get(name)
    return float(value) if _is_number(value) and abs(value) < MOST_NUMBER else None  # type: ignore[arg-type]
