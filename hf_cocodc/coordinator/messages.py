"""What regions and their coordinator tell each other: one JSON object a line, each of one of these kinds.

A region sends `Hello` or `Back` first. The coordinator answers with `Welcome`, `Resumed` or `Refuse`, perhaps after `Waiting`.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from ..errors import LinkError, short, shown
from ..net.letters import Member
from ..net.validation import MOST, whole
from ..settings.regions import MOST_REGIONS

_MOST_GENERATIONS = 1_000_000_000
"""Tickets are computed from generations, and must stay below `MOST`."""
PROTOCOL = 23
"""Version of the data between regions. Raise it when two versions of this package could misunderstand each other."""
LONGEST_TEXT = 100_000
"""Characters of a text."""


class Place(NamedTuple):
    """A member, and the address of its machine that others reach."""

    member: Member
    host: str


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What membership needs of the settings that all regions share. Raises ValueError if no run has so many regions.

    Attributes:
        count: regions with which the run begins.
        elastic: whether the run goes on without a lost region.
        least, most: `regions.min` and `regions.max`; for the times, see RegionConfig.
        grace_is_auto: whether `grace_s` counts from the moment when training began to wait.
    """

    count: int
    elastic: bool = False
    least: int = 1
    most: int = 1
    timeout_s: float = 120.0
    stuck_timeout_s: float = 1200.0
    grace_s: float | None = None
    grace_is_auto: bool = False

    def __post_init__(self) -> None:
        for number in (self.count, self.most):  # the coordinator goes through all of them
            whole(number, 1, MOST_REGIONS)


