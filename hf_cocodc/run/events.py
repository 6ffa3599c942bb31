"""What a line of a journal has, by its kind. The writer takes no other kind or field, and a reader no other value.

`docs/reference/journal.md` says what the fields mean.
"""

import functools
import operator
import sys
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ..validation import Count

MOST_NUMBERED = 10**5
"""No run has so many regions or fragments."""
Numbered = Annotated[int, Meta(ge=0, lt=MOST_NUMBERED)]
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Annotated[float, Meta(ge=0, lt=1e10)]
Members = Annotated[list[Numbered], Meta(max_length=MOST_NUMBERED)]
Norms = Annotated[list[Number | None], Meta(max_length=MOST_NUMBERED)]
RegionName = Annotated[str, Meta(pattern="^[0-9]{1,5}$")]
"""The number of a region as the name of a field."""


class _Line(Struct):
    """What a line of any kind has."""

    time_s: Seconds
    step: Count


class _Settings(Struct):
    """The settings of a method, of which the name is always there."""

    method: str


Fields = dict[str, Any]
_TIMED: Fields = {"took_s": Seconds | None, "blocked_s": Seconds | None}
_BEGINNING = (
    {"region": Numbered, "num_regions": Numbered, "num_fragments": Numbered, "outer": _Settings, "run": str},
    {"journal": str, "joins": bool, "num_params": Count | None, "max_steps": Count | None, "timing": str}
    | {"bytes_sent": Count | None, "from_region": Numbered | None, "checkpoint": str | None}
    | {"at": Seconds | None, "versions": dict[str, Any], "training": dict[str, Any]},
)
_LANDING = (
    {"fragment": Numbered, "sent_at": Count},
    _TIMED
    | {"staleness": Count | None, "outer_grad_norm": Number | None, "cosine": Number | None}
    | {"bytes_sent": Count | None, "transfer_s": Seconds | None, "rested_s": Seconds | None}
    | {"regions": Count | None, "members": Members, "norms": Norms}
    | {"coasted": dict[RegionName, Count], "digest": int | None},
)
_OF_REGION = ({"epoch": Count, "region": Numbered}, {"why": str})
_SCHEMA: dict[str, tuple[Fields, Fields]] = {
    "start": _BEGINNING,
    "resume": _BEGINNING,
    "log": ({}, {"loss": Number | None, "learning_rate": Number | None, "outer/bytes_sent": Number | None}),
    "evaluate": (
        {},
        _TIMED
        | {"weights": str, "eval_loss": Number | None, "eval_perplexity": Number | None}
        | {"eval_accuracy": Number | None, "eval_runtime": Seconds | None},
    ),
    "save": ({}, _TIMED),
    "pull": ({}, _TIMED),
    "send": ({"fragment": Numbered}, _TIMED | {"numel": Count | None}),
    "land": _LANDING,
    "void": _LANDING,
    "sit_out": ({"fragment": Numbered}, {}),
    "guard": (
        {"fragment": Numbered, "sent_at": Count, "regions": dict[str, Any]},
        {"norms": Norms, "limit": Number | None},
    ),
    "begin_anew": ({}, {"rounds": Count | None, "times": Count | None}),
    "best": ({}, {"metric": str | None, "value": Number | None}),
    "epoch": ({"epoch": Count, "members": Members}, {"losses": Count, "why": str}),
    "retry": ({"epoch": Count, "op": Count, "what": str, "members": Members}, {"why": str}),
    "late": _OF_REGION,
    "left": _OF_REGION,
    "join": ({"epoch": Count, "region": Numbered}, {"donor": Numbered | None, "base": Count | None}),
    "away": ({"held_s": Seconds}, {"why": str}),
    "ways": ({"ways": dict[str, str]}, {}),
    "deal": ({"samples": dict[RegionName, Count]}, {"speeds": dict[RegionName, Number], "why": str}),
    "link": ({"link": str}, {"why": str}),
    "note": ({"message": str}, {}),
    "finish": (
        {},
        {
            "blocked_s": Seconds | None,
            "bytes_sent": Count | None,
            "sends": Count | None,
            "digest": int | None,
        },
    ),
    "error": ({}, {"message": str, "exit_code": int | None}),
}
"""By its kind, what a line must have beside what any has, and what it may have."""
FIELDS = {kind: frozenset(("time_s", "step", *must, *may)) for kind, (must, may) in _SCHEMA.items()}
"""The fields of each kind of event."""
_OPEN = frozenset({"log", "evaluate"})
"""Lines of Trainer, whose own fields come on top."""


def _struct_of(kind: str, must: Fields, may: Fields) -> type[Struct]:
    plain = {name: name.replace("/", "_") for name in (*must, *may)}
    fields: list[Any] = [(plain[name], of) for name, of in must.items()]
    fields += [(plain[name], of, None) for name, of in may.items()]
    names = {field: name for name, field in plain.items()}
    return msgspec.defstruct(kind, fields, bases=(_Line,), tag_field="kind", tag=kind, rename=names)


_ANY: Any = functools.reduce(operator.or_, (_struct_of(kind, *fields) for kind, fields in _SCHEMA.items()))


def refuse_unknown(kind: str, facts: Any) -> None:
    """Raise TypeError if no event has this kind, or these fields."""
    unknown = facts.keys() - FIELDS.get(kind, frozenset())
    if kind not in FIELDS or (unknown and kind not in _OPEN):
        raise TypeError(f"the schema of journals (run/events.py) has no {kind!r} with {sorted(unknown)}")


def wrong_with(event: Any) -> str | None:
    """Why the mapping of a journal's line is no event, in words; None if it is one. A kind of a later version is one.

    >>> wrong_with({"kind": "send", "time_s": 1.5, "step": 3, "fragment": 0})
    >>> wrong_with({"kind": "send", "time_s": 1.5, "step": -3, "fragment": 0})
    'Expected `int` >= 0 - at `$.step`'
    """
    kind = event.get("kind")
    try:
        msgspec.convert(event, _Line if isinstance(kind, str) and kind not in FIELDS else _ANY)
    except (msgspec.ValidationError, OverflowError) as error:
        return str(error)
    return None
