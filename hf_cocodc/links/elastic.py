"""The link of a run whose regions may change: one is lost, leaves, comes in or comes back, and the others train on."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import LeftBehind, LinkError
from ..meeting.presence import Member
from ..parts.codecs.base import CodecState
from .base import Arrival, Handle, Parcel, T
from .calls import BroadcastCall, Call, GatherCall, MeanCall
from .direct import DirectLink
from .following import FollowedMean, Following, copy_bytes, records_in
from .log import Entry, Epoch, Item, Marker, Sink, Sinks, drop_residuals, rows_of
from .membership import Membership
from .op import Make, Op
from .records import Record
from .roster import RollCall
from .terms import Events, Reach, State, Terms
from .view import View


class ElasticLink(DirectLink):
    """Reaches the regions that take part now.

    All members make the same calls in the same order. A call has the members of the moment when it is made, less those that
    are lost before it has completed (`ops`). What this process is to the run, `membership` tells.

    Args:
        reach: how this process reaches the others.
        terms: what holds for all members of the run.
        timeout_s: seconds that `close` waits for calls in progress.
        pin_memory: whether to keep means in pinned memory, from which a GPU copies faster.

    Attributes:
        events: what happened, for the journal, oldest first: pairs of a kind ("epoch", "retry", "late", "join", "left") and
            facts. The journal takes them out. A region that comes or goes in good order does so at the same step for all.
        parties: see `Link.parties`.
    """

    is_elastic = True

    def __init__(
        self, reach: Reach, terms: Terms, *, timeout_s: float = 120.0, pin_memory: bool = False
    ) -> None:
        super().__init__(reach.me.region, reach.presence, pin_memory)
        self.events: Events = deque()
        self.parties: tuple[int, ...] = (self.region,)
        self._terms, self._timeout_s = terms, timeout_s
        self._sinks = Sinks()
        self._epochs: list[int] = []
        self._depth = 0
        self._closed = False
        self._life = Membership(reach, terms, self._sinks, self.events)

    @property
    def state(self) -> State:
        """What this process is to the run."""
        return self._life.state

    @property
    def is_leaving(self) -> bool:
        """Whether this region takes part in no call from the next inner step on, because it said so with what has landed."""
        return self._life.is_leaving

    @property
    def members(self) -> tuple[int, ...]:
        return self._life.epoch.members

    @property
    def num_regions(self) -> int:
        return len(self.members)

    @property
    def position(self) -> int:
        return self.members.index(self.region)

    @property
    def most_regions(self) -> int:
        return max(len(self.members), self._terms.limit or 0)

    def takes_part(self) -> bool:
        return self._life.state not in (State.JOINING, State.FOLLOWING)

    @property
    def epoch(self) -> Epoch:
        """Who takes part, and the number of changes of that so far, as far as this process knows now."""
        return self._life.epoch

    @property
    def submitted(self) -> int:
        """Calls that the members have made so far."""
        return self._life.ops.submitted

    @property
    def admits(self) -> int:
        return self._life.admits

    def mean(self, parcel: Parcel) -> Handle:
        log = self._log_to_ask()
        if log is not None:
            return FollowedMean(log.ask("mean", parcel.what), parcel, self._memory.bring_home)

        def call(view: View, regions: tuple[int, ...]) -> Call:
            return MeanCall(view, regions, parcel, self._memory, self._presence)

        def finish(op: Op, found: Arrival) -> Arrival:
            sent = found.bytes_sent + op.void_bytes
            arrival = found._replace(bytes_sent=sent, changes=op.changes)
            mean, state = arrival.result.mean, arrival.result.state
            times = arrival.seconds, arrival.square
            self._write(op, "mean", arrival.trailers, mean, state, *times)
            if parcel.then is not None:
                parcel.then(arrival)
            return arrival

        return self._submit(parcel.what, call, finish)

    def tick(self, inner_step: int) -> None:
        self._life.tick(inner_step)

    def landed(self, arrival: Arrival) -> None:
        self._life.landed(arrival)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        if self.state is State.JOINING:
            return
        log = self._log_to_ask()
        if log is not None:
            entry = log.ask("broadcast", what).wait()
            copy_bytes(entry, flat)
            self._note(entry.epoch, entry.members)
            return

        def call(view: View, regions: tuple[int, ...]) -> Call:
            place = regions.index(source) if source in regions else 0
            # a copy: an attempt that fails may have written to it
            return BroadcastCall(view, flat.view(torch.uint8).clone(), place, what, self._presence)

        def finish(op: Op, raw: Tensor) -> Tensor:
            self._write(op, "broadcast", (), raw, {})
            return raw

        op = self._submit(what, call, finish)
        flat.view(torch.uint8).copy_(op.wait())
        self._broadcast_bytes += op.bytes_sent + op.void_bytes
        self._note_op(op)

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        if self.state is State.JOINING:
            self._note(0, (self.region,))
            return (record,)
        log = self._log_to_ask()
        if log is not None:
            entry = log.ask("gather", what).wait()
            self._note(entry.epoch, entry.members)
            return records_in(entry, type(record))
        return self._gather(record, what).wait()

    def together(self, call: Callable[[], T], what: str) -> T:
        while True:
            start = len(self._epochs)
            self._depth += 1
            try:
                value: T | None = call()
                error: Exception | None = None
            except LinkError:
                raise
            except Exception as raised:
                value, error = None, raised
            finally:
                self._depth -= 1
                epochs = self._epochs[start:]
                if not self._depth:
                    self._epochs = []
            if len(set(epochs)) <= 1:
                if error is not None:
                    raise error
                return value  # type: ignore[return-value]  # what the call returned

    def roll_call(self, leaves: bool = False) -> tuple[int, ...]:
        """Call the roll, while the members are too few to train: newcomers come in at once; with `leaves` this region leaves.

        Returns:
            The members from now on; equal in all of them.
        """
        op = self._gather(RollCall(self.admits, leaves), f"the roll call after step {self._life.step}")
        present = self._life.called(op.parties, op.wait())
        return tuple(member.region for member in present)

    def log_to(self, sink: Sink) -> None:
        """Give `sink` the log of all that follows the state of this moment; between two inner steps, after a step's events.

        The first item is a marker of this step. Items may be kept. A sink that returns False gets no more.
        """
        self._life.log_to(sink)

    def stop_log(self, sink: Sink) -> None:
        """Give `sink` no more items."""
        self._sinks.remove(sink)

    def pair_with(self, members: Iterable[Member]) -> None:
        """Make the connections for transfers with members to which presence is connected. For newcomers; blocks.

        Raises:
            LinkError: they could not be made in time.
        """
        self._life.pair_with(members)

    @property
    def strangers(self) -> list[Member]:
        """Members, by the last marker, to which this newcomer is not connected. Connect to them, and apply the marker again."""
        return self._life.strangers

    def follow(self, source: Iterable[Item]) -> None:
        """Answer calls from the log of a member, once its base is loaded; again with another one, if that log has ended.

        Calls without answer fail with the error that `source` raises.
        """
        self._life.follow(source)

    def next_marker(self, timeout_s: float | None = None) -> Marker | None:
        """The next marker of the log; None if none comes within `timeout_s`. Make all inner steps up to it, then `apply` it.

        Raises:
            LinkError: the log has ended.
        """
        assert self._life.following is not None
        return self._life.following.next_marker(timeout_s)

    def apply(self, marker: Marker) -> bool:
        """All inner steps up to this marker are made, with their events. Returns whether this process is a member now.

        If it is not, the members hear that it is ready, unless there are `strangers`.
        """
        return self._life.apply(marker)

    def part(self) -> None:
        """Be lost to the others at once, so that they do not wait for this process: it comes back as another member."""
        self._life.part(str(LeftBehind("it comes back")))

    def begin_again(self, reach: Reach) -> None:
        """Be a newcomer, after `part`. `reach.members` is None."""
        assert reach.members is None and self.state is not State.MEMBER
        step = self._life.step
        self._sinks, self._presence = Sinks(), reach.presence
        self._life = Membership(reach, self._terms, self._sinks, self.events)
        self._life.step = step

    def close(self, reason: str | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._life.close(reason, self._timeout_s)

    def _log_to_ask(self) -> Following | None:
        """The log that answers calls; None if this process makes them itself."""
        life = self._life
        if life.state is State.JOINING:
            raise LinkError("a newcomer takes part in no transfer before it has a base.")
        return life.following if life.state is State.FOLLOWING else None

    def _gather(self, record: tuple, what: str) -> Op:
        """Gather records; blocks."""

        def call(view: View, regions: tuple[int, ...]) -> Call:
            return GatherCall(view, regions, record, what, self._presence)

        def finish(op: Op, records: tuple[tuple, ...]) -> tuple[tuple, ...]:
            self._write(op, "gather", records, torch.empty(0), {})
            return records

        op = self._submit(what, call, finish)
        op.wait()
        self._note_op(op)
        return op

    def _submit(self, what: str, call: Make, finish: Callable[[Op, Any], Any]) -> Op:
        life = self._life
        return life.ops.submit(what, life.roster, life.changes, call, finish)

    def _write(
        self,
        op: Op,
        kind: str,
        records: Sequence[tuple],
        values: Tensor,
        state: CodecState,
        seconds: float = 0.0,
        square: float = 0.0,
    ) -> None:
        """Write the result of a call to the log."""

        def make() -> Entry:
            regions = tuple(member.region for member in op.parties)
            kept = values.to("cpu", copy=True)  # the engine overwrites the mean
            parts = rows_of(records), kept, drop_residuals(state)
            return Entry(op.number, kind, op.what, op.epoch, regions, *parts, seconds, square)

        self._sinks.write(make, op.number)

    def _note_op(self, op: Op) -> None:
        self._note(op.epoch, tuple(member.region for member in op.parties))

    def _note(self, epoch: int, parties: tuple[int, ...]) -> None:
        """Remember in which epoch a gathering or a broadcast was, and who took part."""
        self.parties = parties
        if self._depth:
            self._epochs.append(epoch)
