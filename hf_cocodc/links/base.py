"""What a link is: the one way by which regions reach each other."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..parts.codecs.base import Conversation, Result
from ..tensors.pools import Pool
from .trailer import Trailer


class Arrival(NamedTuple):
    """A finished transfer.

    Attributes:
        result: what the codec's conversation ended with.
        trailers: one a region, in the order of the regions; equal everywhere.
        bytes_sent: payload bytes that this region sent for it.
        seconds: that the link took for it: from when the last region had come to the end.
        square: sum of squares of the mean, over all lanes of the region; found while training goes on.
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
            LinkError: it failed or its deadline passed; the message says what was waited for, for whom, since when.
        """
        ...


class Link(Protocol):
    """Reaches the same lane of every other region. All regions make the same calls in the same order."""

    region: int
    num_regions: int
    lane: int
    """Which shard of the region's model this link carries; 0 where ranks hold the same parameters."""
    num_lanes: int

    def mean(
        self, conversation: Conversation, numel: int, trailer: Callable[[], Trailer], what: str
    ) -> Handle:
        """Start the mean over the regions that `conversation` asks for; returns at once.

        Args:
            conversation: of a codec, made from this region's outer gradient.
            numel: length of the outer gradient.
            trailer: gives this region's numbers; called, like the conversation, while training goes on.
            what: names the transfer in messages ("fragment 0 sent at step 100").
        """
        ...

    def bring_to(self, home: Pool) -> None:
        """Means are wanted in this memory from now on; until then, and where a link has no use for it, on the host."""
        ...

    def give(self, mean: Tensor) -> None:
        """Hand back the mean of an arrival, of which nobody will look at its memory any more."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` (1-D fp64, host) over the lanes of this region."""
        ...

    def clock(self) -> float:
        """Seconds, by the clock that transfers are timed with."""
        ...

    def tick(self) -> None:
        """Told after every inner step, before its transfers: where time is simulated, an inner step passes."""
        ...

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        """Overwrite `flat` (fp32, host) with region `source`'s; blocks until it is here."""
        ...

    def gather(self, trailer: Trailer, what: str) -> tuple[Trailer, ...]:
        """Every region's trailer, in order; blocks until all have called."""
        ...

    def leave_note(self, reason: str) -> None:
        """Write down why this region will leave, for the others to read once they hear that it does."""
        ...

    def note_of(self, region: int) -> str | None:
        """What `region` wrote down, if anything."""
        ...

    def close(self, reason: str | None = None) -> None:
        """Leave; `reason` is what the others are told where leaving is not the normal end."""
        ...


def drive(conversation: Conversation, exchange: Callable) -> Result:
    """Run a conversation to its end, `exchange` answering each message."""
    try:
        message = next(conversation)
        while True:
            message = conversation.send(exchange(message))
    except StopIteration as end:
        return end.value


def weights(trailers: Sequence[Trailer]) -> list[float]:
    """Each region's share in the mean."""
    return [trailer.weight for trailer in trailers]
