"""Many regions in one process: exactly the numbers of the real link, without sockets."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import InputError, LinkError
from ..parts.codecs import without_residuals
from ..parts.codecs.base import Conversation, Message, Reply, Result, mean_of, message_bytes
from ..parts.guard import Verdict, believed
from ..parts.tensors.slices import square
from .base import Arrival, Awaited, Handle, Link, MeanRequest
from .calls import SMALL, broadcast_chain, digest_of
from .process_state import process_state, set_process_state
from .records import Record, Trailer, checked

T = TypeVar("T")


class Absence(NamedTuple):
    """A region is lost after the inner step `since`, and its process is there again at step `until`: it takes part again from the
    next landing on.
    """

    region: int
    since: int
    until: int


@dataclass(frozen=True, kw_only=True)
class VirtualLink:
    """A link of simulated time. Its arrival times decide what adaptive schedules do, and how long training is blocked.

    All regions share one serial link: a transfer starts when the last region has sent it and all earlier ones have passed.
    Raises InputError if a number is not finite, latency_s is negative, or another one is not positive.

    Attributes:
        step_time_s: T_c, seconds of an inner step.
        latency_s: seconds in one direction.
        bandwidth: bytes per second that a region can send.
        speeds: of the regions, as multiples of that with which an inner step takes `step_time_s`; 1 for all others.
        away: which regions are lost, and come back. It needs `regions.min` (or `on_loss=continue`), as a real run does.
    """

    step_time_s: float
    latency_s: float
    bandwidth: float
    speeds: tuple[float, ...] = ()
    away: tuple[Absence, ...] = ()

    def __post_init__(self) -> None:
        speeds = [("a speed", speed) for speed in self.speeds]
        for name, value in (("step_time_s", self.step_time_s), ("bandwidth", self.bandwidth), *speeds):
            if not 0 < value < math.inf:
                raise InputError(f"{name}={value} of a VirtualLink must be positive and finite.")
        if not 0 <= self.latency_s < math.inf:
            raise InputError(f"latency_s={self.latency_s} of a VirtualLink must be finite, and not negative.")
        for each in self.away:
            if not (each.region >= 0 and 0 < each.since < each.until):
                raise InputError(
                    f"a VirtualLink with {each}: a region is lost after inner step 1 or later, and back at a later one."
                )


def loopback() -> "LockstepLink":
    """The link of a single region: every mean is the region's own value, and no byte leaves the process."""
    return LockstepHub(1).links[0]


def run_in_lockstep(
    num_regions: int, body: Callable[[int, "LockstepLink"], T], link: VirtualLink | None = None
) -> list[T]:
    """Run body(region, link) for every region in this process; return the results in the order of the regions.

    Each region has its own thread, and its own random numbers of torch, NumPy and Python. Only one runs at a time, until it
    needs something that another has not sent yet: results do not depend on timing. The body may train with anything: a bare
    Synchronizer, an Accelerate loop, a Trainer. With `link`, time is simulated; without it clocks stand still, as the time of
    regions that take turns says nothing.

    Raises:
        LinkError: every region waits for another.
        Exception: the first exception that a body raised.
    """
    return LockstepHub(num_regions, link).run(body)


