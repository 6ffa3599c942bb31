"""What a transfer uses of the connections between regions: some regions, by their positions; it can be revoked."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LinkError
from .awake import awake_s
from .connection import ConnectionLost, Operation
from .pairs import Pair

LARGEST = 1 << 20
_ROUND = 1 << 20
"""More tags than one round of an attempt uses."""

_NEVER = threading.Event()
_VOID = "the transfer is void: a region was lost."


class UnderWay(NamedTuple):
    """An operation in progress with a region."""

    region: int
    operation: Operation


class Revoked(LinkError):
    """The view must not be used any more: the transfer that used it is void."""


class Waits:
    """What this region waits for now, and since when: for its heartbeats. Times are those of `awake_s`.

    Attributes:
        region: from which something is awaited; None if nothing is.
        late_since: since when that region has not come to the transfer; None once it has.
        moved_at: when something of a transfer has last arrived or left.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.region: int | None = None
        self.what = ""
        self.late_since: float | None = None
        self.moved_at = awake_s()

    def begin(self, region: int, what: str, is_late: bool) -> None:
        """Wait for `region`. `is_late`: whether it may not have come to the transfer yet."""
        if not is_late:
            self.late_since = None
        elif self.late_since is None or (region, what) != (self.region, self.what):
            self.late_since = awake_s()
        self.region, self.what = region, what

    def moved(self) -> None:
        self.moved_at = awake_s()

    def end(self) -> None:
        """Nothing is awaited any more."""
        self.region, self.late_since = None, None


