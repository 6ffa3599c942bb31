"""The link that crosses the world: direct exchanges over gloo, outside torch.distributed's default group.

Every pair of regions talks directly, piece by piece over several TCP connections. A ring (gloo's all-reduce) pays 2
(M-1) round trips and sums in an order that depends on the ring; direct exchanges pay two one-way trips, sum in the
order of the regions, so that the bits equal those of every other link, and know which region it is that does not
answer.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.base import (
    Coder,
    Conversation,
    Message,
    Reply,
    decode_shards,
    shards,
    swaps_whole,
    weighted_mean,
)
from ..errors import LinkError, RegionLostError
from ..tensors import square
from .base import Arrival, Handle, Trailer, drive
from .heartbeat import Heartbeat

PIECE_BYTES = 1 << 20
_TAGS = 1 << 24
_FOR_EVER = timedelta(days=365)

_abandoned: list[Any] = []
"""Groups that failed: gloo's destructor blocks until their pending operations time out, so they are never destroyed."""


class GlooLink:
    """Reaches the same lane of every other region through `connections` TCP connections a pair.

    Transfers are worked off in order by one background thread, which encodes, sends, receives and decodes; the calling
    thread only waits where it asks for a result.

    Args:
        store: reaches all regions; used under `prefix` to set up, and to tell why a region left.
        prefix: unique to the run (and lane).
        region: this region.
        num_regions: number of regions M.
        connections: TCP connections to each other region.
        address: this machine's own address by which the other regions reach it.
        timeout_s: seconds after which another region counts as lost: without a sign of life while it is late for a
            transfer, without progress within one.

    Raises:
        LinkError: the connections could not be made in time.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        region: int,
        num_regions: int,
        connections: int = 1,
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
    ) -> None:
        self.region = region
        self.num_regions = num_regions
        self.lane, self.num_lanes = 0, 1
        self._others = [other for other in range(num_regions) if other != region]
        self._store = dist.PrefixStore(f"{prefix}/left", store)
        self._timeout_s = timeout_s
        self._groups = [
            _group(dist.PrefixStore(f"{prefix}/c{i}", store), region, num_regions, address, timeout_s)
            for i in range(connections)
        ]
        self._heartbeat = Heartbeat(
            dist.PrefixStore(f"{prefix}/alive", store), region, timeout_s, self._give_up
        )
        self._job: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._phase = 0
        self._failure: LinkError | None = None
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-link", daemon=True)
        self._thread.start()

    def mean(self, conversation: Conversation, numel: int, trailer: Trailer, what: str) -> Handle:
        def transfer() -> Arrival:
            bytes_sent = 0
            trailers = self._swap_trailers(trailer, what)
            # not before: until all have come it is a slow region that takes time, not the link
            start = time.perf_counter()
            shares = [each.weight for each in trailers]

            def exchange(message: Message) -> Reply:
                nonlocal bytes_sent
                reply, sent = self._exchange(message, shares, what)
                bytes_sent += sent
                return reply

            result = drive(conversation, exchange)
            seconds = time.perf_counter() - start
            return Arrival(result, trailers, bytes_sent, seconds, square(result.mean))

        return self._submit(transfer, what)

    def total(self, values: Tensor) -> Tensor:
        return values

    def clock(self) -> float:
        return time.perf_counter()

    def tick(self) -> None:
        self._heartbeat.inner_step += 1

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        def spread() -> None:
            raw = flat.view(torch.uint8)
            if self.region == source:
                self._swap(dict.fromkeys(self._others, raw), {}, what, patient=True)
            else:
                self._swap({}, {source: raw}, what, patient=True)

        self._submit(spread, what).wait()

    def gather(self, trailer: Trailer, what: str) -> tuple[Trailer, ...]:
        return self._submit(lambda: self._swap_trailers(trailer, what), what).wait()

    def close(self, reason: str | None = None) -> None:
        if reason is not None:
            self.leave_note(reason)
        self._heartbeat.close(gone=reason is not None)
        self._jobs.put(None)
        self._thread.join(timeout=0 if reason is not None or self._failure else self._timeout_s)
        if self._thread.is_alive() or self._failure:
            _abandon(self._groups)
        self._groups = []

    def _submit(self, call: Callable[[], Any], what: str) -> "_Job":
        if not self._groups:
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

    def _exchange(self, message: Message, shares: Sequence[float], what: str) -> tuple[Reply, int]:
        """This region's side of `codecs.base.mean_of`."""
        coder, numel = message.coder, message.values.numel()
        if swaps_whole(coder, self.num_regions):
            own = coder.encode(message.values)
            got = self._swap_payloads(dict.fromkeys(self._others, own), numel, coder, what)
            payloads = [got.get(region, own) for region in range(self.num_regions)]
            mean = weighted_mean(payloads, shares, coder, numel)
            return Reply(mean, lambda: coder.decode(own, numel)), len(self._others) * own.numel()
        cut = shards(numel, coder.block, self.num_regions)
        lengths = [part.stop - part.start for part in cut]
        scattered = [coder.encode(message.values[part]) for part in cut]
        mine = lengths[self.region]
        got = self._swap_payloads({other: scattered[other] for other in self._others}, mine, coder, what)
        payloads = [got.get(region, scattered[self.region]) for region in range(self.num_regions)]
        reduced = coder.encode(weighted_mean(payloads, shares, coder, mine))
        buffers = {other: _bytes(coder.num_bytes(lengths[other])) for other in self._others}
        self._swap(dict.fromkeys(self._others, reduced), buffers, what)
        means = [buffers.get(region, reduced) for region in range(self.num_regions)]
        sent = sum(scattered[other].numel() for other in self._others) + len(self._others) * reduced.numel()
        return Reply(decode_shards(means, coder, cut), lambda: decode_shards(scattered, coder, cut)), sent

    def _swap_payloads(
        self, out: dict[int, Tensor], numel: int, coder: Coder, what: str
    ) -> dict[int, Tensor]:
        buffers = {other: _bytes(coder.num_bytes(numel)) for other in self._others}
        self._swap(out, buffers, what)
        return buffers

    def _swap_trailers(self, trailer: Trailer, what: str) -> tuple[Trailer, ...]:
        own = torch.tensor(trailer, dtype=torch.float64)
        buffers = {other: torch.empty_like(own) for other in self._others}
        self._swap(
            {other: own.view(torch.uint8) for other in self._others},
            {other: buffer.view(torch.uint8) for other, buffer in buffers.items()},
            what,
            patient=True,
        )
        return tuple(Trailer(*buffers.get(region, own).tolist()) for region in range(self.num_regions))

    def _swap(
        self, out: dict[int, Tensor], into: dict[int, Tensor], what: str, patient: bool = False
    ) -> None:
        """Send bytes to some regions and receive bytes from some, all at once; piece i travels on connection i mod c.

        Where `patient`, the others may be late: the heartbeat tells how long to wait for them.
        """
        self._phase = (self._phase + 1) % _TAGS
        longest = max((tensor.numel() for tensor in (*out.values(), *into.values())), default=0)
        pending: list[tuple[int, Any]] = []
        for start in range(0, longest, PIECE_BYTES):
            group = self._groups[start // PIECE_BYTES % len(self._groups)]
            piece = slice(start, start + PIECE_BYTES)
            for tensors, post in ((into, group.recv), (out, group.send)):
                for region, tensor in tensors.items():
                    if tensor.numel() > start:
                        with self._naming(region, what):
                            pending.append((region, post([tensor[piece]], region, self._phase)))
        for region, work in pending:
            if patient:
                self._heartbeat.wait_for(region, what)
            with self._naming(region, what):
                work.wait(_FOR_EVER if patient else timedelta(seconds=self._timeout_s))
        self._heartbeat.arrived()

    def _naming(self, region: int, what: str) -> "_Naming":
        return _Naming(self, region, what)

    def explain(self, region: int, what: str, since: float, error: Exception) -> LinkError:
        """The error for a failed operation with `region`, with what that region said when it left."""
        reason = self._wait_for_note(region)
        waited = time.perf_counter() - since
        if reason is not None:
            return RegionLostError(
                region, f"region {region} left while region {self.region} waited for {what}: {reason}"
            )
        if "timed out" in str(error).lower():
            return RegionLostError(
                region,
                f"region {region} stopped in the middle of {what} and sent nothing more for {waited:.0f} s "
                f"(timeout_s={self._timeout_s:g}). If the link is only slow, raise regions.timeout_s; if the region is gone, "
                "start all again with --resume.",
            )
        return RegionLostError(
            region,
            f"region {region} closed its connection while region {self.region} waited for {what}: its process has died. Look "
            "at its last output, then start all regions again.",
        )

    def leave_note(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # without a store the others still see the connection close
            self._store.set(str(self.region), reason)

    def note_of(self, region: int) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check([str(region)]):
                return self._store.get(str(region)).decode()
        return None

    def _wait_for_note(self, region: int) -> str | None:
        """What `region` wrote down; waits a moment, for a closed connection is seen before the note is."""
        for _ in range(10):
            note = self.note_of(region)
            if note is not None:
                return note
            time.sleep(0.05)
        return None


class _Naming:
    """Turns gloo's errors in its block into one that names the region and what was waited for."""

    def __init__(self, link: GlooLink, region: int, what: str) -> None:
        self._link, self._region, self._what = link, region, what

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, LinkError):
            raise self._link.explain(self._region, self._what, self._since, error) from error


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

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> Any:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value


def _bytes(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8)


def _group(store: dist.Store, region: int, num_regions: int, address: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out most of it
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=address)]
    try:
        return gloo(store, region, num_regions, options)
    except RuntimeError as error:
        raise LinkError(
            f"region {region} could not connect to the other regions from its address {address}: "
            f"{str(error).splitlines()[0][:200]}. Every region must reach every other one at the address it has on the "
            "link; name its network interface with regions.interface."
        ) from error


def _abandon(groups: Sequence[Any]) -> None:
    import ctypes

    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _abandoned.append(group)