# ---- from regions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A new process of a region.

    Attributes:
        join: whether it is to enter a run that trains.
        host: address of its machine that others reach; `machine` is its name, for messages.
        token: random; no other process has it.
        compared: what must be equal in all regions (`hello.py`).
    """

    region: int
    join: bool
    host: str
    machine: str
    token: str
    terms: Terms
    compared: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A "join" or a "leave", numbered from 1 without gaps; it counts once all members know it (`link/rules.py`)."""

    number: int
    kind: str
    member: Member


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What counts for all after a loss.

    Attributes:
        number: how many decisions there were before.
        members: who goes on, sorted.
        lost: all that were members in the eyes of anyone who reported, or are missed, and do not go on, sorted.
        done: the last operation that stands. All later ones are void, and are made again without the lost.
    """

    number: int
    members: tuple[Member, ...]
    lost: tuple[Member, ...]
    done: int


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A decision counts. `whys` has the reason for the loss of each of `decision.lost`, in words."""

    generation: int
    decision: Decision
    whys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Back:
    """A process that was connected before: its connection or the coordinator had gone. It tells what it knows.

    Attributes:
        is_member: False while it is a newcomer.
        generation: the highest of a coordinator that it has heeded.
        losses: decisions on losses; `decisions` has the newest.
        changes: changes that it has applied; `announced` has those that it has not.
    """

    run: str
    member: Member
    is_member: bool
    host: str
    generation: int
    losses: int
    changes: int
    announced: tuple[Change, ...]
    decisions: tuple[Decided, ...] = ()
    members: tuple[Place, ...]
    terms: Terms
    compared: dict[str, Any]

    def __post_init__(self) -> None:
        whole(self.generation, 0, _MOST_GENERATIONS)
        for ticket in (self.member.ticket, *(place.member.ticket for place in self.members)):
            whole(ticket, -1, MOST >> 1)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A heartbeat, about every second.

    Attributes:
        step: inner steps made.
        op: number of the transfer in hand; 0 for none.
        awaits: the region for which the link has waited for `waited_s`; None for none.
        idle_s: seconds since anything of this transfer moved.
        blocked_s: seconds for which training has waited; None if it does not.
        doing: what it does besides training, in words.
        changes, losses: how many it has applied.
        members: who takes part, as it knows; empty while it is a newcomer.
        landed_at: inner step of the last landing, `landed_s` seconds ago; -1 before.
        max_steps: inner steps of the run; 0 if unknown.
    """

    step: int = 0
    op: int = 0
    awaits: int | None = None
    waited_s: float = 0.0
    idle_s: float = 0.0
    blocked_s: float | None = None
    doing: str = ""
    changes: int = 0
    losses: int = 0
    members: tuple[Member, ...] = ()
    landed_at: int = -1
    landed_s: float = 0.0
    max_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a member says about itself when a member is lost. Until the decision it completes no further operation.

    Attributes:
        number: how many decisions on losses there were before.
        first: the first operation that it takes part in; 0 if it follows, and takes part in none yet.
        last: the last operation that it takes part in, if it is about to leave; None otherwise.
        done: the last operation that it has completed; `has`: whether it holds the result of the next one.
        lost: the members that it misses; `whys` has the reasons, in words.
        members: the members as it knows them, with itself; empty if it is none yet.
    """

    number: int
    member: Member
    first: int
    last: int | None = None
    done: int
    has: bool
    lost: tuple[Member, ...] = ()
    whys: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()

    def takes_part_in(self, operation: int) -> bool:
        return 0 < self.first <= operation and (self.last is None or operation <= self.last)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The connections for transfers with another process are there."""

    member: Member


@dataclass(frozen=True, kw_only=True)
class Ways:
    """By which way this process is connected to each region: "direct", "reversed" or "relayed" (see `net.pairs.Pair`)."""

    regions: tuple[int, ...]
    ways: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A newcomer is less than one interval behind."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A member wants to leave; it has said so in its trailers."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A region has heard that it is to leave."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A region must stop: all shall, at one step."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A region does not pass the inner step `step` before it has the answer to question `number`."""

    number: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Note:
    """Why a region is about to end, in words; others quote it."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Post:
    """A small message to another process of the run."""

    to: Member
    topic: str
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bye:
    """A region ends: it has "finished", "stopped" (all did), "left" or "failed". `place`: where its model lies, for people."""

    how: str
    step: int = 0
    place: str = ""


# ---- from the coordinator -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A region waits: for regions that have not come (`absent`), or for the reason `why`."""

    absent: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """A region is in a run. `run` is unique to it.

    Attributes:
        joins: whether the run trains already: this is a newcomer.
        members: with whom the run begins, or who takes part; `others` are other newcomers.
        compared: what the regions are, in the order of `members`; of the first one if it joins.
        losses: decisions on losses so far.
        step: the furthest inner step known.
        relay: port of the relay on the coordinator's machine; None if there is none.
    """

    run: str
    generation: int
    me: Member
    joins: bool
    members: tuple[Place, ...]
    others: tuple[Place, ...] = ()
    compared: tuple[dict[str, Any], ...]
    losses: int = 0
    step: int = 0
    relay: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The coordinator knows a process that has come back."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """The coordinator refuses a process, which raises `error`: one of those that `caller.error_of` knows."""

    error: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Freeze, and report: decision `number` on a loss is sought."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Hears:
    """Whether the coordinator has a connection to a process. One without may call again.

    `cut`: the connection was reset, or nothing came through: that says nothing of the process.
    """

    member: Member
    hears: bool
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A member for which this one waits in operation `op` seems to be lost; `how`: "silent", "stuck", "late" or "cut"."""

    member: Member
    op: int
    how: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Announce:
    """A change, for everybody."""

    generation: int
    change: Change


