"""The interface of a link. Regions exchange data only through links while they train."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..meeting.stopping import StopAgreement
from ..parts.codecs.base import Conversation, Result
from ..tensors.pools import Pool
from .records import Record
from .trailer import Trailer

T = TypeVar("T")


class Arrival(NamedTuple):
    """A finished transfer.

    Attributes:
        result: the end of the codec's conversation.
        trailers: one per region, in the order of the regions; equal in all regions.
        bytes_sent: payload bytes that this region sent for the transfer.
        seconds: time that the link took, from the moment when the last region came to the transfer.
        square: sum of squares of the mean, over all lanes of the region; computed while training goes on.
    """

    result: Result
    trailers: tuple[Trailer, ...]
    bytes_sent: int
    seconds: float
    square: float


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> Arrival:
        """Block until the transfer has ended; may be called again.

        Raises:
            LinkError: the transfer failed or its deadline passed; the message names the transfer and the region.
        """
        ...


@dataclass(frozen=True)
class Parcel:
    """What a region brings to a mean over the regions.

    Attributes:
        conversation: of a codec, made from this region's outer gradient; held while training goes on.
        numel: length of the outer gradient.
        trailer: returns this region's numbers; called while training goes on.
        what: names the transfer in messages ("fragment 0 sent at step 100").
        then: called once with the arrival, before `wait` returns it: by the link's thread, if the link has one.
    """

    conversation: Conversation
    numel: int
    trailer: Callable[[], Trailer]
    what: str
    then: Callable[[Arrival], None] | None = None


class Link(Protocol):
    """Reaches the same lane of every other region. All regions make the same calls in the same order."""

    region: int
    num_regions: int
    lane: int
    """The shard of the region's model that this link carries; 0 if all ranks hold the same parameters."""
    num_lanes: int
    replicas: bool
    """Whether several ranks of the region hold the same parameters (DDP)."""
    agreement: StopAgreement | None
    """How ranks agree on a step to stop at; None if only transfers can tell them to stop."""

    @property
    def timing(self) -> str:
        """What `clock` shows: "measured" or "simulated" seconds, or "none": it stands still."""
        ...

    @property
    def awaits(self) -> int | None:
        """The region for which this link now waits; None if it waits for none."""
        ...

    def mean(self, parcel: Parcel) -> Handle:
        """Start the mean over the regions that a parcel asks for; returns at once."""
        ...

    def bring_to(self, home: Pool) -> None:
        """Place means in memory of `home` from now on; until this call they are on the host. Some links ignore the call."""
        ...

    def give(self, mean: Tensor) -> None:
        """Return an arrival's mean to the pool; do not use it afterwards."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` (1-D fp64, host) over the lanes of this region."""
        ...

    def clock(self) -> float:
        """Seconds, by the clock that times transfers."""
        ...

    def tick(self, inner_step: int) -> None:
        """Called after every inner step with its number, before its transfers. Simulated time advances by an inner step."""
        ...

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        """Overwrite `flat` (fp32, host) with the values of region `source`; blocks until they are here."""
        ...

    def count_broadcasts(self) -> int:
        """Bytes that this rank has sent with broadcasts, to all other regions together, since the last count."""
        ...

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        """Every region's record, in order; blocks until all regions have called. See `records`."""
        ...

    def lead(self, call: Callable[["Link"], T], what: str) -> T | None:
        """Let the region's leader make a call with its own link, for as long as it needs.

        Other ranks of the region wait, without a time-out, and return None. Messages call it `what`.
        """
        ...

    def leave_note(self, reason: str) -> None:
        """Write down why this region leaves. Other regions read the note when they hear that it leaves."""
        ...

    def note_of(self, region: int) -> str | None:
        """The note that `region` left, if any."""
        ...

    def close(self, reason: str | None = None) -> None:
        """Leave the link. Give a `reason` if this is not the normal end: the other regions are told."""
        ...


class Here:
    """The handle of an arrival that is already here."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival

    def wait(self) -> Arrival:
        return self._arrival


def spread(link: Link, source: int, data: bytes, what: str) -> bytes:
    """The bytes of region `source`, in every region. A collective call; messages call it `what`."""
    length = torch.tensor([len(data)], dtype=torch.int64)
    link.broadcast(length.view(torch.float32), f"the length of {what}", source)
    size = int(length)
    own = (
        link.region == source and len(data) == size
    )  # another rank of a DDP region may hold more, and does not send
    padded = bytearray(data if own else size)
    padded += bytes(-size % 4)
    if not padded:
        return b""
    link.broadcast(torch.frombuffer(padded, dtype=torch.float32), what, source)
    return bytes(padded[:size])


def drive(conversation: Conversation, exchange: Callable) -> Result:
    """Run a conversation to its end; `exchange` answers each message."""
    try:
        message = next(conversation)
        while True:
            message = conversation.send(exchange(message))
    except StopIteration as end:
        return end.value
