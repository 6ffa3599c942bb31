"""How a newcomer gets the results of calls in which it has no part: from the log of a member."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from ..errors import LinkError, RegionLostError
from ..parts.codecs.base import Result
from ..threads import NativeThread
from .base import Arrival, MeanRequest
from .calls import received
from .log import Entry, Item, Marker, with_residuals
from .records import Record, Trailer, from_row

_MOST_BYTES = 1 << 30
"""Bytes of entries that may wait here for their calls. Later ones wait at the donor, which has a limit."""


class Following:
    """Reads a log, and answers calls by it. Calls and entries of one name meet in their order.

    While many entries wait for their calls, it reads on only for a call that waits for its entry, and until the next marker has
    come. So whoever makes the inner steps up to a marker never waits for what is not read.

    Args:
        source: the items of the log, as they come; may block. If it ends or raises a LinkError, all calls without answer fail.
        explain: returns the error for such a call, from the error of the log; called when the call is waited for.
    """

    def __init__(self, source: Iterable[Item], explain: Callable[[BaseException], BaseException]) -> None:
        self._source, self._explain = source, explain
        self._entries: dict[tuple[str, str], deque[Entry]] = {}
        self._asked: dict[tuple[str, str], deque[Future[Entry]]] = {}
        self._markers: deque[Marker] = deque()
        self._skips = self._num_bytes = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = NativeThread(self._read, "hf_cocodc-follow")
        self._thread.start()

    def ask(self, kind: str, what: str) -> Callable[[], Entry]:
        """Ask for the next entry of this kind and name. What this returns at once waits for it."""
        asked: Future[Entry] = Future()
        with self._changed:
            if (kind, what) in self._entries:
                asked.set_result(self._next(kind, what))
            elif self._error is not None:
                asked.set_exception(self._error)
            else:
                self._asked.setdefault((kind, what), deque()).append(asked)
            self._changed.notify_all()
        return partial(self._wait_for, asked)

    def _wait_for(self, asked: Future[Entry]) -> Entry:
        failure = asked.exception()
        if failure is not None:
            raise self._explain(failure)
        return asked.result()

    def next_marker(self, timeout_s: float | None = None) -> Marker | None:
        """The next marker; None if there is none within `timeout_s`. Raises LinkError once the log has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._markers or self._error is not None, timeout_s)
            if not self._markers:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.notify_all()
            return self._markers.popleft()

    def skip(self, submitted: int) -> None:
        """Forget the entries of calls up to this one: whoever asks for them has asked by now."""
        with self._changed:
            self._skips = max(self._skips, submitted)
            for key, entries in list(self._entries.items()):
                while entries and entries[0].op <= self._skips:
                    self._next(*key)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Take no more items; all calls without answer fail."""
        with self._changed:
            if self._error is None:
                self._error = error
            for asked in (each for waiting in self._asked.values() for each in waiting):
                asked.set_exception(self._error)
            self._asked.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            for item in self._source:
                with self._changed:
                    self._changed.wait_for(self._reads_on)
                    if self._error is not None:
                        return
                    self._take(item)
            error: BaseException = LinkError("the log of the other region has ended.")
        except BaseException as raised:  # the training thread must hear of it
            error = raised
        self.fail(error)

    def _take(self, item: Item) -> None:
        if isinstance(item, Marker):
            self._markers.append(item)
            self._changed.notify_all()
            return
        key = item.kind, item.what
        asked = self._asked.get(key)
        if asked:
            asked.popleft().set_result(item)
            if not asked:
                del self._asked[key]
        elif item.op > self._skips:
            self._entries.setdefault(key, deque()).append(item)
            self._num_bytes += item.num_bytes

    def _next(self, kind: str, what: str) -> Entry:
        """Take out the next entry of this kind and name."""
        waiting = self._entries[kind, what]
        entry = waiting.popleft()
        if not waiting:
            del self._entries[kind, what]
        self._num_bytes -= entry.num_bytes
        return entry

    def _reads_on(self) -> bool:
        is_needed = bool(self._asked) or not self._markers
        return is_needed or self._num_bytes <= _MOST_BYTES or self._error is not None


def arrival_in(entry: Entry, request: MeanRequest) -> Arrival:
    """What came of a mean, by its entry. Raises LinkError if that is of another mean."""
    numel, home = request.numel, request.home
    if entry.values.numel() != numel:
        raise LinkError(
            f"{request.what} has {numel} values here and {entry.values.numel()} in the other regions."
        )
    mean, trailers = home.fill(home.take(numel), entry.values), _trailers_in(entry)
    result = Result(mean, lambda: mean, with_residuals(entry.state))
    verdict = request.judge(trailers)
    return Arrival(result, trailers, 0, entry.seconds, entry.square, entry.members, verdict)


def records_in(entry: Entry, kind: type[Record]) -> tuple[Record, ...]:
    """The records of an entry. Raises LinkError if they are of another kind."""
    return tuple(from_row(kind, row, region) for region, row in zip(entry.members, entry.rows, strict=True))


def _trailers_in(entry: Entry) -> tuple[Trailer, ...]:
    """The trailers of a mean. Members have checked them: a wrong one (LinkError) is the fault of whoever wrote the log."""
    try:
        return received(entry.members, entry.rows.unbind())
    except RegionLostError as error:
        raise LinkError(f"the log of another region holds what no transfer has brought: {error}") from error


def copy_bytes(entry: Entry, flat: Tensor) -> None:
    """Overwrite a flat tensor with the bytes of a broadcast. Raises LinkError if there are more or fewer of them."""
    raw = flat.view(torch.uint8)
    if entry.values.numel() != raw.numel():
        raise LinkError(f"{entry.what} has {raw.numel()} bytes here and {entry.values.numel()} in the log.")
    raw.copy_(entry.values)
