"""The calls of a link over connections: what is kept of each until its result counts, and its attempts.

A call is a mean, a gathering of records or a broadcast. A link's thread makes the attempts (`tcp`). They ask nothing of the link
but memory for payloads: an attempt that failed can be made again.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import LinkError, RegionLostError
from ..net.awake import awake_s
from ..net.members import Member
from ..net.view import Swap, UnderWay, View
from ..parts.codecs.base import Message, Reply
from ..parts.guard import Verdict, believed
from ..parts.tensors.memory import Buffers, Home, aside
from ..parts.tensors.slices import longest, square
from .base import Arrival, MeanRequest, drive
from .exchange import Exchange, RowsOf
from .part import Call
from .process_group import Payloads
from .records import Record, Trailer, checked, from_row, to_row
from .rules import Begin

_PIECE_BYTES = 1 << 20
SMALL = 64 << 10
"""A broadcast of at most so many bytes goes to all regions, whatever they have."""
_MOST_UNDER_WAY = 128
"""Pieces of a broadcast that are under way to a region."""
_AT_ONCE_S = 1e-3
"""Seconds within which the trailers of regions that are not late arrive, beside half a round trip."""


class Attempt(Protocol):
    """One attempt of a call. `bytes_sent`: payload bytes that this region has sent for it so far."""

    @property
    def bytes_sent(self) -> int: ...

    def run(self) -> Any:
        """Make the attempt. Raises LinkError if it failed; the message names the call and the region."""
        ...


Make = Callable[[View, tuple[Member, ...]], Attempt]
"""Makes an attempt over a view, of these members."""


def regions_of(members: Iterable[Member]) -> tuple[int, ...]:
    return tuple(member.region for member in members)


@dataclass(eq=False)
class Pending:
    """A call, and the handle by which the training thread waits for it.

    Attributes:
        finish: makes the value of the call from the result, once that counts; called by the link's thread.
        begin: of its newest attempt; `view` and `attempt` are None until the link's thread has begun that.
        call: what the rules know of it, once it has completed.
        bytes_sent, void_bytes: bytes that the attempt with a result has sent, and the void ones.
        awaited_at: when the training thread began to wait, by the clock of `awake_s`; None while it does not.
        found: the result, until it counts.
    """

    what: str
    make: Make | None
    finish: Callable[["Pending", Any], Any] | None
    begin: Begin | None = None
    view: View | None = None
    attempt: Attempt | None = None
    call: Call | None = None
    bytes_sent: int = 0
    void_bytes: int = 0
    awaited_at: float | None = None
    found: Any = None
    _value: Any = None
    _error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> Call:
        """What the rules know of a call that has completed."""
        assert self.call is not None
        return self.call

    @property
    def parties(self) -> tuple[int, ...]:
        """The regions that took part."""
        return regions_of(self.done.parties)

    def end(self) -> None:
        """Make the value from the result, and let the training thread have it."""
        assert self.finish is not None
        try:
            value = self.finish(self, self.found)
        except BaseException as error:
            self.fail(error)
            raise
        # what they reference may reference the previous transfer, which references an earlier one
        self.make = self.finish = self.found = self.view = self.attempt = None
        self._value = value
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self) -> Any:
        self.awaited_at = awake_s()
        self._ended.wait()
        self.awaited_at = None
        if self._error is not None:
            raise self._error
        return self._value


class MeanCall:
    """The mean that a request asks for.

    Args:
        parties: in the order of the view.
        buffers: memory for payloads, which travel as `payloads` and all parties say.
    """

    def __init__(
        self,
        view: View,
        parties: tuple[Member, ...],
        request: MeanRequest,
        buffers: Buffers,
        payloads: Payloads,
    ) -> None:
        self._view, self._parties, self._members = view, parties, regions_of(parties)
        self._request, self._buffers, self._payloads = request, buffers, payloads
        self._said: list[Exchange] = []
        self._bytes_before = 0

    @property
    def bytes_sent(self) -> int:
        return self._bytes_before + sum(exchange.bytes_sent for exchange in self._said)

    def run(self) -> Arrival:
        with aside(self._request.home.device):
            view, what, payloads = self._view, self._request.what, self._payloads
            word = payloads.word(self._parties)
            swap = view.begin_swap(to_row(self._request.trailer(), word), what)
            if word.must_hear:
                view.wait(swap.pending, what, may_be_late=True)
            with payloads.opened(view, self._parties, swap.values) as rows_of:
                return self._exchange(swap, rows_of)

    def _exchange(self, swap: Swap, rows_of: RowsOf) -> Arrival:
        view, what, home = self._view, self._request.what, self._request.home
        began = time.perf_counter()
        trailers: tuple[Trailer, ...] = ()
        verdict = Verdict(())

        def wait(pending: Sequence[UnderWay]) -> None:
            nonlocal began
            posted = time.perf_counter()
            view.wait(pending, what, may_be_late=True)
            came = time.perf_counter()
            # if another region was late, that time does not count for the link
            if came - posted > view.rtt_s / 2 + _AT_ONCE_S:
                began = came - view.rtt_s / 2

        def exchange(message: Message) -> Reply:
            nonlocal trailers, verdict
            exchanged = Exchange(view, message, home, self._buffers, what, rows_of)
            self._said = [exchanged]
            exchanged.begin()
            if not trailers:
                wait(swap.pending)
                trailers = received(self._members, swap.values, self._members[view.region])
                verdict = self._request.judge(trailers)
            reply = exchanged.end(verdict.weights, verdict.divisor)
            self._bytes_before, self._said = self.bytes_sent, []
            return reply

        result = drive(self._request.converse(), exchange)
        sum_of_squares = believed(square_at(home, result.mean), verdict)
        ended = time.perf_counter()
        return Arrival(
            result,
            trailers,
            self.bytes_sent,
            ended - began,
            sum_of_squares,
            self._members,
            verdict,
            ended_at=ended,
        )


def square_at(home: Home, mean: Tensor) -> float:
    """The sum of squares of a mean, wherever it rests; called by whoever may wait for the device."""
    parts = mean.split(longest(home.device)) if mean.device != home.device else (mean,)
    return sum(float(square(home.visit(part))) for part in parts)


class GatherCall:
    """The records of all regions, in the order of the view; arguments as for `MeanCall`."""

    def __init__(self, view: View, members: Sequence[int], record: tuple, what: str) -> None:
        self._view, self._members, self._record, self._what = view, tuple(members), record, what
        self.bytes_sent = 0

    def run(self) -> tuple[tuple, ...]:
        swap = self._view.begin_swap(to_row(self._record), self._what)
        self._view.wait(swap.pending, self._what, may_be_late=True)
        return _records(type(self._record), self._members, swap.values)


class BroadcastCall:
    """The bytes of one region in all others. Those that have them already get none; the others pass them on in a chain.

    So no region sends them more than once, and the last of the chain has them little later than the first. `raw` (1-D uint8) is
    overwritten in all regions but the one at the place `source` of the view.
    """

    def __init__(self, view: View, raw: Tensor, source: int, what: str) -> None:
        self._view, self._raw, self._source, self._what = view, raw, source, what
        self.bytes_sent = 0

    def run(self) -> Tensor:
        view, own = self._view, self._view.region
        if self._raw.numel() <= SMALL:
            is_source = own == self._source
            self._pass_on(view.tag(), None if is_source else self._source, view.others if is_source else [])
            return self._raw
        digest = torch.frombuffer(bytearray(digest_of(self._raw)), dtype=torch.uint8)
        swap = view.begin_swap(digest, self._what)
        view.wait(swap.pending, self._what, may_be_late=True)
        tag = view.tag()  # in all regions: what follows on this view must find them with equal ones
        chain = broadcast_chain([each.numpy().tobytes() for each in swap.values], self._source)
        if own in chain:
            place = chain.index(own)
            self._pass_on(tag, chain[place - 1] if place else None, chain[place + 1 : place + 2])
        return self._raw

    def _pass_on(self, tag: int, before: int | None, after: Sequence[int]) -> None:
        """Take the pieces from the place `before`, or have them; and send each on as soon as it is here."""
        view, what = self._view, self._what
        pieces = self._raw.split(_PIECE_BYTES)
        coming, sent = deque[UnderWay](), deque[UnderWay]()
        asked = 0
        for index, piece in enumerate(pieces):
            while before is not None and asked < min(index + _MOST_UNDER_WAY, len(pieces)):
                coming.append(view.receive(before, pieces[asked], tag, asked, what))
                asked += 1
            if coming:
                view.wait([coming.popleft()], what, may_be_late=True)
            for other in after:
                if len(sent) >= _MOST_UNDER_WAY * len(after):
                    view.wait([sent.popleft()], what, may_be_late=True)
                sent.append(view.send(other, piece, tag, index, what))
                self.bytes_sent += piece.numel()
        view.wait(sent, what, may_be_late=True)


def digest_of(raw: Tensor) -> bytes:
    """32 bytes which only the same bytes have (SHA-256): 1.4 GB/s on one core."""
    return hashlib.sha256(raw.numpy()).digest()


def broadcast_chain(digests: Sequence[bytes], source: int) -> tuple[int, ...]:
    """The places that take part in a broadcast, each sending to the next: the source, and those that differ from it."""
    return (source, *(place for place, each in enumerate(digests) if each != digests[source]))


def received(members: Sequence[int], rows: Sequence[Tensor], own: int | None = None) -> tuple[Trailer, ...]:
    """The trailers of these regions, the `own` one too: all regions decide from the same numbers.

    Raises RegionLostError if another one cannot be believed, LinkError if the own one cannot, or if regions are out of step.
    """
    try:
        trailers = tuple(map(checked, _records(Trailer, members, rows), members))
    except RegionLostError as error:
        if error.region != own:
            raise
        raise LinkError(f"this region's own numbers are wrong: {error}") from error
    if len({trailer.compression for trailer in trailers}) > 1:
        parts = ", ".join(
            f"region {r}: {each.compression:g}" for r, each in zip(members, trailers, strict=True)
        )
        raise LinkError(
            f"regions are out of step: they compress {parts}. Start all of them again with --resume."
        )
    return trailers


def _records(kind: type[Record], members: Sequence[int], rows: Sequence[Tensor]) -> tuple[Record, ...]:
    return tuple(from_row(kind, row, region) for region, row in zip(members, rows, strict=True))
