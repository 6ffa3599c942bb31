"""What a line of a journal has, by its kind. The writer takes no other kind or field, and a reader no other value.

`docs/reference/journal.md` says what the fields mean.
"""

import functools
import operator
import re
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


def _kind(name: str) -> str:
    """
    >>> _kind("SitOutEvent")
    'sit_out'
    """
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Event")).lower()


class Event(Struct, tag_field="kind", tag=_kind):
    """What every line has."""

    time_s: Seconds
    step: Count


class MethodSettings(Struct):
    """The settings of a method, of which the name is always there."""

    method: str


class StartEvent(Event):
    region: Numbered
    num_regions: Numbered
    num_fragments: Numbered
    outer: MethodSettings
    run: str
    journal: str = ""
    joins: bool = False
    num_params: Count | None = None
    max_steps: Count | None = None
    timing: str = "measured"
    bytes_sent: Count | None = None
    from_region: Numbered | None = None
    checkpoint: str | None = None
    at: Seconds | None = None
    versions: dict[str, Any] = {}
    training: dict[str, Any] = {}


class ResumeEvent(StartEvent):
    pass


class TimedEvent(Event):
    took_s: Seconds | None = None
    blocked_s: Seconds | None = None


class LogEvent(Event):
    """Trainer's own fields come on top."""

    loss: Number | None = None
    learning_rate: Number | None = None
    sent: Number | None = msgspec.field(default=None, name="outer/bytes_sent")


class EvaluateEvent(TimedEvent):
    """Trainer's own fields come on top."""

    weights: str = "global"
    eval_loss: Number | None = None
    eval_perplexity: Number | None = None
    eval_accuracy: Number | None = None
    eval_runtime: Seconds | None = None


class SaveEvent(TimedEvent):
    pass


class PullEvent(TimedEvent):
    pass


class SendEvent(TimedEvent, kw_only=True):
    fragment: Numbered
    numel: Count | None = None


class LandEvent(TimedEvent, kw_only=True):
    fragment: Numbered
    sent_at: Count
    staleness: Count | None = None
    outer_grad_norm: Number | None = None
    cosine: Number | None = None
    bytes_sent: Count | None = None
    transfer_s: Seconds | None = None
    rested_s: Seconds | None = None
    regions: Count | None = None
    members: Members = []
    norms: Norms = []
    coasted: dict[RegionName, Count] = {}
    digest: int | None = None


class VoidEvent(LandEvent):
    pass


class SitOutEvent(Event):
    fragment: Numbered


class GuardEvent(Event):
    fragment: Numbered
    sent_at: Count
    regions: dict[str, Any]
    norms: Norms = []
    limit: Number | None = None


class BeginAnewEvent(Event):
    rounds: Count | None = None
    times: Count | None = None


class BestEvent(Event):
    metric: str | None = None
    value: Number | None = None


class EpochEvent(Event):
    epoch: Count
    members: Members
    losses: Count = 0
    why: str = ""


class RetryEvent(Event):
    epoch: Count
    op: Count
    what: str
    members: Members
    why: str = ""


class LateEvent(Event):
    epoch: Count
    region: Numbered
    why: str = ""


class LeftEvent(LateEvent):
    pass


class JoinEvent(Event):
    epoch: Count
    region: Numbered
    donor: Numbered | None = None
    base: Count | None = None


class AwayEvent(Event):
    held_s: Seconds
    why: str = ""


class WaysEvent(Event):
    ways: dict[str, str]


class DealEvent(Event):
    samples: dict[RegionName, Count]
    speeds: dict[RegionName, Number] = {}
    why: str = ""


class LinkEvent(Event):
    link: str
    why: str = ""


class NoteEvent(Event):
    message: str


class FinishEvent(Event):
    blocked_s: Seconds | None = None
    bytes_sent: Count | None = None
    sends: Count | None = None
    digest: int | None = None


class ErrorEvent(Event):
    message: str = ""
    exit_code: int | None = None


def _kinds(of: type[Event]) -> list[type[Event]]:
    return [kind for each in of.__subclasses__() for kind in (each, *_kinds(each))]


_ALL = [each for each in _kinds(Event) if each is not TimedEvent]
FIELDS = {
    str(each.__struct_config__.tag): frozenset(field.encode_name for field in msgspec.structs.fields(each))
    for each in _ALL
}
"""The fields of each kind of event."""
_OPEN = frozenset({"log", "evaluate"})
_ANY: Any = functools.reduce(operator.or_, _ALL)


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
        msgspec.convert(event, _Other if isinstance(kind, str) and kind not in FIELDS else _ANY)
    except (msgspec.ValidationError, OverflowError) as error:
        return str(error)
    return None


class _Other(Struct):
    """What a line of any kind has."""

    time_s: Seconds
    step: Count
