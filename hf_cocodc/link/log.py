"""The log of a run: what calls gave, and where the members stood. A newcomer follows them with a base and the log after it.

All that regions agree on is a function of a base (a checkpoint) and the results of the calls after it. An `Entry` is the result
of one call. A `Marker` says that everything up to an inner step is in the log.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from ..errors import LinkError
from ..net.members import Member
from ..parts.codecs.base import CodecState
from ..parts.tensors.flat import tensors_in
from ..parts.tensors.memory import HOST
from ..settings.regions import MOST_REGIONS
from ..validation import Count
from .records import ROW, to_row

_FEW = Meta(max_length=MOST_REGIONS)
_DEEPEST = 8
"""Levels of a codec's state."""


class Epoch(NamedTuple):
    """Who takes part, and the number of changes of that so far: losses, regions that came in, regions that left."""

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """The result of a call that has completed. `op` is its number, `what` its name in messages.

    Attributes:
        kind: "mean", "gather" or "broadcast".
        rows: trailers or records of `members`: (members, ROW) fp64; (0, ROW) for a broadcast.
        values: the mean (fp32), or the bytes of a broadcast (uint8); empty for a gathering.
        state: the codec's next state. Residuals are each region's own: lists of their lengths stand in (`drop_residuals`).
        seconds, square: see `Arrival`.
    """

    op: Count
    kind: Annotated[str, Meta(pattern=r"^(mean|gather|broadcast)\Z")]
    what: Annotated[str, Meta(max_length=1000)]
    members: Annotated[tuple[Count, ...], _FEW]
    rows: Tensor
    values: Tensor
    state: CodecState
    seconds: float = 0.0
    square: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return self.rows.nbytes + self.values.nbytes + sum(each.nbytes for each in tensors_in(self.state))


@dataclass(frozen=True)
class Marker:
    """Where the members stand at the end of inner step `step`. All that has landed up to this step is in the log before it.

    Attributes:
        submitted: calls made so far.
        number: number of the epoch from the next step on; `losses` of the changes that it counts are losses.
        members: who takes part from the next step on; lost members may still be among them.
        lost: tickets of all members that were lost.
        admitted: tickets of the members that come in with this marker.
        held: whether the members wait for more regions after this step, because they are too few. `members` are then those that
            have said so, and those that come in.
        newest: step of the newest marker in the log when this one was taken out: how far ahead of its reader the members are.
    """

    step: Count
    submitted: Count
    number: Count
    losses: Count
    members: Annotated[tuple[Member, ...], _FEW]
    lost: tuple[Count, ...] = ()
    admitted: tuple[Count, ...] = ()
    held: bool = False
    newest: Count = field(default=0, compare=False)

    num_bytes = 0


Item = Entry | Marker
Sink = Callable[[Item], bool]
"""Takes the items of a log; returns whether it takes more."""


def drop_residuals(state: CodecState) -> CodecState:
    """A codec's state without the values of its residuals: a newcomer has lost nothing in earlier transfers.

    >>> drop_residuals({"residual": torch.ones(3), "codec": {}})
    {'residual': [3], 'codec': {}}
    >>> with_residuals({"residual": [3], "codec": {}})
    {'residual': tensor([0., 0., 0.]), 'codec': {}}
    """
    return _with_each(state, lambda residual: list(residual.shape))


def with_residuals(state: CodecState) -> CodecState:
    """The codec's state with residuals of zeros."""
    return _with_each(state, torch.zeros)


def _with_each(state: CodecState, residual: Callable[[Any], Any]) -> CodecState:
    changed: CodecState = {}
    for name, value in state.items():
        if name == "residual":
            changed[name] = residual(value)
        else:
            changed[name] = _with_each(value, residual) if isinstance(value, dict) else value
    return changed


def rows_of(records: Sequence[tuple]) -> Tensor:
    """Records as rows, in order: (number of records, ROW) fp64."""
    rows = [to_row(record) for record in records]
    return torch.stack(rows) if rows else torch.zeros(0, ROW, dtype=torch.float64, device=HOST)