class LockstepHub:
    """Connects the links of `num_regions` regions; `links[r]` is the link of region r."""

    def __init__(self, num_regions: int, virtual: VirtualLink | None = None) -> None:
        self.virtual = virtual
        for each in virtual.away if virtual is not None else ():
            if each.region >= num_regions:
                raise InputError(f"{each}: regions are numbered 0 .. {num_regions - 1}.")
        self._busy_until = 0.0
        self.links = [LockstepLink(self, region, num_regions) for region in range(num_regions)]
        self._open_calls: dict[int, _Call] = {}
        self._turns = [threading.Semaphore(0) for _ in self.links]
        self._waits: dict[int, Callable[[], bool]] = {region: lambda: True for region in range(num_regions)}
        self._over = threading.Event()
        self.notes: dict[int, str] = {}
        self._errors: list[BaseException] = []

    def run(self, body: Callable[[int, "LockstepLink"], T]) -> list[T]:
        """See `run_in_lockstep`."""
        for link in self.links if self.virtual is None else ():
            link.timing = "none"
        results: dict[int, T] = {}
        state = process_state()

        def live(region: int) -> None:
            self._turns[region].acquire()
            try:
                if not self._errors:
                    set_process_state(state)
                    results[region] = body(region, self.links[region])
            except BaseException as error:  # raised again below, in the caller's thread
                self._errors.append(error)
            del self._waits[region]
            self._pass_the_turn(region)

        threads = [
            threading.Thread(target=live, args=(link.region,), name=f"region {link.region}", daemon=True)
            for link in self.links
        ]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        while not self._over.wait(timeout=1.0):
            pass  # a wait without end would sleep through a Ctrl-C that comes in the moment before it begins
        for thread in threads:
            thread.join()
        set_process_state(state)
        if self._errors:
            raise self._errors[0]
        return [results[link.region] for link in self.links]

    def bring(self, region: int, number: int, what: str, item: Any, resolve: "Resolve") -> "_Call":
        """Region `region` makes its call `number` with `item`; `resolve` gives the answers once all have called."""
        call = self._open_calls.setdefault(number, _Call(what))
        if call.what != what:
            raise LinkError(
                f"regions are out of step: region {region} calls for {what}, another region for {call.what}. Every region "
                "must make the same calls in the same order."
            )
        call.brought[region] = item
        if len(call.brought) == len(self.links):
            call.answers = resolve([call.brought[link.region] for link in self.links])
            del self._open_calls[number]
        return call

    def answer(self, region: int, call: "_Call") -> Any:
        """The answer to region `region`; the other regions run until it is known."""
        if call.answers is None:
            state = process_state()
            self._waits[region] = lambda: call.answers is not None
            self._pass_the_turn(region)
            self._turns[region].acquire()
            if self._errors:
                raise LinkError(f"another region failed while region {region} waited for {call.what}.")
            self._waits[region] = lambda: True
            set_process_state(state)
        assert call.answers is not None
        return call.answers[region]

    def step_time_s(self, region: int) -> float:
        """Simulated seconds of an inner step of a region, by its own settings; 0 if time is not simulated."""
        if self.virtual is None:
            return 0.0
        speeds = self.virtual.speeds
        return self.virtual.step_time_s / (speeds[region] if region < len(speeds) else 1.0)

    def arrival_s(self, sent_s: float, bytes_sent: int) -> tuple[float, float]:
        """Arrival time and duration of a transfer that the last region sends at `sent_s`, in simulated seconds."""
        if self.virtual is None:
            return 0.0, 0.0
        start = max(self._busy_until, sent_s)
        self._busy_until = start + bytes_sent / self.virtual.bandwidth
        trips = 1 if len(self.links) <= 2 else 2
        arrival = self._busy_until + trips * self.virtual.latency_s
        return arrival, arrival - start

    def _pass_the_turn(self, region: int) -> None:
        """Let the next region run that can continue. If there is none, all regions wait for each other: an error."""
        order = sorted(self._waits, key=lambda other: (other - region - 1) % len(self.links))
        able = [other for other in order if self._errors or self._waits[other]()]
        if able:
            self._turns[able[0]].release()
        elif order:
            self._errors.append(
                LinkError(
                    "every region waits for another. Every region must make the same calls in the same order."
                )
            )
            self._turns[order[0]].release()
        else:
            self._over.set()


