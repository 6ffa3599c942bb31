"""Many regions in one process: the numbers of the real link, exactly, without sockets."""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from ..errors import InputError, LinkError
from ..parts.codecs.base import Conversation, Message, Reply, Result, mean_of, message_bytes
from ..tensors.norms import square
from ..tensors.pools import Pool
from .base import Arrival, Handle
from .trailer import Trailer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class VirtualLink:
    """A link of simulated time: when transfers would arrive on it decides what adaptive schedules do, and what is blocked.

    One serial link joins all regions; a transfer starts when the last region has sent it and earlier ones are through.

    Attributes:
        step_time_s: T_c, seconds of an inner step.
        latency_s: seconds one way.
        bandwidth: bytes a second that a region can send.

    Raises:
        InputError: a time or rate that is not positive.
    """

    step_time_s: float
    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, value in (("step_time_s", self.step_time_s), ("bandwidth", self.bandwidth)):
            if value <= 0:
                raise InputError(f"{name}={value} of a VirtualLink must be positive.")
        if self.latency_s < 0:
            raise InputError(f"latency_s={self.latency_s} of a VirtualLink must not be negative.")


def run_in_lockstep(
    num_regions: int, body: Callable[[int, "LockstepLink"], T], link: VirtualLink | None = None
) -> list[T]:
    """Run body(region, link) for every region in this process, and return what each returned.

    Regions take turns: one runs until it needs what another has not sent yet. Each has a thread of its own and a state
    of torch's and Python's random numbers of its own, but only one runs at a time, so results do not depend on timing.
    The body may train with anything: a bare Synchronizer, an Accelerate loop, a Trainer. With `link` time is simulated.

    Raises:
        LinkError: every region waits for another.
        Exception: whatever a body raised, of the first region that did.
    """
    return LockstepHub(num_regions, link).run(body)


class LockstepHub:
    """Joins the links of `num_regions` regions; `links[r]` is region r's."""

    def __init__(self, num_regions: int, virtual: VirtualLink | None = None) -> None:
        self.virtual = virtual
        self._busy_until = 0.0
        self.links = [LockstepLink(self, region, num_regions) for region in range(num_regions)]
        self._meetings: dict[int, _Meeting] = {}
        self._turns = [threading.Semaphore(0) for _ in self.links]
        self._waits: dict[int, Callable[[], bool]] = {region: lambda: True for region in range(num_regions)}
        self._over = threading.Event()
        self.notes: dict[int, str] = {}
        self._errors: list[BaseException] = []

    def run(self, body: Callable[[int, "LockstepLink"], T]) -> list[T]:
        """See `run_in_lockstep`."""
        results: dict[int, T] = {}
        random_state, gradient_state = _random_state(), _gradient_state()

        def live(region: int) -> None:
            self._turns[region].acquire()
            try:
                if not self._errors:
                    _set_random_state(random_state)
                    _set_gradient_state(gradient_state)
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
        self._over.wait()
        for thread in threads:
            thread.join()
        _set_random_state(random_state)
        _set_gradient_state(gradient_state)
        if self._errors:
            raise self._errors[0]
        return [results[link.region] for link in self.links]

    def bring(self, region: int, call: int, what: str, item: Any, meet: "Meet") -> "_Meeting":
        """Region `region` makes its call number `call` with `item`; `meet` gives the answers once enough have come."""
        meeting = self._meetings.setdefault(call, _Meeting(what))
        if meeting.what != what:
            raise LinkError(
                f"regions are out of step: region {region} calls for {what}, another for {meeting.what}."
            )
        meeting.brought[region] = item
        if meeting.answers is None:
            meeting.answers = meet(meeting.brought, len(self.links))
        if len(meeting.brought) == len(self.links):
            del self._meetings[call]
        return meeting

    def answer(self, region: int, meeting: "_Meeting") -> Any:
        """What region `region` takes away from the meeting, the others running until they have brought their part."""
        if meeting.answers is None:
            random_state, gradient_state = _random_state(), _gradient_state()
            self._waits[region] = lambda: meeting.answers is not None
            self._pass_the_turn(region)
            self._turns[region].acquire()
            if self._errors:
                raise LinkError(f"another region failed while region {region} waited for {meeting.what}.")
            self._waits[region] = lambda: True
            _set_random_state(random_state)
            _set_gradient_state(gradient_state)
        assert meeting.answers is not None
        return meeting.answers[region]

    def arrival_s(self, sent_s: float, bytes_sent: int) -> tuple[float, float]:
        """When a transfer arrives that the last region sent at `sent_s`, and how long it takes; in simulated seconds."""
        if self.virtual is None:
            return 0.0, 0.0
        start = max(self._busy_until, sent_s)
        self._busy_until = start + bytes_sent / self.virtual.bandwidth
        trips = 1 if len(self.links) <= 2 else 2
        arrival = self._busy_until + trips * self.virtual.latency_s
        return arrival, arrival - start

    def _pass_the_turn(self, region: int) -> None:
        """Let the next region run that can; where none can, all wait for each other, and that is an error."""
        order = sorted(self._waits, key=lambda other: (other - region - 1) % len(self.links))
        able = [other for other in order if self._errors or self._waits[other]()]
        if able:
            self._turns[able[0]].release()
        elif order:
            self._errors.append(
                LinkError("every region waits for another; do all of them make the same calls?")
            )
            self._turns[order[0]].release()
        else:
            self._over.set()