@dataclass(frozen=True, kw_only=True)
class Here:
    """Another process wants to come in: connect to it."""

    place: Place


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A newcomer has gone before it came in."""

    member: Member


@dataclass(frozen=True, kw_only=True)
class LeaveNow:
    """An operator asks this region to leave."""

    why: str


@dataclass(frozen=True, kw_only=True)
class AskStop:
    """Promise an inner step: see `Promise`."""

    number: int


@dataclass(frozen=True, kw_only=True)
class StopAt:
    """The answer to question `number`: all stop at inner step `step`; nobody, if it is 0. `whys`: why each region must stop."""

    number: int
    step: int
    whys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Noted:
    """The note of another region."""

    region: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Posted:
    """A message of another process."""

    sender: Member
    topic: str
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Over:
    """The run has ended, or all regions have stopped; for newcomers. See `Bye`."""

    how: str
    step: int
    place: str


@dataclass(frozen=True, kw_only=True)
class Alive:
    """The coordinator lives; about every second."""


# ---- from commands, and the answers -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AskLeave:
    """`hf-cocodc leave`; answered with `Done` once the region has heard it."""

    region: int


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The lowest free number, for as long as this connection lives; answered with `Claimed` or `Refuse`."""


@dataclass(frozen=True, kw_only=True)
class Claimed:
    region: int


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was asked is done."""


FromRegion = (
    Hello | Back | Beat | Report | Paired | Ways | Ready | Leave | Heard | Stop | Promise | Note | Post | Bye
)
FromCommand = AskLeave | Claim
ToRegion = (
    Waiting
    | Welcome
    | Resumed
    | Refuse
    | Ask
    | Suspect
    | Hears
    | Decided
    | Announce
    | Here
    | Gone
    | LeaveNow
    | AskStop
    | StopAt
    | Noted
    | Posted
    | Over
    | Alive
    | Claimed
    | Done
)
Message = FromRegion | FromCommand | ToRegion

KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Message)}


def to_plain(message: Any) -> dict[str, Any]:
    """The message as JSON can express it."""
    return {"kind": type(message).__name__, **_plain(message)}


def _plain(value: Any) -> Any:
    """Like `dataclasses.asdict`, which would copy what regions compare: an entry for each parameter of a model."""
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def from_plain(plain: Any, kinds: Mapping[str, type] = KINDS) -> Any:
    """The message that `to_plain` made, of one of these kinds, each value of its type and range. Raises LinkError otherwise."""
    try:
        given = dict(plain)
        kind = kinds[given.pop("kind")]
        return _value(kind, given)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise LinkError(
            f"{shown(plain)} is no message of a region of this version ({short(error)})"
        ) from None


def _value(kind: Any, plain: Any) -> Any:
    """`plain` as a value of type `kind`. Raises ValueError, TypeError or KeyError if it is none."""
    if kind is Any or kind is dict or get_origin(kind) is dict:
        if not isinstance(plain, dict):
            raise TypeError(shown(plain))
        return plain
    if kind is int:
        return whole(plain, -1, MOST)
    if kind is float:
        if isinstance(plain, bool) or not isinstance(plain, int | float) or not abs(plain) < math.inf:
            raise TypeError(shown(plain))
        return float(plain)
    if kind in (str, bool):
        if type(plain) is not kind or (kind is str and len(plain) > LONGEST_TEXT):
            raise TypeError(shown(plain))
        return plain
    if get_origin(kind) in (types.UnionType, typing.Union):
        options = [each for each in get_args(kind) if each is not type(None)]
        return None if plain is None else _value(options[0], plain)
    if get_origin(kind) is tuple:
        if not isinstance(plain, list | tuple) or len(plain) > MOST_REGIONS:
            raise TypeError(shown(plain))
        return tuple(_value(get_args(kind)[0], each) for each in plain)
    hints, make = _hints(kind), kind
    if dataclasses.is_dataclass(kind):
        if not isinstance(plain, Mapping) or not plain.keys() <= hints.keys():
            raise KeyError(shown(plain))
        return make(**{name: _value(hints[name], each) for name, each in plain.items()})
    if len(plain) != len(hints):  # a NamedTuple
        raise TypeError(shown(plain))
    return kind(*(_value(each, value) for each, value in zip(hints.values(), plain, strict=True)))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