def to_plain(item: Item) -> dict[str, Any]:
    """An item as a dict of texts, numbers, lists, dicts and tensors."""
    plain = {field.name: getattr(item, field.name) for field in fields(item)}
    if isinstance(item, Marker):
        plain["members"] = [list(member) for member in item.members]
        return {"marker": {**plain, "lost": list(item.lost), "admitted": list(item.admitted)}}
    return {"entry": {**plain, "members": list(item.members)}}


def from_plain(plain: Mapping[str, Any]) -> Item:
    """The item of which `to_plain` made this. Raises LinkError if it is none."""
    try:
        [(name, content)] = dict(plain).items()
        kind: type[Item] = {"entry": Entry, "marker": Marker}[name]
        item = msgspec.convert(content, kind)
        members: list[Any] = list(item.members)
        if members != sorted(set(members)):
            raise ValueError(f"{str(members)[:80]} are no members")
        if isinstance(item, Entry):
            _check(item)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # msgspec asks a tensor for its keys
        raise LinkError(
            f"the log of another region holds something else than an entry: {repr(error)[:200]}."
        ) from error
    return item


def _check(entry: Entry) -> None:
    is_sound = (
        entry.rows.shape == (0 if entry.kind == "broadcast" else len(entry.members), ROW)
        and entry.rows.dtype == torch.float64
        and entry.values.dtype == (torch.uint8 if entry.kind == "broadcast" else torch.float32)
        and entry.values.dim() == 1
        and _is_state(entry.state, entry.values.numel(), _DEEPEST)
    )
    if not is_sound:
        raise ValueError(f"call {entry.op} ({entry.what[:80]}) is damaged")


def _is_state(value: Any, numel: int, levels: int) -> bool:
    """Whether a value can be a codec's state without residuals, of a fragment of so many values."""
    if isinstance(value, dict):
        return levels > 0 and all(
            isinstance(key, str)
            and (each == [numel] if key == "residual" else _is_state(each, numel, levels - 1))
            for key, each in value.items()
        )
    if isinstance(value, list):
        return all(isinstance(each, int | float) for each in value)
    return isinstance(value, Tensor | int | float)


class Log:
    """What has yet to be sent to one newcomer. The link's thread puts items in; the newcomer's sender takes them out.

    A log that outgrows `limit` bytes ends at once (`overflowed`): the newcomer needs a new base.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._ended = False
        self.overflowed = False

    def __call__(self, item: Item) -> bool:
        """Put an item in; never blocks. Returns whether the log takes more."""
        with self._changed:
            if self._ended:
                return False
            self._items.append(item)
            self._bytes += item.num_bytes
            if self._bytes > self._limit:
                self.overflowed = self._ended = True
                self._items.clear()
            self._changed.notify_all()
            return not self._ended

    def close(self) -> None:
        """Take no more items; those that are here can still be taken out."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def items(self, quiet_s: float) -> Iterator[Item | None]:
        """The items, in order, as they come; None whenever none has come for `quiet_s` seconds. Ends with the log."""
        while True:
            item = None
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._ended, quiet_s)
                if self._items:
                    item = self._stamped(self._items.popleft())
                    self._bytes -= item.num_bytes
                elif self._ended:
                    return
            yield item

    def _stamped(self, item: Item) -> Item:
        """An item as its reader gets it: a marker says how far the members are."""
        if not isinstance(item, Marker):
            return item
        later = (each.step for each in reversed(self._items) if isinstance(each, Marker))
        return replace(item, newest=next(later, item.step))


class Sinks:
    """Those who take the log of this member, each from a call on."""

    def __init__(self) -> None:
        self._first: dict[Sink, int] = {}
        self._lock = threading.Lock()

    def add(self, sink: Sink, first: int, marker: Marker) -> None:
        """Give `sink` this marker, and then what follows from call `first` on. If it returns False, it gets no more."""
        with self._lock:
            if sink(marker):
                self._first[sink] = first

    def remove(self, sink: Sink) -> None:
        """Give `sink` no more."""
        with self._lock:
            self._first.pop(sink, None)

    def write(self, make: Callable[[], Item], op: int | None = None) -> None:
        """Give all sinks an item, or those that take call `op`. It is made only if there is such a sink."""
        with self._lock:
            takers = [sink for sink, first in self._first.items() if op is None or op >= first]
            if not takers:
                return
            item = make()
            for sink in takers:
                if not sink(item):
                    del self._first[sink]
