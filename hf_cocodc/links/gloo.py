"""The link between machines: exchanges over gloo's TCP connections, made by a background thread."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LinkError, MeetingError, RegionLostError
from ..meeting.presence import Member, Presence
from ..meeting.sealed import within
from ..meeting.secret import Keys
from ..meeting.values import text_of
from ..threads import NativeThread, at_rest
from .base import Arrival, FixedSet, Handle, Parcel
from .calls import BroadcastCall, GatherCall, MeanCall
from .direct import DirectLink
from .records import Record
from .wire import END_OF_TAGS, Wire, died

_LEAVE_S = 1.0
"""Seconds that a link which closes after an error gives its thread to end: at rest it ends at once, in a transfer it may wait."""


class GlooLink(DirectLink, FixedSet):
    """Reaches the same lane of every other region.

    One background thread makes the transfers in order: it encodes, sends, receives and decodes. The calling thread waits
    only if it asks for a result.

    Args:
        store: reaches all regions; used under `prefix` to connect, and not afterwards.
        prefix: unique to the run (and lane).
        region: this region.
        num_regions: number of regions M.
        connections: TCP connections for payloads to each other region; None derives the number from the longest round trip.
        address: the address of this machine that other regions reach.
        timeout_s: seconds after which another region counts as lost: without a sign of life while it is late for a
            transfer, or without progress within a transfer.
        stuck_timeout_s: seconds after which a late region that makes no inner step counts as lost.
        rate_limit: bytes per second that this region sends at most, to all regions together; None for no limit.
        num_lanes: lanes of this region. Each has its own link; they share the limit and the network.
        pin_memory: whether to keep means in pinned memory, from which a GPU copies faster.
        keys: of the run's secret: all regions prove to each other that they have them. None without a secret.
        encrypt: whether what regions send each other is encrypted, with these keys.

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
        stuck_timeout_s: float = 1200.0,
        rate_limit: float | None = None,
        num_lanes: int = 1,
        pin_memory: bool = False,
        keys: Keys | None = None,
        encrypt: bool = False,
    ) -> None:
        presence = Presence(
            *(prefix, Member(region, 0), address, timeout_s, stuck_timeout_s),
            patient=True,
            keys=keys,
            encrypt=encrypt,
        )
        super().__init__(region, presence, pin_memory)
        self.num_regions, self.num_lanes = num_regions, num_lanes
        self._timeout_s = timeout_s
        share = None if rate_limit is None else rate_limit / num_lanes
        self._wire = Wire(
            region,
            connections,
            address,
            timeout_s,
            share,
            num_lanes,
            self.note_of,
            keys=keys,
            encrypt=encrypt,
        )
        try:
            found = self._wire.connect_all(num_regions, prefix, store)
            self._see_all(within(f"{prefix}/presence", store))
        except BaseException as error:
            self._presence.close(str(error))
            raise
        self.view = self._wire.view(range(num_regions), 0, END_OF_TAGS, found)
        self._job: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._failure: LinkError | None = None
        self._presence.on_lost(self._give_up)
        self._thread = NativeThread(self._work, "hf_cocodc-link")
        self._thread.start()

    def mean(self, parcel: Parcel) -> Handle:
        def transfer() -> Arrival:
            arrival = MeanCall(self.view, self.members, parcel, self._memory, self._presence).run()
            if parcel.then is not None:
                parcel.then(arrival)
            return arrival

        return self._submit(transfer, parcel.what)

    def tick(self, inner_step: int) -> None:
        self._presence.inner_step = inner_step

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        call = BroadcastCall(self.view, flat.view(torch.uint8), source or 0, what, self._presence)
        self._submit(call.run, what).wait()
        self._broadcast_bytes += call.bytes_sent

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        return self._submit(
            GatherCall(self.view, self.members, record, what, self._presence).run, what
        ).wait()

    def close(self, reason: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if reason is None and self._failure is not None:
            reason = str(self._failure)
        self._jobs.put(None)
        # after an error, too: connections are closed only once the thread has ended, and others wait at their ends
        self._thread.join(timeout=_LEAVE_S if reason is not None else self._timeout_s)
        self._presence.close(reason)
        broken = self._thread.is_alive() or self._failure is not None
        self._wire.close(broken, at_once=reason is not None)

    def _see_all(self, store: dist.Store) -> None:
        """Connect the presence of this region to that of all others."""
        try:
            store.set(str(self.region), self._presence.address)
            others = {
                Member(region, 0): text_of(store.get(str(region)), f"presence/{region}")
                for region in range(self.num_regions)
            }
        except MeetingError:
            raise
        except RuntimeError as error:
            raise LinkError(
                f"the store failed before all regions had connected: {str(error).splitlines()[0][:200]}"
            ) from error
        self._presence.connect(others, time.monotonic() + self._timeout_s)

    def _submit(self, call: Callable[[], Any], what: str) -> "_Job":
        if self._closed:
            raise LinkError(f"the link is closed: {what} cannot travel.")
        job = _Job(call, what)
        self._jobs.put(job)
        # checked last: `_give_up` sets the failure before it fails the jobs in the queue
        if self._failure is not None:
            job.fail(self._failure)
        return job

    def _work(self) -> None:
        while (job := self._next()) is not None:
            # after a failure the groups must not be used again: a late operation could match a new one
            if self._failure is not None:
                job.fail(self._failure)
                continue
            self._job = job
            try:
                job.run()
            except BaseException as error:  # every error must reach the training thread
                self._failure = (
                    error if isinstance(error, LinkError) else LinkError(f"{job.what} failed: {error}")
                )
                self.leave_note(str(self._failure))
                job.fail(error)

    def _next(self) -> "_Job | None":
        with at_rest():
            return self._jobs.get()

    def _give_up(self, member: Member, why: str) -> None:
        """A region that we wait for is lost. The link's thread may wait for it for ever: we abandon this thread."""
        if self._failure is not None:
            return
        region, waits, seen = member.region, self._presence.waits, self._presence.seen(member.region)
        what = "a transfer" if waits is None else waits.what
        note = self.note_of(region)
        if note is not None:
            said = f"region {region} left while region {self.region} waited for {what}: {note}"
            self._failure = RegionLostError(region, said)
        elif seen is not None and seen.lost == "closed":
            self._failure = died(region, self.region, what)
        else:
            self._failure = RegionLostError(
                region,
                f"region {region} sent nothing for {self._presence.waited_s():.0f} s while region {self.region} waited for "
                f"{what}: {why}. Look at its machine and its last output, then start all regions again with --resume.",
            )
        self.leave_note(str(self._failure))
        if self._job is not None:
            self._job.fail(self._failure)
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job.fail(self._failure)


class _Job:
    """Work for the link's thread, and the handle by which the training thread waits for its result."""

    def __init__(self, call: Callable[[], Any], what: str) -> None:
        self._call: Callable[[], Any] | None = call
        self.what = what
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._call is not None
        self._value = self._call()
        self._call = None  # it may reference the previous transfer, which references an earlier one
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> Any:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value