class _Meeting:
    """A call that all regions make: what each has brought, and, once enough have come, what each takes away."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.brought: dict[int, Any] = {}
        self.answers: Sequence[Any] | None = None


Meet = Callable[[dict[int, Any], int], Sequence[Any] | None]


def _when_all_came(answers: Callable[[list], Sequence[Any]]) -> Meet:
    def meet(brought: dict[int, Any], num_regions: int) -> Sequence[Any] | None:
        return answers([brought[r] for r in range(num_regions)]) if len(brought) == num_regions else None

    return meet


def _from_region(source: int) -> Meet:
    def meet(brought: dict[int, Any], num_regions: int) -> Sequence[Any] | None:
        return [brought[source]] * num_regions if source in brought else None

    return meet


class LockstepLink:
    """One region's end of a `LockstepHub`; see `links.base.Link` for the calls."""

    def __init__(self, hub: LockstepHub, region: int, num_regions: int) -> None:
        self.region = region
        self.num_regions = num_regions
        self.lane, self.num_lanes = 0, 1
        self._hub = hub
        self._calls = 0
        self.now = 0.0
        """Simulated seconds, where time is simulated."""

    def mean(
        self, conversation: Conversation, numel: int, trailer: Callable[[], Trailer], what: str
    ) -> Handle:
        meet = _when_all_came(lambda brought: _mean_all(brought, self._hub.arrival_s))
        return _Handle(self, self._bring(what, (conversation, trailer(), self.now), meet))

    def bring_to(self, home: Pool) -> None:
        """Means stay on the host."""

    def give(self, mean: Tensor) -> None:
        """Memory is not kept here."""

    def total(self, values: Tensor) -> Tensor:
        return values

    def clock(self) -> float:
        return time.perf_counter() if self._hub.virtual is None else self.now

    def tick(self) -> None:
        if self._hub.virtual is not None:
            self.now += self._hub.virtual.step_time_s

    def answer(self, meeting: "_Meeting") -> Any:
        """What this region takes away from a meeting."""
        return self._hub.answer(self.region, meeting)

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        flat.copy_(self._hub.answer(self.region, self._bring(what, flat.clone(), _from_region(source))))

    def gather(self, trailer: Trailer, what: str) -> tuple[Trailer, ...]:
        everybodys = _when_all_came(lambda trailers: [tuple(trailers)] * len(trailers))
        return self._hub.answer(self.region, self._bring(what, trailer, everybodys))

    def leave_note(self, reason: str) -> None:
        self._hub.notes[self.region] = reason

    def note_of(self, region: int) -> str | None:
        return self._hub.notes.get(region)

    def close(self, reason: str | None = None) -> None:
        pass

    def _bring(self, what: str, item: Any, meet: Meet) -> _Meeting:
        self._calls += 1
        return self._hub.bring(self.region, self._calls, what, item, meet)


class _Handle:
    def __init__(self, link: LockstepLink, meeting: _Meeting) -> None:
        self._link, self._meeting = link, meeting

    def wait(self) -> Arrival:
        arrival, arrives_at = self._link.answer(self._meeting)
        self._link.now = max(self._link.now, arrives_at)
        return arrival


def _mean_all(
    brought: Sequence[tuple[Conversation, Trailer, float]],
    arrival_s: Callable[[float, int], tuple[float, float]],
) -> list[tuple[Arrival, float]]:
    """Hold all regions' conversations side by side, message by message; each region's arrival, and when it is there."""
    conversations = [conversation for conversation, _, _ in brought]
    trailers = tuple(trailer for _, trailer, _ in brought)
    shares = [trailer.weight for trailer in trailers]
    num_regions = len(brought)
    sent = [0] * num_regions
    results: list[Result] = []

    def hear(conversation: Conversation, reply: Reply | None) -> Message | None:
        try:
            return next(conversation) if reply is None else conversation.send(reply)
        except StopIteration as end:
            results.append(end.value)
            return None

    replies: Sequence[Reply | None] = [None] * num_regions
    while not results:
        said = [hear(conversation, reply) for conversation, reply in zip(conversations, replies, strict=True)]
        messages = [message for message in said if message is not None]
        if messages:
            for region, message in enumerate(messages):
                sent[region] += message_bytes(message.coder, message.values.numel(), region, num_regions)
            replies = mean_of(messages, shares)
    arrives_at, seconds = arrival_s(max(sent_s for _, _, sent_s in brought), max(sent))
    return [
        (Arrival(result, trailers, count, seconds, square(result.mean)), arrives_at)
        for result, count in zip(results, sent, strict=True)
    ]


def _random_state() -> tuple:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(), cuda


def _set_random_state(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])


def _gradient_state() -> dict[str, Any]:
    """Accelerate's word on gradient accumulation and data loaders, of which a process has one: each region has its own."""
    accelerate = sys.modules.get("accelerate.state")
    shared = accelerate.GradientState._shared_state if accelerate else {}
    return {name: list(value) if isinstance(value, list) else value for name, value in shared.items()}


def _set_gradient_state(state: dict[str, Any]) -> None:
    accelerate = sys.modules.get("accelerate.state")
    if accelerate:
        accelerate.GradientState._shared_state.clear()
        accelerate.GradientState._shared_state.update(
            {n: list(v) if isinstance(v, list) else v for n, v in state.items()}
        )
