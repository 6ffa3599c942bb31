"""What regions and their coordinator tell each other: one JSON object a line, each of one of these kinds.

A region sends `Hello` or `Back` first. The coordinator answers with `Welcome`, `Resumed` or `Refuse`, perhaps after `Waiting`.
What is received is checked: each value has its type and range, and there are no other fields.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..errors import LinkError, short, shown
from ..net.members import Member, Whereabouts
from ..settings.regions import MOST_REGIONS
from ..validation import MOST

PROTOCOL = 32
"""Version of the data between regions. Raise it when two versions of this package could misunderstand each other."""
_T = TypeVar("_T")
Whole = Annotated[int, Meta(ge=-1, le=MOST)]
Real = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=100_000)]
Several = Annotated[tuple[_T, ...], Meta(max_length=MOST_REGIONS)]
_Regions = Annotated[int, Meta(ge=1, le=MOST_REGIONS)]
"""The coordinator goes through all of them."""


class Generation(NamedTuple):
    """Of a coordinator, for one run. `number` rises whenever a run begins or the state file is read; `name` is random.

    Two coordinators with copies of one file have equal numbers, and other names.
    """

    number: Whole
    name: Text


NO_GENERATION = Generation(0, "")


Lanes = Annotated[tuple[Whereabouts, ...], Meta(min_length=1, max_length=4096)]
"""Of a region, where each of its processes listens that has connections of its own."""


def host_of(lanes: Sequence[Whereabouts]) -> str:
    """The first address of a region's leader, for people; empty if it is unknown."""
    if not lanes:
        return ""
    return lanes[0].addresses[0][0] if lanes[0].addresses else "the storage"


class Place(NamedTuple):
    """A member, and how others reach it."""

    member: Member
    lanes: Lanes


class Terms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What membership needs of the settings that all regions share.

    Attributes:
        count: regions with which the run begins.
        least, most: `regions.min` and `regions.max`; where a lost region ends the run, both are `count`.
        wait_s: how long fewer than `least` wait for others; 0 where a lost region ends the run. For the times, see RegionConfig.
        grace_is_auto: whether `grace_s` counts only while training waits, too.
    """

    count: _Regions
    least: Whole = 1
    most: _Regions = 1
    wait_s: Real = 0.0
    timeout_s: Real = 120.0
    stuck_timeout_s: Real = 1200.0
    grace_s: Real | None = None
    grace_is_auto: bool = False

    @property
    def is_open(self) -> bool:
        """Whether regions may come in while the run trains, and leave it."""
        return self.wait_s > 0


class ControlMessage(Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """Whatever is sent by itself."""


# ---- from regions -------------------------------------------------------------------------------------------------


class Hello(ControlMessage, frozen=True, kw_only=True):
    """A new process of a region.

    Attributes:
        join: whether it is to enter a run that trains.
        lanes: how others reach it.
        machine: the name of its machine, for messages.
        token: random; no other process has it.
        compared: what must be equal in all regions (`hello.py`).
    """

    region: Whole
    join: bool
    lanes: Lanes
    machine: Text
    token: Text
    terms: Terms
    compared: dict[str, Any]


class Change(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A "join" or a "leave", numbered from 1 without gaps; it counts once all members know it (`link/rules.py`)."""

    number: Whole
    kind: Text
    member: Member


