"""The link that crosses the world: exchanges over gloo's TCP connections, worked off by a thread of their own."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import LinkError, RegionLostError
from ..meeting.heartbeat import Heartbeat
from ..parts.codecs.base import Conversation, Message, Reply, Result
from ..tensors.departures import bring
from ..tensors.norms import square
from ..tensors.pools import HOST, Pool
from .base import Arrival, Handle, drive, weights
from .exchange import Exchange
from .trailer import Trailer
from .wire import Wire

_PIECE_BYTES = 1 << 20


class GlooLink:
    """Reaches the same lane of every other region.

    Transfers are worked off in order by one background thread, which encodes, sends, receives and decodes; the calling
    thread only waits where it asks for a result.

    Args:
        store: reaches all regions; used under `prefix` to set up, and to tell why a region left.
        prefix: unique to the run (and lane).
        region: this region.
        num_regions: number of regions M.
        connections: TCP connections for payloads to each other region; None takes as many as the round trip asks for.
        address: this machine's own address by which the other regions reach it.
        timeout_s: seconds after which another region counts as lost: without a sign of life while it is late for a
            transfer, without progress within one.
        rate_limit: bytes a second that this region sends at most, to all regions together; None for no limit.
        num_lanes: lanes of this region, each with a link of its own, that share that limit and what the network gives.
        pin_memory: whether a GPU will copy from the means.

    Raises:
        LinkError: the connections could not be made in time.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        region: int,
        num_regions: int,
        connections: int | None = None,
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        rate_limit: float | None = None,
        num_lanes: int = 1,
        pin_memory: bool = False,
    ) -> None:
        self.region = region
        self.num_regions = num_regions
        self.lane, self.num_lanes = 0, num_lanes
        self._timeout_s = timeout_s
        share = None if rate_limit is None else rate_limit / num_lanes
        self.wire = Wire(
            store, prefix, region, num_regions, connections, address, timeout_s, share, num_lanes
        )
        self._buffers = Pool(pinned=pin_memory)
        self._home = self._buffers
        self._lent = WeakIdKeyDictionary()
        self._heartbeat = Heartbeat(
            dist.PrefixStore(f"{prefix}/alive", store), region, timeout_s, self._give_up
        )
        self._job: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._failure: LinkError | None = None
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-link", daemon=True)
        self._thread.start()

    def mean(
        self, conversation: Conversation, numel: int, trailer: Callable[[], Trailer], what: str
    ) -> Handle:
        def transfer() -> Arrival:
            numbers = _numbers(trailer())
            began = time.perf_counter()
            bytes_sent = 0
            came = 0.0
            reply = None
            swap = self.wire.begin_swap(numbers, what)

            def exchange(message: Message) -> Reply:
                nonlocal bytes_sent, came, reply
                said = Exchange(self.wire, message, self._buffers, what)
                said.begin()
                if not came:
                    self.wire.wait(swap.pending, what, self._heartbeat)
                    came = time.perf_counter()
                reply = said.end(weights(_trailers(swap.values)))
                bytes_sent += said.bytes_sent
                return reply

            result = drive(conversation, exchange)
            # until the last region has come it is that region which takes time, not the link
            seconds = time.perf_counter() - max(began, came - self.wire.rtt_s)
            found = square(result.mean)
            result = self._bring_home(result, lent=reply is not None and reply.mean is result.mean)
            return Arrival(result, _trailers(swap.values), bytes_sent, seconds, found)

        return self._submit(transfer, what)

    def bring_to(self, home: Pool) -> None:
        self._home = self._buffers if home.device == HOST else home

    def give(self, mean: Tensor) -> None:
        # a codec's own mean is none of the link's memory, which would grow with every one it took in
        if self._lent.pop(mean, False):
            self._home.give(mean)

    def total(self, values: Tensor) -> Tensor:
        return values

    def clock(self) -> float:
        return time.perf_counter()

    def tick(self) -> None:
        self._heartbeat.inner_step += 1

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        self._submit(lambda: self._spread(flat.view(torch.uint8), what, source), what).wait()

    def gather(self, trailer: Trailer, what: str) -> tuple[Trailer, ...]:
        def swap() -> tuple[Trailer, ...]:
            values, pending = self.wire.begin_swap(_numbers(trailer), what)
            self.wire.wait(pending, what, self._heartbeat)
            return _trailers(values)

        return self._submit(swap, what).wait()

    def leave_note(self, reason: str) -> None:
        self.wire.leave_note(reason)

    def note_of(self, region: int) -> str | None:
        return self.wire.note_of(region)

    def close(self, reason: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if reason is not None:
            self.leave_note(reason)
        self._heartbeat.close(gone=reason is not None)
        self._jobs.put(None)
        self._thread.join(timeout=0 if reason is not None or self._failure else self._timeout_s)
        self.wire.close(broken=self._thread.is_alive() or self._failure is not None)

    def _submit(self, call: Callable[[], Any], what: str) -> "_Job":
        if self._closed:
            raise LinkError(f"the link is closed, so {what} cannot travel.")
        job = _Job(call, what)
        self._jobs.put(job)
        # looked at last: whoever gives up fails what is in the queue after saying so
        if self._failure is not None:
            job.fail(self._failure)
        return job

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            # after a failure the groups are not to be used again: a late operation could meet a new one
            if self._failure is not None:
                job.fail(self._failure)
                continue
            self._job = job
            try:
                job.run()
            except BaseException as error:  # whatever it is has to reach the training thread
                self._failure = (
                    error if isinstance(error, LinkError) else LinkError(f"{job.what} failed: {error}")
                )
                self.leave_note(str(self._failure))
                job.fail(error)

    def _give_up(self, region: int, what: str, waited_s: float, why: str) -> None:
        """The heartbeat's word that `region` is lost: the link's thread may wait for it for ever, so it is left behind."""
        note = self.note_of(region)
        self._failure = RegionLostError(
            region,
            f"region {region} left while region {self.region} waited for {what}: {note}"
            if note is not None
            else f"region {region} sent nothing for {waited_s:.0f} s while region {self.region} waited for {what}: {why} "
            f"(timeout_s={self._timeout_s:g}). Look at its machine and its last output, then start all regions again with "
            "--resume.",
        )
        self.leave_note(str(self._failure))
        if self._job is not None:
            self._job.fail(self._failure)
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job.fail(self._failure)

    def _bring_home(self, result: Result, lent: bool) -> Result:
        """The result with its mean where it is wanted; `lent`: it lies in the link's own memory."""
        mean = result.mean
        if self._home is not self._buffers:
            mean = bring(result.mean, self._home)
            if lent:
                self._buffers.give(result.mean)
            lent = True
        if lent:
            self._lent[mean] = True
        return result._replace(mean=mean)

    def _spread(self, raw: Tensor, what: str, source: int) -> None:
        tag, pending = self.wire.tag(), []
        for index, piece in enumerate(raw.split(_PIECE_BYTES)):
            if self.region == source:
                pending += [self.wire.send(other, piece, tag, index, what) for other in self.wire.others]
            else:
                pending.append(self.wire.receive(source, piece, tag, index, what))
        self.wire.wait(pending, what, self._heartbeat)


class _Job:
    """Work for the link's thread, and the handle by which the training thread waits for it."""

    def __init__(self, call: Callable[[], Any], what: str) -> None:
        self._call = call
        self.what = what
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        self._value = self._call()
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> Any:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value


def _numbers(trailer: Trailer) -> Tensor:
    return torch.tensor(trailer, dtype=torch.float64)


def _trailers(values: list[Tensor]) -> tuple[Trailer, ...]:
    return tuple(Trailer(*value.tolist()) for value in values)
