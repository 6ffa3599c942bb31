"""The link between machines: it executes what the rules say (`rules`), with connections and one thread of its own.

Runs that end with a lost region, and those that go on without it, have the same link (`Terms.is_open`).
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from ..coordinator.messages import (
    AskStop,
    Back,
    Beat,
    Bye,
    Note,
    Noted,
    Post,
    Promise,
    Ready,
    Refuse,
    Resumed,
    StopAt,
    Terms,
    ToRegion,
    Welcome,
)
from ..errors import LeftBehind, LinkError, RegionLostError
from ..net.addresses import is_url
from ..net.awake import awake_s
from ..net.connection import Connection
from ..net.members import Member, Whereabouts
from ..net.view import View
from ..net.wire import FIRST, Wire
from ..parts.codecs.base import CodecState
from ..parts.tensors.flat import moved
from ..parts.tensors.memory import HOST, Buffers, aside
from ..threads import NativeThread, at_rest, side_by_side
from . import rules
from .base import Arrival, Awaited, Handle, Link, MeanRequest, T
from .calls import Attempt, BroadcastCall, GatherCall, Make, MeanCall, Pending, regions_of
from .following import Following, arrival_in, copy_bytes, records_in
from .log import Entry, Epoch, Item, Marker, Sink, Sinks, drop_residuals, rows_of
from .part import Standing, back, beat, enter
from .process_group import Carrier, GroupBroken, Payloads
from .records import Record
from .speaking import AnyClient
from .voice import AllHold, Holds, RankEnded

logger = logging.getLogger(__name__)

_CALLS = 1 << 40
"""Attempts are ordered by their losses first: so many calls fit between two losses."""
_POLL_S = 0.1
_AGAIN_S = 1.0
"""How long a connection waits that has not come about."""
_SAY_S = 30.0
"""A region that waits for another one says so after this time, or after the time-out if that is shorter, and again each time."""
_LEAVE_S = 1.0
"""How long a link that closes after an error waits for its thread."""


class TcpLink(Link):
    """Reaches the other regions of a run. See `Link` for its methods. Raises LinkError if a member cannot be reached.

    Args:
        client: has met the other regions (`Client.meet`).
        timeout_s: seconds that `close` waits for calls in progress.
        is_one_voice: whether the ranks of the region, which have a lane each, share their decisions (`voice`).
        payloads: how payloads of means travel; by default over the connections.

    Attributes:
        events: for the journal, oldest first: pairs of a kind ("epoch", "retry", "late", "join", "left", "ways", "link")
            and facts.
        carrier: what carries payloads of means, if it was chosen, and why.
        ending: what this region says when the link is closed in good order.
        beat: the part of its heartbeats that the run knows: `doing` and `max_steps`; `coasts`: see `Beat`.
        switched: regions that have come in and left with the last change.
        on: called in the client's thread with every message of the coordinator, after the link has heard it.
    """

    parties: tuple[int, ...] = ()

    def __init__(
        self,
        client: AnyClient,
        terms: Terms,
        wire: Wire,
        *,
        timeout_s: float = 120.0,
        lane: int = 0,
        num_lanes: int = 1,
        is_one_voice: bool = False,
        payloads: Payloads | None = None,
    ) -> None:
        self.carrier: Carrier | None = None
        self._payloads = payloads or Payloads()
        self._payloads.tell = self._tell_choice
        self.lane, self.num_lanes, self._is_one_voice = lane, num_lanes, is_one_voice
        self.events: deque[tuple[str, dict[str, Any]]] = deque()
        self.ending = Bye(how="finished")
        self.beat = Beat()
        self.landed_at, self.coasts = 0.0, False
        self.switched: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.on: Callable[[ToRegion], None] = lambda message: None
        self.terms, self.is_elastic, self._timeout_s = terms, terms.is_open, timeout_s
        self._buffers: dict[torch.device, Buffers] = {}  # for payloads, by the device that copies them
        self._broadcast_bytes = 0
        self._changed = threading.Condition(threading.RLock())
        self._step = 0
        self._warned_at = self._frozen_at = self._answered_at = 0.0
        self._closed = False
        self._generation = 0  # a thread of an earlier life must never find its own number again
        self._enter(client, wire, client.welcome)
        self.parties = (self.region,)
        client.start(self._hear, self._sign, self._back, self._away)
        try:
            self._connect_all()
        except BaseException as error:
            self._closed = True
            self.leave_note(str(error))
            client.close(Bye(how="failed"))
            wire.close()
            raise

    def _enter(self, client: AnyClient, wire: Wire, welcome: Welcome) -> None:
        """Be a process of the run, with this connection to the coordinator."""
        self._client, self.wire, self.me, self.region = client, wire, welcome.me, welcome.me.region
        self.run = welcome.run
        wire.note_of, wire.why_lost = self.note_of, self._why_lost
        wire.storage = client.host if is_url(client.host) else ""
        self._part = enter(welcome, self.terms)
        self._pending: deque[Pending] = deque()
        self._ready: deque[Pending] = deque()
        self._hand: Pending | None = None
        self._failure: BaseException | None = None
        self._leads, self._led = False, set[int]()
        self._thread: threading.Thread | None = None
        self._whys: dict[Member, str] = {}
        self._noted_ways: dict[int, str] = {}
        self._sinks = Sinks()
        self._following: Following | None = None
        self._has_moved = False

    # ---- what the engine asks ------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """What this process is to the run."""
        return self._part.standing

    @property
    def members(self) -> tuple[int, ...]:
        return regions_of(self._part.members)

    @property
    def most_regions(self) -> int:
        return max(len(self.members), self.terms.most)

    @property
    def epoch(self) -> Epoch:
        """Who takes part, and the number of changes of that so far, as far as this process knows now."""
        part = self._part
        return Epoch(part.changes + part.losses, regions_of(part.members))

    @property
    def knows(self) -> int:
        return self._part.knows if self._part.standing is Standing.MEMBER else 0

    @property
    def is_leaving(self) -> bool:
        """Whether this region takes part in no call from the next inner step on."""
        return self._part.is_leaving

    @property
    def awaits(self) -> int | None:
        return self.wire.waits.region

    def takes_part(self) -> bool:
        return self._part.standing not in (Standing.JOINING, Standing.FOLLOWING)

    def count_broadcasts(self) -> int:
        counted, self._broadcast_bytes = self._broadcast_bytes, 0
        return counted

    def lead(self, call: Callable[[Link], T], what: str) -> T:
        self._leads = True
        try:
            return call(self)
        finally:
            self._leads = False

    @property
    def num_calls(self) -> int:
        """Calls made so far."""
        return self._part.submitted

    def led(self, num_calls: int) -> None:
        """The leader has made calls alone, so many as this now; nothing of this rank is in flight."""
        self._feed(rules.Led(num_calls))

    def mean(self, request: MeanRequest) -> Handle:
        log = self._log_to_ask()
        if log is not None:
            entry = log.ask("mean", request.what)
            return Awaited(lambda: arrival_in(entry(), request))
        user = request.home.device
        buffers = self._buffers.setdefault(user, Buffers(HOST, user, lengths_vary=True))

        def make(view: View, parties: tuple[Member, ...]) -> Attempt:
            return MeanCall(view, parties, request, buffers, self._payloads)

        def finish(pending: Pending, attempted: Arrival) -> Arrival:
            sent = attempted.bytes_sent + pending.void_bytes
            arrival = attempted._replace(bytes_sent=sent, changes=pending.done.changes)
            mean, state = arrival.result.mean, arrival.result.state
            self._write(pending, "mean", arrival.trailers, mean, state, arrival.seconds, arrival.square)
            return arrival

        return self._submit(request.what, make, finish)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        if self.standing is Standing.JOINING:
            return
        log = self._log_to_ask()
        if log is not None:
            entry = log.ask("broadcast", what)()
            copy_bytes(entry, flat)
            self.parties = entry.members
            return

        def make(view: View, parties: tuple[Member, ...]) -> Attempt:
            regions = regions_of(parties)
            place = regions.index(source) if source in regions else 0
            # a copy: an attempt that fails may have written to it
            return BroadcastCall(view, flat.view(torch.uint8).clone(), place, what)

        def finish(pending: Pending, raw: Tensor) -> Tensor:
            self._write(pending, "broadcast", (), raw, {})
            return raw

        pending = self._submit(what, make, finish)
        flat.view(torch.uint8).copy_(pending.wait())
        self._broadcast_bytes += pending.bytes_sent + pending.void_bytes
        self.parties = pending.parties

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        if self.standing is Standing.JOINING:
            self.parties = (self.region,)
            return (record,)
        log = self._log_to_ask()
        if log is not None:
            entry = log.ask("gather", what)()
            self.parties = entry.members
            return records_in(entry, type(record))

        def make(view: View, parties: tuple[Member, ...]) -> Attempt:
            return GatherCall(view, regions_of(parties), record, what)

        def finish(pending: Pending, records: tuple[Record, ...]) -> tuple[Record, ...]:
            self._write(pending, "gather", records, torch.empty(0, device=HOST), {})
            return records

        pending = self._submit(what, make, finish)
        all_records = pending.wait()
        self.parties = pending.parties
        self._gathered = pending
        return all_records

    def landed(self, arrival: Arrival) -> None:
        self.beat, self.landed_at = structs.replace(self.beat, landed_at=self._step), awake_s()
        if self.standing is Standing.MEMBER and arrival.trailers:
            self._feed(rules.Landed(min(each.knows for each in arrival.trailers), arrival.changes))
            self._has_moved = True

    def tick(self, inner_step: int, work: float = 1.0) -> None:
        if self.standing is Standing.MEMBER:
            admitted = self._feed(rules.Ticked())
            if self._has_moved or admitted:
                self._has_moved = False
                self._sinks.write(partial(self._mark, self._part.roster, admitted))
        self._step = inner_step

    def leave_note(self, reason: str) -> None:
        self._feed(rules.HeardFrom(Noted(region=self.region, text=reason)))
        self._client.send(Note(text=reason))

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: region in self._part.notes, wait_s)
            return self._part.notes.get(region)

    def _why_lost(self, region: int, broken_at: float, is_refused: bool, is_closed: bool) -> str | None:
        other = self._part.paired.get(region, Member(region, 0))
        return rules.why_lost(self._part, other, broken_at, is_refused, is_closed, awake_s())

    # ---- what the run asks, beside the engine ---------------------------------------------------------------------

    def regroup(self, known: int) -> tuple[int, ...]:
        """Let changes that all members know count at once, while they are too few to train. After a gathering.

        `known`: the smallest number of a change that any of its records tells. Returns the members now, equal in all of them.
        """
        if self.standing is not Standing.MEMBER:
            return self.members
        call = self._gathered.done
        self._feed(rules.Landed(known, call.changes))
        due = [each for each in self._part.announced if each.number <= self._part.due]
        left = [each.member for each in due if each.kind == "leave"]
        admitted = self._feed(rules.Ticked())
        came = [each for each in self._part.roster if each.ticket in admitted]
        # also one that some know to be lost: all must find the same
        stay = [each for each in call.parties if each not in left]
        present = tuple(sorted({*stay, *came}))
        self._has_moved = False
        self._sinks.write(partial(self._mark, present, admitted, held=True))
        return tuple(member.region for member in present)

    def log_to(self, sink: Sink) -> None:
        """Give `sink` the log of all that follows the state of this moment; between two inner steps, after a step's events.

        The first item is a marker of this step. Items may be kept. A sink that returns False gets no more.
        """
        self._sinks.add(sink, self._part.submitted + 1, self._mark(self._part.roster, ()))

    def stop_log(self, sink: Sink) -> None:
        """Give `sink` no more items."""
        self._sinks.remove(sink)

    def follow(self, source: Iterable[Item]) -> None:
        """Answer calls from the log of a member, once its base is loaded; again with another one, if that log has ended.

        Calls without answer fail with the error that `source` raises.
        """
        if self._following is not None:
            self._following.fail(LinkError("this region follows the log of another member now."))
        self._following = Following(source, self._without_log)
        self._feed(rules.Followed())

    def next_marker(self, timeout_s: float | None = None) -> Marker | None:
        """The next marker; None if none comes in time. Make all inner steps up to it, then `apply` it.

        Raises LinkError if the log has ended.
        """
        assert self._following is not None
        return self._following.next_marker(timeout_s)

    def apply(self, marker: Marker) -> bool:
        """All inner steps up to this marker are made, with their events. Returns whether this process is a member now.

        Raises LeftBehind if members have let it in and missed it since, or if one of them cannot be reached.
        """
        if self.standing is Standing.OUT:
            raise self._failure or left_behind(self.region)
        assert self._following is not None
        is_in = self.me.ticket in marker.admitted
        self._feed(
            rules.Marked(
                marker.submitted,
                marker.number - marker.losses,
                marker.losses,
                marker.lost,
                marker.members,
                is_in,
            )
        )
        if self._failure is not None:
            raise self._failure
        self._following.skip(marker.submitted)
        if is_in:
            self._tell_epoch(f"region {self.region} has come in")
        return is_in

    def say_ready(self) -> None:
        """This newcomer is less than one interval behind."""
        self._client.send(Ready())

    @property
    def is_announced(self) -> bool:
        """Whether the members are to let this newcomer in."""
        return any(each.member == self.me for each in self._part.announced)

    def is_there(self, member: Member) -> bool:
        """Whether a process takes part or is to come in, as far as this one knows."""
        return self._part.is_there(member)

    def stream(self, member: Member, number: int, timeout_s: float, look: Callable[[], object]) -> Connection:
        """Open a stream to a process once it is connected here; see `Pair.stream`. Raises LinkError if it is not in time."""
        until = awake_s() + timeout_s
        while not self._part.is_paired(member):
            look()
            if awake_s() > until:
                raise LinkError(f"region {member.region} has not been connected within {timeout_s:g} s.")
            time.sleep(_POLL_S)
        return self.wire.stream(member.region, number, max(until - awake_s(), _POLL_S), look)

    @property
    def donors(self) -> tuple[Member, ...]:
        """Members that may give a base, as far as this process knows."""
        places = (each.member for each in self._client.welcome.members)
        known = {*places, *self._part.roster} - {self.me}
        return tuple(sorted(each for each in known if self.is_there(each)))

    def post(self, to: Member, topic: str, **content: Any) -> None:
        """Send a small message to another process of the run."""
        self._client.send(Post(to=to, topic=topic, content=content))

    def send(self, message: Any) -> None:
        """Send a message to the coordinator."""
        self._client.send(message)

    @property
    def losses_in_words(self) -> str:
        """Which regions are lost, and why."""
        return self._lost_in_words(self._whys)

    @property
    def has_coordinator(self) -> bool:
        """Whether the coordinator is there, and decides."""
        return self._part.answers

    @property
    def failure(self) -> BaseException | None:
        """The error with which all calls of this process end; None before."""
        return self._failure

    def part_with(self) -> None:
        """Be lost to the others at once, so that they do not wait for this process: it comes back as another one."""
        self._fail_all(LinkError("the link is closed."))
        if self._following is not None:
            self._following.fail(LinkError("the link is closed."))
        self.leave_note("it comes back")
        self._client.close(Bye(how="left"))
        self._payloads.abort()
        self.wire.close()

    def begin_again(self, client: AnyClient, wire: Wire) -> None:
        """Be a newcomer, after `part_with`. `client` has joined the run."""
        with self._changed:
            self._enter(client, wire, client.welcome)
        client.start(self._hear, self._sign, self._back, self._away)
        self._connect_all()

    def close(self, reason: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if reason is None and isinstance(self._failure, RegionLostError):
            reason = str(self._failure)
        has_ended = reason is None and self._end_calls()
        if reason is None and not has_ended and self.standing is Standing.MEMBER:
            reason = f"calls of region {self.region} had not ended after {self._timeout_s:g} s"
        thread = self._thread
        if not has_ended:  # first: what an abort ends must not seem to have come
            self._fail_all(LinkError("the link is closed."))
        self._payloads.abort()
        if not has_ended and thread is not None:
            thread.join(_LEAVE_S)
        if self._following is not None:
            self._following.fail(LinkError("the link is closed."))
        if reason is not None:
            self.leave_note(reason)
        if reason is None and self.standing is Standing.MEMBER:
            self.wire.drain()
        self._client.close(self.ending if reason is None else Bye(how="failed", step=self._step))
        self.wire.close()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _log_to_ask(self) -> Following | None:
        """The log that answers calls; None if this process makes them itself."""
        if self.standing is Standing.JOINING:
            raise LinkError("a newcomer takes part in no transfer before it has a base.")
        return self._following if self.standing is Standing.FOLLOWING else None

    def _submit(self, what: str, make: Make, finish: Callable[[Pending, Any], Any]) -> Pending:
        """Make a call; returns at once."""
        pending = Pending(what, make, finish)
        with self._changed:
            if self._failure is not None:
                pending.fail(self._failure)
            elif self._closed:
                raise LinkError(f"the link is closed: {what} cannot travel.")
            else:
                self._pending.append(pending)
                if self._leads:
                    self._led.add(self._part.submitted + 1)
                self._feed(rules.Made(what))
        return pending

    def _feed(self, event: rules.Event) -> tuple[int, ...]:
        """Let something happen, and do what the rules say. Returns the tickets of regions that have come in."""
        admitted: tuple[int, ...] = ()
        with self._changed:
            before = self._part
            self._part, effects = rules.step(before, event)
            for effect in effects:
                match effect:
                    case rules.Begin():
                        self._hand = self._pending[0]
                        self._hand.begin, self._hand.view, self._hand.attempt = effect, None, None
                        self._need_thread()
                    case rules.Complete(call):
                        pending = self._pending.popleft()
                        pending.call, self._hand = call, None
                        self._ready.append(pending)
                        self._need_thread()
                    case rules.Abandon():
                        self._abandon()
                    case rules.Again(call):
                        self._retry(self._pending[call.number - self._part.done - 1], call)
                    case rules.Tell(message):
                        self._client.send(message)
                    case rules.HangUp(why):
                        self._client.hang_up(why)
                    case rules.Connect(member, again):
                        self._connect_soon(member, _AGAIN_S if again else 0.0)
                    case rules.Disconnect(member):
                        self.wire.drop(member.region)
                    case rules.Drop(member, why, is_late):
                        self._lose(member, why, is_late)
                    case rules.Switched(joined, left):
                        self._switched(joined, left)
                        admitted = tuple(member.ticket for member in joined)
                    case rules.Fail(error, why, member):
                        self._fail_all(self._error_of(error, why, member))
            if self._part.losses != before.losses and self.standing is Standing.MEMBER:
                self._has_moved = True
                lost = [each for each in before.members if each.ticket in self._part.lost]
                self._tell_epoch(self._lost_in_words(lost))
                if self.is_elastic:
                    logger.info(
                        "if the process of a lost region lives, it comes back by itself; if not, start its command again"
                    )
            self._changed.notify_all()
        return admitted

    def _need_thread(self) -> None:
        if self._thread is None:
            self._thread = NativeThread(self._work, "hf_cocodc-link", (self._generation,))
            self._thread.start()

    def _work(self, generation: int) -> None:
        """The link's thread: it makes attempts, and ends calls that have completed, in order."""
        use_one_thread()
        while True:
            with self._changed:
                while generation == self._generation and not self._ready and not self._may_begin():
                    if self._closed and not self._pending:
                        return
                    with at_rest():
                        self._changed.wait()
                if generation != self._generation:
                    return
                pending = self._ready.popleft() if self._ready else None
                hand = self._hand
            try:
                if pending is not None:
                    pending.end()
                elif hand is not None and hand.begin is not None:
                    self._attempt(hand, hand.begin)
            except BaseException as error:  # every error must reach the training thread
                self._fail_all(error, generation)
            pending = hand = None

    def _may_begin(self) -> bool:
        return self._hand is not None and self._hand.attempt is None

    def _attempt(self, hand: Pending, begin: rules.Begin) -> None:
        """Make the attempt in hand, and say that this process holds its result."""
        try:
            view, attempt = self._begin(hand, begin)
            rounds = 0
            while True:
                failure = self._hold(hand, begin, attempt)
                if view.vote(failure is None, hand.what):
                    break
                rounds += 1
                self._payloads.has_broken(view, rounds, str(failure or "another region says why"))
            if self._is_one_voice:
                alone = begin.number in self._led
                self.send(Holds(number=begin.number, losses=begin.losses, alone=alone))
            else:
                self._feed(rules.AllHeld(begin.number, begin.losses))
        except RegionLostError as error:
            missed = [each for each in begin.parties if each.region == error.region and each != self.me]
            if not missed:
                raise
            self._feed(rules.Missed(begin.number, begin.losses, missed[0], str(error)))
        except LinkError:
            if self._is_in_hand(begin):  # else it is void, and says so
                raise

    def _hold(self, hand: Pending, begin: rules.Begin, attempt: Attempt) -> GroupBroken | None:
        """Get the result of the attempt in hand; or how its process group has broken, whatever is to blame."""
        try:
            result = attempt.run()
        except GroupBroken as failure:
            return failure
        with self._changed:
            if not self._is_in_hand(begin):
                raise _void()
            hand.found, hand.bytes_sent = result, attempt.bytes_sent
            self._feed(rules.Held(begin.number, begin.losses))
        return None

    def _is_in_hand(self, begin: rules.Begin) -> bool:
        return self._hand is not None and self._hand.begin is begin

    def _begin(self, hand: Pending, begin: rules.Begin) -> tuple[View, Attempt]:
        with self._changed:
            if not self._is_in_hand(begin):
                raise _void()
            for member in begin.parties:
                if member != self.me and not self._part.is_paired(member):
                    raise RegionLostError(member.region, f"there is no connection to region {member.region}")
            view = self.wire.view(regions_of(begin.parties), begin.losses * _CALLS + begin.number)
            assert hand.make is not None
            hand.view, hand.attempt = view, hand.make(view, begin.parties)
            self.wire.waits.moved()
            return view, hand.attempt

    def _abandon(self) -> None:
        """Leave the thread alone that makes an attempt, which may hang. Another one takes its place."""
        hand, self._hand = self._hand, None
        self.wire.waits.end()
        if hand is not None and hand.view is not None:
            hand.view.revoke()
            self._generation += 1
            self._thread = None
            self._payloads.abort()  # its wait may have no other end

    def _retry(self, pending: Pending, call: rules.Call) -> None:
        pending.void_bytes += pending.bytes_sent
        pending.bytes_sent, pending.found = 0, None
        part = self._part
        members = [member.region for member in part.without_lost(call.parties)]
        lost = [member for member in call.parties if member.ticket in part.lost]
        facts = {
            "epoch": call.changes + part.losses,
            "op": call.number,
            "what": call.what,
            "members": members,
        }
        self.events.append(("retry", {**facts, "why": self._lost_in_words(lost)}))

    def _error_of(self, error: type[LinkError], why: str, member: Member | None) -> LinkError:
        if error is RegionLostError and member is not None:
            return RegionLostError(member.region, why)
        return left_behind(self.region, why, self.is_elastic) if error is LeftBehind else error(why)

    def _fail_all(self, error: BaseException, generation: int | None = None) -> None:
        """End all calls, also later ones, with this error. `generation`: of the thread whose error it is."""
        with self._changed:
            if generation not in (None, self._generation):
                return  # its attempt was void
            self._failure = self._failure or error
            self._feed(rules.Failed())
            failed = [*self._ready, *self._pending]
            self._ready.clear()
            self._pending.clear()
            self._generation += 1
            self._thread = None
            self._changed.notify_all()
        if self._following is not None:
            self._following.fail(error)
        for pending in failed:
            pending.fail(error)

    def _end_calls(self) -> bool:
        """Wait for the calls that were made. Returns whether all have completed."""
        until = awake_s() + self._timeout_s
        with self._changed:
            self._feed(rules.NoMoreCalls())
            ended = self._changed.wait_for(
                lambda: not self._pending and not self._ready or self._failure is not None, self._timeout_s
            )
            thread = self._thread
        if thread is not None and ended:
            thread.join(max(until - awake_s(), 0))
        return ended and self._failure is None

    # ---- the coordinator, in its thread -----------------------------------------------------------------------------

    def _hear(self, message: ToRegion | AllHold | RankEnded) -> None:
        match message:
            case AllHold(number=number, losses=losses):
                self._feed(rules.AllHeld(number, losses))
                return
            case RankEnded(why=why):
                self._fail_all(LinkError(why))
                return
            case AskStop(number=number):
                if self.agreement is not None:
                    self._client.send(Promise(number=number, step=self.agreement.promise()))
            case StopAt(step=step, whys=whys):
                if self.agreement is not None:
                    self.agreement.answer(step, {int(region): str(why) for region, why in whys.items()})
            case _:
                with self._changed:
                    self._feed(rules.HeardFrom(message, self.awaits, awake_s()))
        if isinstance(message, Refuse) and self.standing is not Standing.OUT:
            logger.warning("region %d trains on without the coordinator: %s", self.region, message.why)
        if isinstance(message, Resumed) and self.agreement is not None:
            self.agreement.ask_again()
        self.on(message)

    def _sign(self) -> Beat:
        """A heartbeat."""
        if self.agreement is not None:
            self.agreement.poll()
        self.wire.look()
        now, waits = awake_s(), self.wire.waits
        with self._changed:
            self._watch(now)
            part = self._part
            since = [each.awaited_at for each in self._pending]
        blocked = [at for at in since if at is not None]
        late_since, region = waits.late_since, waits.region
        said = structs.replace(
            self.beat,
            step=self._step,
            awaits=region,
            waited_s=0.0 if late_since is None else now - late_since,
            idle_s=max(now - waits.moved_at, 0.0),
            blocked_s=now - min(blocked) if blocked else None,
            coasts=self.coasts,
            landed_s=now - self.landed_at if self.beat.landed_at >= 0 else 0.0,
        )
        return beat(part, said)

    def _watch(self, now: float) -> None:
        """Let the rules look at the time, and say now and then for whom this region waits."""
        if self.has_coordinator:
            self._answered_at = now
        if not self._part.frozen or self.has_coordinator:
            self._frozen_at = now
        waits, region, since = self.wire.waits, self.wire.waits.region, self.wire.waits.late_since
        # in the middle of a transfer nobody is late: then it counts since when nothing has moved
        waited_s = now - (waits.moved_at if since is None else since)
        self._feed(rules.Waited(region, waited_s, now - self._frozen_at, now - self._answered_at))
        if region is None or self._hand is None:
            return
        if min(waited_s, now - self._warned_at) > min(_SAY_S, self._timeout_s):
            self._warned_at = now
            away = " The coordinator does not answer either: it must decide who is lost."
            logger.warning(
                "region %d has waited %.0f s for region %d (%s).%s",
                self.region,
                waited_s,
                region,
                waits.what,
                "" if self.has_coordinator else away,
            )

    def _back(self) -> Back:
        return back(self._part)

    def _away(self) -> None:
        self._feed(rules.Away())

    # ---- connections --------------------------------------------------------------------------------------------------

    def _connect_all(self) -> None:
        """Connect to all that are there. At the start of a run this waits for them; a newcomer's connections come later."""
        others = sorted(self._part.meeting)
        if self.standing is Standing.JOINING:
            for other in others:
                self._connect_soon(other)
            return
        # all at once: the other end gives a search up that it has begun, and this one has not
        side_by_side([partial(self._meet, self.me, other) for other in others], len(others))
        self._note_ways()
        self.view = self.wire.view([self.region, *(other.region for other in others)], FIRST)
        self._payloads.settle(self.view, self._part.members, "storage" in self.wire.ways.values())

    def _connect_soon(self, other: Member, after_s: float = 0.0) -> None:
        NativeThread(self._connect, "hf_cocodc-connect", (self.me, other, after_s)).start()

    def _connect(self, me: Member, other: Member, after_s: float) -> None:
        time.sleep(after_s)
        with self._changed:
            if self._closed or me != self.me:
                return
        try:
            self._meet(me, other)
        except LinkError as error:  # it must not disturb the run
            with self._changed:
                if self._closed or me != self.me:
                    return
                is_news = self._part.unpaired.get(other) != str(error)
                self._feed(rules.NotConnected(other, str(error)))
            if is_news and self._part.wants(other):
                text = "region %d cannot be connected to region %d, and tries again: %s"
                logger.warning(text, self.region, other.region, error)
            return
        self._note_ways()

    def _meet(self, me: Member, other: Member) -> None:
        """Connect to a process, as long as it is wanted. Raises LinkError if that fails."""
        wire = self.wire

        def is_wanted() -> bool:  # either end may have begun again meanwhile
            return not self._closed and me == self.me and self._part.wants(other)

        def look() -> None:
            if not is_wanted():
                raise LinkError(f"region {other.region} is not wanted any more.")

        pair = wire.meet(other.region, *self._reach(other), look)
        with self._changed:
            if is_wanted():
                wire.add(pair)
                self._feed(rules.Connected(other))
            else:
                pair.close()

    def _note_ways(self) -> None:
        """Write by which ways this process is connected into the journal."""
        ways = self.wire.ways
        if ways != self._noted_ways:
            self._noted_ways = ways
            self.events.append(("ways", {"ways": {str(region): way for region, way in ways.items()}}))

    def _tell_choice(self, choice: Carrier) -> None:
        """Keep how payloads travel from now on, and write it to the journal. Who has made the link says the first choice."""
        self.carrier = choice
        if self._part.submitted:
            level = logging.WARNING if choice.kind == "tcp" else logging.INFO
            logger.log(level, "payloads of means travel over %s from now on: %s.", *choice)
        self.events.append(("link", {"link": choice.kind, "why": choice.why}))

    def _reach(self, other: Member) -> tuple[Whereabouts, str]:
        """Where the process of another region listens for this one, and the name of both. Raises LinkError if it does not."""
        lane = self.lane if self._is_one_voice else 0
        lanes = self._part.lanes[other]
        if lane >= len(lanes):
            raise LinkError(
                f"region {other.region} listens with {len(lanes)} of its ranks, and rank {lane} of region {self.region} looks "
                "for its like. Start it with as many ranks as the others."
            )
        low, high = sorted((self.me.ticket, other.ticket))
        return lanes[lane], f"{self.run}/{low}-{high}/{lane}"

    # ---- who takes part, for journal and log -----------------------------------------------------------------------

    def _lose(self, member: Member, why: str, is_late: bool) -> None:
        self._whys[member] = why
        if is_late:
            facts = {"epoch": self.epoch.number, "region": member.region}
            self.events.append(("late", {**facts, "why": why}))

    def _switched(self, joined: Sequence[Member], left: Sequence[Member]) -> None:
        self.switched = tuple(each.region for each in joined), tuple(each.region for each in left)
        number = self.epoch.number
        for member in left:
            facts = {"step": self._step, "epoch": number, "region": member.region}
            self.events.append(("left", {**facts, "why": "it has left in good order"}))
        for member in joined:
            self.events.append(("join", {"step": self._step, "epoch": number, "region": member.region}))
        if self.me not in left:  # a region that leaves does not see what follows
            words = [f"region {member.region} has left in good order" for member in left]
            words += [f"region {member.region} has come in" for member in joined]
            self._tell_epoch(", ".join(words), step=self._step)

    def _tell_epoch(self, why: str, **facts: int) -> None:
        number, members = self.epoch
        common = {"epoch": number, "losses": self._part.losses, "members": list(members), "why": why}
        self.events.append(("epoch", {**common, **facts}))

    def _lost_in_words(self, lost: Collection[Member]) -> str:
        """Who is lost, and why: in its own words, or in ours without the way out, which is for a run that ends with it."""
        facts = []
        for member in lost:
            ours = self._whys.get(member, "another region misses it").partition(". ")[0]
            why = self._part.notes.get(member.region) or ours
            facts.append(f"region {member.region} is lost: {why.rstrip('. ')}")
        return "; ".join(facts)

    def _mark(self, members: tuple[Member, ...], admitted: tuple[int, ...], held: bool = False) -> Marker:
        part = self._part
        number, lost = part.changes + part.losses, tuple(sorted(part.lost))
        return Marker(self._step, part.submitted, number, part.losses, members, lost, admitted, held)

    def _write(
        self,
        pending: Pending,
        kind: str,
        records: Sequence[tuple],
        values: Tensor,
        state: CodecState,
        seconds: float = 0.0,
        square: float = 0.0,
    ) -> None:
        """Write the result of a call to the log."""

        def make() -> Entry:
            with aside(values.device):
                kept = values.to(HOST, copy=True)  # the engine overwrites the mean
                known = moved(drop_residuals(state), HOST)
            header = pending.done.number, kind, pending.what, pending.parties
            return Entry(*header, rows_of(records), kept, known, seconds, square)

        self._sinks.write(make, pending.done.number)

    def _without_log(self, error: BaseException) -> BaseException:
        """The error of a call whose entry will not come. A member has no other way to get this result."""
        if self.standing is Standing.MEMBER:
            why = f"it has not received all that was sent before it came in: {error}"
            error = left_behind(self.region, why)
            self._fail_all(error)
        return error


def _void() -> LinkError:
    return LinkError("this attempt is void: nobody makes it with this process.")


def use_one_thread() -> None:
    """Let torch compute in this thread alone on the host: its other threads are busy with training.

    `torch.set_num_threads` would also set the number of all threads that begin later, those of the user among them. OpenMP and
    MKL, which it tells, keep one number for each thread.
    """
    torch.get_num_threads()  # torch tells a thread's number to both once, now
    libraries = ctypes.CDLL(torch._C.__file__)
    for tell in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if hasattr(libraries, tell):  # not in every build of torch
            getattr(libraries, tell)(1)


def left_behind(region: int, why: str = rules.LATE, may_come_back: bool = True) -> LeftBehind:
    """The error of all calls of a member without which the others have gone on, or ended."""
    if may_come_back:
        return LeftBehind(f"the other regions have gone on without region {region}: {why}. It may come back.")
    return LeftBehind(
        f"the other regions have ended without region {region}: {why.rstrip('. ')}. Start all regions again with --resume."
    )