class _Call:
    """A call that all regions make: the item that each region brings, and later the answer that each region gets."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.brought: dict[int, Any] = {}
        self.answers: Sequence[Any] | None = None


Resolve = Callable[[list], Sequence[Any]]
"""What all regions have brought, in their order -> their answers."""


class LockstepLink(Link):
    """One region's side of a `LockstepHub`; `link.base.Link` describes the calls."""

    def __init__(self, hub: LockstepHub, region: int, num_regions: int) -> None:
        self.region, self._num_regions = region, num_regions
        self.timing = "measured" if hub.virtual is None else "simulated"
        self._broadcast_bytes = 0
        self._hub = hub
        self._calls = 0
        self.now = 0.0
        """Simulated seconds; stays 0 if time is not simulated."""
        self._is_away = False
        self.is_elastic = hub.virtual is not None and bool(hub.virtual.away)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self._num_regions))

    def takes_part(self) -> bool:
        return not self._is_away

    @property
    def absences(self) -> tuple[Absence, ...]:
        """Those of all regions."""
        return () if self._hub.virtual is None else self._hub.virtual.away

    def stay_away(self, is_away: bool) -> None:
        """While it does, its calls follow the others: nothing of this region is in a mean, and its clock stands still."""
        self._is_away = is_away

    def mean(self, request: MeanRequest) -> Handle:
        trailer = request.trailer()
        item = _Brought(request.converse(), trailer, self.now, request.judge, self.takes_part())
        call = self._bring(request.what, item, lambda brought: _mean_all(brought, self._hub.arrival_s))

        def wait() -> Arrival:
            arrival, arrives_at = self.answer(call)
            self.now = max(self.now, arrives_at)
            return arrival

        return Awaited(wait)

    def clock(self) -> float:
        return time.perf_counter() if self.timing == "measured" else self.now

    def tick(self, inner_step: int, work: float = 1.0) -> None:
        if self.takes_part():
            self.now += self._hub.step_time_s(self.region) * work

    def answer(self, call: "_Call") -> Any:
        """The answer to this region."""
        return self._hub.answer(self.region, call)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        source = 0 if source is None else source
        resolve = partial(_broadcast, source)
        values, sends = self._hub.answer(self.region, self._bring(what, flat.clone(), resolve))
        flat.copy_(values)
        self._broadcast_bytes += sends * flat.nbytes

    def count_broadcasts(self) -> int:
        counted, self._broadcast_bytes = self._broadcast_bytes, 0
        return counted

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        call = self._bring(what, record, lambda records: [tuple(records)] * len(records))
        return self._hub.answer(self.region, call)

    def leave_note(self, reason: str) -> None:
        self._hub.notes[self.region] = reason

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        return self._hub.notes.get(region)

    def _bring(self, what: str, item: Any, resolve: Resolve) -> _Call:
        self._calls += 1
        return self._hub.bring(self.region, self._calls, what, item, resolve)


def _broadcast(source: int, brought: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """For each region what `source` has, and how often it sends it over a real link (see `calls.BroadcastCall`)."""
    if brought[source].nbytes <= SMALL:
        senders = (source,) * (len(brought) - 1)
    else:
        senders = broadcast_chain([digest_of(each.view(torch.uint8)) for each in brought], source)[:-1]
    return [(brought[source], senders.count(region)) for region in range(len(brought))]


class _Brought(NamedTuple):
    """What a region brings to a mean."""

    conversation: Conversation
    trailer: Trailer
    sent_s: float
    judge: Callable[[Sequence[Trailer]], Verdict]
    takes_part: bool


def _mean_all(
    brought: Sequence[_Brought], arrival_s: Callable[[float, int], tuple[float, float]]
) -> list[tuple[Arrival, float]]:
    """Run the conversations of all members together, message by message; return each region's arrival and its time."""
    members = tuple(region for region, each in enumerate(brought) if each.takes_part)
    if not members:
        raise InputError("all regions are away at once (VirtualLink.away): no run goes on there.")
    conversations = [brought[region].conversation for region in members]
    trailers = tuple(checked(brought[region].trailer, region) for region in members)
    verdict = brought[0].judge(trailers)  # that of any region is the same
    num_regions = len(members)
    sent = [0] * num_regions
    results: list[Result] = []

    def advance(conversation: Conversation, reply: Reply | None) -> Message | None:
        try:
            return next(conversation) if reply is None else conversation.send(reply)
        except StopIteration as end:
            results.append(end.value)
            return None

    replies: Sequence[Reply | None] = [None] * num_regions
    while not results:
        advanced = [
            advance(conversation, reply) for conversation, reply in zip(conversations, replies, strict=True)
        ]
        messages = [message for message in advanced if message is not None]
        if messages:
            for region, message in enumerate(messages):
                sent[region] += message_bytes(message.coder, message.values.numel(), region, num_regions)
            replies = mean_of(messages, verdict.weights, verdict.divisor)
    squares = [believed(float(square(result.mean)), verdict) for result in results]
    arrives_at, seconds = arrival_s(max(brought[region].sent_s for region in members), max(sent))
    ended_at = arrives_at if arrives_at else None
    own = dict(zip(members, zip(results, sent, squares, strict=True), strict=True))

    def arrival(region: int) -> Arrival:
        result, count, sum_of_squares = own.get(region, (_followed(results[0]), 0, squares[0]))
        return Arrival(result, trailers, count, seconds, sum_of_squares, members, verdict, ended_at=ended_at)

    return [(arrival(region), arrives_at) for region in range(len(brought))]


def _followed(result: Result) -> Result:
    """The result of another region, for one that has no part in it."""
    mean = result.mean.clone()
    return Result(mean, lambda: mean, without_residuals(result.state))
