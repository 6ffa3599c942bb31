"""What a link is. Regions exchange data only through links while they train."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..parts.codecs.base import Conversation, Result
from ..parts.guard import Verdict
from ..parts.tensors.memory import Home
from .records import Record, Trailer, Words
from .stopping import StopAgreement

T = TypeVar("T")


class Arrival(NamedTuple):
    """A finished transfer.

    Attributes:
        result: the end of the codec's conversation.
        trailers: one per region that took part; equal in all regions.
        bytes_sent: payload bytes that this region sent for the transfer.
        seconds: time that the link took, from the moment when the last region came to the transfer.
        square: sum of squares of the mean, over all lanes of the region; computed while training goes on. Not finite if the
            mean is not, or is larger than what the regions sent (`parts.guard.believed`).
        members: the regions that took part, in the order of the trailers.
        verdict: how much each of them counted in the mean.
        changes: how often regions had come in or left before the transfer was sent; -1 if the link does not count that.
        ended_at: when the mean was here, by the link's clock; None if unknown.
    """

    result: Result
    trailers: tuple[Trailer, ...]
    bytes_sent: int
    seconds: float
    square: float
    members: tuple[int, ...]
    verdict: Verdict
    changes: int = -1
    ended_at: float | None = None

    @property
    def words(self) -> Words:
        """The words of the regions that took part."""
        return {region: trailer.word for region, trailer in zip(self.members, self.trailers, strict=True)}

    @property
    def is_finite(self) -> bool:
        """Whether the mean can be believed; equal in all regions, and before the landing only within a lane."""
        return math.isfinite(self.square)


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> Arrival:
        """Block until the transfer has ended; may be called again.

        Raises:
            LinkError: the transfer failed or its deadline passed; the message names the transfer and the region.
            LeftBehind: the other regions have gone on without this one.
        """
        ...


def as_they_say(trailers: Sequence[Trailer]) -> Verdict:
    """Every region counts with the weight in its trailer."""
    return Verdict(tuple(trailer.weight for trailer in trailers))


@dataclass(frozen=True)
class MeanRequest:
    """What a region brings to a mean over the regions.

    Attributes:
        converse: begins a conversation of a codec about this region's outer gradient; called while training goes on, and once
            more for every further attempt. Each conversation starts from the same values.
        numel: length of the outer gradient.
        trailer: returns this region's numbers, the same at every call; called while training goes on, before `converse`.
        what: names the transfer in messages ("fragment 0 sent at step 100").
        judge: how much each region counts in the mean, from the trailers of all; equal in all regions. By default with the
            weight in its trailer.
        home: where the values rest, and on which device the link computes with them; the mean rests there, too.
    """

    converse: Callable[[], Conversation]
    numel: int
    trailer: Callable[[], Trailer]
    what: str
    judge: Callable[[Sequence[Trailer]], Verdict] = as_they_say
    home: Home = field(default_factory=Home)


class Link:
    """Reaches the same lane of every other region. All regions make the same calls in the same order.

    The regions may change during a run: one is lost, or, where that does not end the run (`is_elastic`), leaves or comes in. A
    region keeps its id `region`. Each call has its own members: those that were there when it was made, less those that were
    lost before it ended. They are equal in all regions, while `members`, which shows what this region knows now, may differ at
    any one moment.

    What is written here holds for a link that passes on to another one, `_link`; or, without it, for regions that never change,
    and have nothing to say beside their calls.

    Attributes:
        lane: the shard of the region's model that this link carries; 0 if all ranks hold the same parameters.
        agreement: how ranks agree on a step to stop at; None if only transfers can tell them to stop.
        session: what the run does over a network beside calls (`run.session`); None without one.
        is_elastic: whether regions may come in and leave while the run trains.
        timing: whether `clock` shows "measured" or "simulated" seconds, or "none": it stands still.
    """

    region: int
    lane, num_lanes = 0, 1
    agreement: StopAgreement | None = None
    session: Any = None
    is_elastic = False
    timing = "measured"
    _link: "Link | None" = None

    @property
    def members(self) -> tuple[int, ...]:
        """The regions that are there now, in ascending order."""
        raise NotImplementedError

    @property
    def num_regions(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def most_regions(self) -> int:
        """The largest number of members that there can be, as far as it is known."""
        return self.num_regions if self._link is None else self._link.most_regions

    def takes_part(self) -> bool:
        """Whether this region takes part in calls made now; not while it is coming in."""
        return self._link is None or self._link.takes_part()

    @property
    def parties(self) -> tuple[int, ...]:
        """The members of the last `gather` or `broadcast`; equal in all of them."""
        return self.members if self._link is None else self._link.parties

    @property
    def knows(self) -> int:
        """The number of the newest change of the members that this region knows, for the next trailer."""
        return 0 if self._link is None else self._link.knows

    def landed(self, arrival: Arrival) -> None:
        """Called at every landing: a change that all its trailers know counts from the next inner step on."""
        if self._link is not None:
            self._link.landed(arrival)

    @property
    def awaits(self) -> int | None:
        """The region for which this link now waits; None if it waits for none."""
        return None if self._link is None else self._link.awaits

    def mean(self, request: MeanRequest) -> Handle:
        """Start the mean over the regions that a request asks for; returns at once."""
        raise NotImplementedError

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` (1-D fp64, on any device) over the lanes of this region."""
        return values

    def clock(self) -> float:
        """Seconds, by the clock that times transfers."""
        return time.perf_counter() if self._link is None else self._link.clock()

    def tick(self, inner_step: int, work: float = 1.0) -> None:
        """Called after every inner step with its number, before its transfers. Simulated time advances by an inner step; `work`
        says of how many such as the region's own settings ask for.
        """
        if self._link is not None:
            self._link.tick(inner_step, work)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        """Overwrite `flat` (fp32, host) with the values of region `source`; blocks until they are here.

        Without `source`, and if that region is gone, it is the first member.
        """
        raise NotImplementedError

    def count_broadcasts(self) -> int:
        """Bytes that this rank has sent with broadcasts, to all other regions together, since the last count."""
        return 0 if self._link is None else self._link.count_broadcasts()

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        """The record of every region in `parties`, in their order; blocks until all have called. See `records`."""
        raise NotImplementedError

    def lead(self, call: Callable[["Link"], T], what: str) -> T | None:
        """Let the region's leader make a call with its own link, for as long as it needs.

        Other ranks of the region wait, without a time-out, and return None. Messages call it `what`.
        """
        return call(self)

    def leave_note(self, reason: str) -> None:
        """Say why this region leaves. Other regions read the note when they hear that it leaves."""
        if self._link is not None:
            self._link.leave_note(reason)

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        """The note that `region` left, if any. Waits for it if it is not here yet."""
        return None if self._link is None else self._link.note_of(region, wait_s)

    def close(self, reason: str | None = None) -> None:
        """Leave the link. Give a `reason` if this is not the normal end: the other regions are told."""
        if self._link is not None:
            self._link.close(reason)


class Awaited:
    """The handle of an arrival that a call waits for, once."""

    def __init__(self, find: Callable[[], Arrival]) -> None:
        self._find, self._arrival = find, None  # type: Callable[[], Arrival], Arrival | None

    def wait(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._find()
        return self._arrival


def drive(conversation: Conversation, exchange: Callable) -> Result:
    """Run a conversation to its end; `exchange` answers each message."""
    try:
        message = next(conversation)
        while True:
            message = conversation.send(exchange(message))
    except StopIteration as end:
        return end.value