class Throttle:
    """Keeps the rate limit (bytes per second, or None) of all that a region sends, where the kernel does not (`pacing`)."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int, stop: threading.Event = _NEVER) -> None:
        """Wait until another message may be sent, or until `stop` is set."""
        rate = self.rate
        if rate is None:
            return
        now = time.monotonic()
        stop.wait(max(self._free_at - now, 0.0))
        with self._lock:
            self._free_at = max(self._free_at, now) + num_bytes / rate


class View:
    """Some regions of a wire, by their positions, for the messages of one transfer between them.

    Args:
        connections: number of connections for which a message is cut into pieces, equal in all regions.
        timeout_s: seconds after which an operation that another region has begun counts as failed; None for never.
        explain: makes the error for a failed operation: (region, what, seconds waited, the failure).

    Attributes:
        regions: the regions, in order; a position is an index into them.
        region: the position of this region; `others` are those of the others.
        rtt_s: seconds of a round trip to the most distant region.
    """

    def __init__(
        self,
        region: int,
        pairs: Mapping[int, Pair],
        order: int,
        connections: int,
        timeout_s: float | None,
        throttle: Throttle,
        waits: Waits,
        explain: Callable[[int, str, float, Exception], LinkError],
    ) -> None:
        self.regions = sorted((region, *pairs))
        self.num_regions, self.region = len(self.regions), self.regions.index(region)
        self._pairs = {position: pairs[each] for position, each in enumerate(self.regions) if each != region}
        self.others = list(self._pairs)
        self.connections = connections
        self.rtt_s = max((pair.rtt_s for pair in pairs.values()), default=0.0)
        self._order, self._tags, self._round = order, itertools.count(), 0
        self._timeout_s, self._throttle, self._explain = timeout_s, throttle, explain
        self._waits = waits
        self._revoked = threading.Event()

    def tag(self) -> int:
        """A tag for the operations of one call. All regions make the same calls in order, and thus get the same tags."""
        self.check()
        return next(self._tags)

    def send(self, region: int, payload: Tensor, tag: int, index: int, what: str) -> UnderWay:
        """Wait for the rate limit, then start to send bytes on payload connection `index`."""
        self._throttle.wait(payload.numel(), self._revoked)
        return self._start(region, index, "send", payload, tag, what)

    def receive(self, region: int, buffer: Tensor, tag: int, index: int, what: str) -> UnderWay:
        """Start to receive bytes into `buffer`; do not touch the buffer before they are here."""
        return self._start(region, index, "receive", buffer, tag, what)

    def wait(self, pending: Iterable[UnderWay], what: str, may_be_late: bool = False) -> None:
        """Wait for operations. A region that `may_be_late` is waited for until the coordinator says that it is lost.

        Raises RegionLostError if an operation failed (it quotes the note that the region left, if any), and Revoked.
        """
        for region, operation in pending:
            with self.awaiting(region, what, may_be_late), self._naming(region, what):
                operation.wait(None if may_be_late else self._timeout_s)
        with self._waits.lock:
            self.check()
            self._waits.end()

    @contextlib.contextmanager
    def awaiting(self, region: int, what: str, may_be_late: bool = False) -> Iterator[None]:
        """Inside the block, something is awaited of a region. Raises Revoked, also at its end."""
        with self._waits.lock:  # a thread that was left alone must not hide what its successor waits for
            self.check()
            self._waits.begin(region, what, may_be_late)
        yield
        with self._waits.lock:
            self.check()
            self._waits.moved()

    def vote(self, yes: bool, what: str) -> bool:
        """Whether all regions say yes to what they have done so far. Then a new round begins: wherever each was, all get the
        same tags again.
        """
        self._round += 1
        self._tags = itertools.count(self._round * _ROUND)
        swap = self.begin_swap(torch.tensor([float(yes)], device="cpu"), what)
        self.wait(swap.pending, what, may_be_late=True)
        return all(bool(each) for each in swap.values)

    def begin_swap(self, own: Tensor, what: str) -> "Swap":
        """Start to exchange a small tensor with every other region, on the control connection."""
        tag = self.tag()
        got = {other: torch.empty_like(own) for other in self.others}
        pending = []
        for other in self.others:
            pending.append(self._start(other, None, "send", own.view(torch.uint8), tag, what))
            pending.append(self._start(other, None, "receive", got[other].view(torch.uint8), tag, what))
        return Swap([got.get(region, own) for region in range(self.num_regions)], pending)

    def swap(self, own: Tensor, what: str) -> list[Tensor]:
        """The small tensors of all regions, in the order of the regions."""
        swap = self.begin_swap(own, what)
        self.wait(swap.pending, what)
        return swap.values

    def round_trip_s(self, num_tries: int) -> float:
        """The shortest of several tries: in the first ones regions may still come.

        Two swaps make a round trip: a region begins the second one once it has heard the others in the first.
        """
        tries = []
        for _ in range(num_tries if self.others else 0):
            start = time.perf_counter()
            for _ in range(2):
                self.swap(torch.zeros(1, dtype=torch.float64, device="cpu"), "the first round trip")
            tries.append(time.perf_counter() - start)
        return min(tries, default=0.0)

    @property
    def network_rtt_s(self) -> float:
        """Like `rtt_s`, without the time that processes take."""
        return max((pair.network_rtt_s for pair in self._pairs.values()), default=0.0)

    def revoke(self) -> None:
        """End the use of this view: every later call raises `Revoked`, and so does a wait in progress.

        Memory of unfinished operations must not be used again: what is under way is sent or received to its end.
        """
        with self._waits.lock:
            if not self._revoked.is_set():
                self._revoked.set()
                self._waits.end()
        for pair in self._pairs.values():
            pair.revoke(self._order, Revoked(_VOID))

    def _start(
        self, region: int, index: int | None, kind: str, memory: Tensor, tag: int, what: str
    ) -> UnderWay:
        """Start to "send" or "receive" on payload connection `index`, or on the control connection."""
        pair, operation = self._pairs[region], Operation(self._order, tag, memory)
        with self._naming(pair.region, what):
            self.check()
            getattr(pair.connection(index), kind)(operation)
        return UnderWay(pair.region, operation)

    def check(self) -> None:
        """Raises Revoked if this view must not be used any more."""
        if self._revoked.is_set():
            raise Revoked(_VOID)

    @contextlib.contextmanager
    def _naming(self, region: int, what: str) -> Iterator[None]:
        """Inside the block, turn failures of a connection into errors that name the region and the awaited transfer."""
        since = time.perf_counter()
        try:
            yield
        except TimeoutError as error:
            self.check()
            raise self._explain(region, what, time.perf_counter() - since, error) from error
        except ConnectionLost as error:
            self.check()
            # those that miss a region may end, too: the first one is to blame
            first = min(self._pairs.values(), key=lambda pair: pair.lost_at)
            raise self._explain(first.region, what, time.perf_counter() - since, error) from error


class Swap(NamedTuple):
    """A swap of small tensors in progress. `values`: of all regions, in their order; valid once `pending` has ended."""

    values: list[Tensor]
    pending: list[UnderWay]