class Decision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What counts for all after a loss.

    Attributes:
        number: how many decisions there were before.
        members: who goes on, sorted.
        lost: all that were members in the eyes of anyone who reported, or are missed, and do not go on, sorted.
        done: the last operation that stands. All later ones are void, and are made again without the lost.
    """

    number: Whole
    members: Several[Member]
    lost: Several[Member]
    done: Whole


class Decided(ControlMessage, frozen=True, kw_only=True):
    """A decision counts. `whys` has the reason for the loss of each of `decision.lost`, in words."""

    generation: Generation
    decision: Decision
    whys: Several[Text] = ()


class Back(ControlMessage, frozen=True, kw_only=True):
    """A process that was connected before: its connection or the coordinator had gone.

    Attributes:
        token: of its `Welcome`: nobody else takes its place.
        generation: the newest of a coordinator that it has heeded.
        losses, changes: decisions on losses and changes that it knows. A coordinator that knows fewer has an old file.
    """

    run: Text
    member: Member
    token: Text
    generation: Generation
    losses: Whole
    changes: Whole


class Beat(ControlMessage, frozen=True, kw_only=True):
    """A heartbeat, about every second.

    Attributes:
        step: inner steps made.
        op: number of the transfer in hand; 0 for none.
        awaits: the region for which the link has waited for `waited_s`; None for none.
        idle_s: seconds since anything of this transfer moved.
        blocked_s: seconds for which training has waited; None if it does not.
        coasts: whether it makes steps without training: whoever trains comes later to each transfer, and is not late.
        doing: what it does besides training, in words.
        changes, losses: how many it has applied.
        members: who takes part, as it knows; empty while it is a newcomer.
        landed_at: inner step of the last landing, `landed_s` seconds ago; -1 before.
        max_steps: inner steps of the run; 0 if unknown.
        cosine: how well the outer gradients of the regions agreed at that landing; None if that is unknown.
        samples: of an inner step, as the regions have dealt them (`parts.deal`); 0 where each keeps its own batch.
    """

    step: Whole = 0
    op: Whole = 0
    awaits: Whole | None = None
    waited_s: Real = 0.0
    idle_s: Real = 0.0
    blocked_s: Real | None = None
    coasts: bool = False
    doing: Text = ""
    changes: Whole = 0
    losses: Whole = 0
    members: Several[Member] = ()
    landed_at: Whole = -1
    landed_s: Real = 0.0
    max_steps: Whole = 0
    cosine: Real | None = None
    samples: Whole = 0


class Report(ControlMessage, frozen=True, kw_only=True):
    """What a member says about itself when a member is lost. Until the decision it completes no further operation.

    Attributes:
        number: how many decisions on losses there were before.
        first: the first operation that it takes part in; 0 if it follows, and takes part in none yet.
        last: the last operation that it takes part in, if it is about to leave; None otherwise.
        done: the last operation that it has completed; `has`: whether it holds the result of the next one.
        lost: the members that it misses; `whys` has the reasons, in words.
        members: the members as it knows them, with itself; empty if it is none yet.
    """

    number: Whole
    member: Member
    first: Whole
    last: Whole | None = None
    done: Whole
    has: bool
    lost: Several[Member] = ()
    whys: Several[Text] = ()
    members: Several[Member] = ()

    def takes_part_in(self, operation: int) -> bool:
        return 0 < self.first <= operation and (self.last is None or operation <= self.last)


class Paired(ControlMessage, frozen=True, kw_only=True):
    """The connections for transfers with another process are there."""

    member: Member


class Ready(ControlMessage, frozen=True, kw_only=True):
    """A newcomer is less than one interval behind."""


class Leave(ControlMessage, frozen=True, kw_only=True):
    """A member wants to leave; it has said so in its trailers."""


class Heard(ControlMessage, frozen=True, kw_only=True):
    """A region has heard that it is to leave."""


class Stop(ControlMessage, frozen=True, kw_only=True):
    """A region must stop: all shall, at one step."""

    why: Text


class Promise(ControlMessage, frozen=True, kw_only=True):
    """A region does not pass the inner step `step` before it has the answer to question `number`."""

    number: Whole
    step: Whole


class Note(ControlMessage, frozen=True, kw_only=True):
    """Why a region is about to end, in words; others quote it."""

    text: Text


class Post(ControlMessage, frozen=True, kw_only=True):
    """A small message to another process of the run."""

    to: Member
    topic: Text
    content: dict[str, Any]


class Bye(ControlMessage, frozen=True, kw_only=True):
    """A region ends: it has "finished", "stopped" (all did), "left" or "failed". `place`: where its model lies, for people."""

    how: Text
    step: Whole = 0
    place: Text = ""


# ---- from the coordinator -----------------------------------------------------------------------------------------


class Waiting(ControlMessage, frozen=True, kw_only=True):
    """A region waits: for regions that have not come (`absent`), or for the reason `why`.

    After `Back`: this coordinator does not know the run, or its file is older than the run: it decides nothing for it.
    """

    absent: Several[Whole] = ()
    why: Text = ""


class Welcome(ControlMessage, frozen=True, kw_only=True):
    """A region is in a run. `run` is unique to it.

    Attributes:
        joins: whether the run trains already: this is a newcomer.
        members: with whom the run begins, or who takes part; `others` are other newcomers.
        token: what `Hello` said; `Back` says it again.
        differences: what regions have otherwise than the others, and may, in sentences.
        losses: decisions on losses so far.
        step: the furthest inner step known.
    """

    run: Text
    generation: Generation
    me: Member
    joins: bool
    members: Several[Place]
    token: Text = ""
    others: Several[Place] = ()
    differences: Several[Text] = ()
    losses: Whole = 0
    step: Whole = 0


class Resumed(ControlMessage, frozen=True, kw_only=True):
    """The coordinator knows a process that has come back."""

    generation: Generation


class Refuse(ControlMessage, frozen=True, kw_only=True):
    """The coordinator refuses a process, which raises `error`: a class of `errors`."""

    error: Text
    why: Text


class Ask(ControlMessage, frozen=True, kw_only=True):
    """Freeze, and report: decision `number` on a loss is sought."""

    number: Whole


class Hears(ControlMessage, frozen=True, kw_only=True):
    """Whether the coordinator has a connection to a process. One without may call again.

    `cut`: the connection was reset, or nothing came through: that says nothing of the process.
    """

    member: Member
    hears: bool
    cut: bool = False


class Suspect(ControlMessage, frozen=True, kw_only=True):
    """A member for which this one waits in operation `op` seems to be lost; `how`: "silent", "stuck", "late" or "cut"."""

    member: Member
    op: Whole
    how: Text
    why: Text


class Announce(ControlMessage, frozen=True, kw_only=True):
    """A change, for everybody."""

    generation: Generation
    change: Change


class Here(ControlMessage, frozen=True, kw_only=True):
    """Another process wants to come in: connect to it."""

    place: Place


class Gone(ControlMessage, frozen=True, kw_only=True):
    """A newcomer has gone before it came in."""

    member: Member


class LeaveNow(ControlMessage, frozen=True, kw_only=True):
    """An operator asks this region to leave."""

    why: Text


class AskStop(ControlMessage, frozen=True, kw_only=True):
    """Promise an inner step: see `Promise`."""

    number: Whole


class StopAt(ControlMessage, frozen=True, kw_only=True):
    """The answer to question `number`: all stop at inner step `step`; nobody, if it is 0. `whys`: why each region must stop."""

    number: Whole
    step: Whole
    whys: dict[str, Any] = {}


class Noted(ControlMessage, frozen=True, kw_only=True):
    """The note of another region."""

    region: Whole
    text: Text


class Posted(ControlMessage, frozen=True, kw_only=True):
    """A message of another process."""

    sender: Member
    topic: Text
    content: dict[str, Any]


class Over(ControlMessage, frozen=True, kw_only=True):
    """The run has ended, or all regions have stopped; for newcomers. See `Bye`."""

    how: Text
    step: Whole
    place: Text


class Alive(ControlMessage, frozen=True, kw_only=True):
    """The coordinator lives; about every second."""


# ---- from commands, and the answers -------------------------------------------------------------------------------


class AskLeave(ControlMessage, frozen=True, kw_only=True):
    """`hf-cocodc leave`; answered with `Done` once the region has heard it."""

    region: Whole


class Claim(ControlMessage, frozen=True, kw_only=True):
    """The lowest free number, for as long as this connection lives; answered with `Claimed` or `Refuse`."""


class Claimed(ControlMessage, frozen=True, kw_only=True):
    region: Whole


class Pull(ControlMessage, frozen=True):
    """The newest global model (`hf-cocodc pull`). Answered with `Waiting` now and then; with `Refuse`; or with what a region says
    on a connection on which it has said `Give`: `Given` and the bytes, or `Refuse`.
    """


class Give(ControlMessage, frozen=True, kw_only=True):
    """Of a region, on a connection of its own: what follows is for the caller of this name (`Wanted`)."""

    pull: Text


class Wanted(ControlMessage, frozen=True, kw_only=True):
    """To a member: the callers that wait for its model. The newest message of this kind names all of them."""

    pulls: Several[Text]


class Given(ControlMessage, frozen=True, kw_only=True):
    """What is given. The bytes of the files follow, in this order, and then `Sums`.

    Attributes:
        region: whose global model it is; of the inner step `step`, after so many `landings` in so many `fragments`.
        regions: those that take part.
        place: where the regions' last model will lie, for people; empty if unknown.
        files: sizes in bytes, by their names.
    """

    run: Text
    region: Whole
    step: Whole
    landings: Whole
    fragments: Whole
    regions: Several[Whole]
    place: Text = ""
    files: dict[str, Whole]


class Sums(ControlMessage, frozen=True, kw_only=True):
    """SHA-256 of the files that were given, by their names."""

    sha256: dict[str, Text]


class AskRecipe(ControlMessage, frozen=True, kw_only=True):
    """The recipe of a run that trains; answered with `RunRecipe` or `Refuse`."""


class RunRecipe(ControlMessage, frozen=True, kw_only=True):
    """What the region that opened the run has told of its recipe (`settings/handed.py`)."""

    recipe: dict[str, Any]


class Done(ControlMessage, frozen=True, kw_only=True):
    """What was asked is done."""


FromRegion = (
    Hello | Back | Beat | Report | Paired | Ready | Leave | Heard | Stop | Promise | Note | Post | Bye
)
FromCommand = AskLeave | Claim | AskRecipe
OfPulls = Pull | Give | Given | Sums
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
    | RunRecipe
    | Done
    | Wanted
)
AnyMessage = FromRegion | FromCommand | OfPulls | ToRegion
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(AnyMessage)


def from_line(line: bytes, decoder: msgspec.json.Decoder[Any] = _decoder) -> Any:
    """The message of a line (see `line_of`), each value of its type and range. Raises LinkError if it is none."""
    try:
        return decoder.decode(line)
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8
        said = shown(line[:80].decode(errors="replace"))
        raise LinkError(f"{said} is no message of a region of this version ({short(error)})") from None
