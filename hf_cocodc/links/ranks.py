"""Links of regions with several ranks: the leader shares its arrivals (DDP), or every rank has its own lane (FSDP2)."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..meeting.region_store import RegionStore
from ..meeting.stopping import StopAgreement
from ..parts.codecs.base import Result
from ..tensors.pools import HOST, Pool
from .base import Arrival, FixedSet, Handle, Link, Parcel
from .records import ROW, Record, from_numbers, from_row, to_row
from .trailer import Trailer

T = TypeVar("T")


class SharedLink(FixedSet):
    """A link for a region of several ranks that hold the same parameters (DDP): the leader talks, all ranks receive.

    Args:
        leader_link: the link, on the region's rank 0; None on the other ranks.
        region: this region.
        num_regions: number of regions M.
        device: device of the tensors that the region's own process group accepts (a GPU under NCCL).
        inside: the region's own store. There the other ranks wait while the leader waits for other regions.
    """

    def __init__(
        self,
        leader_link: Link | None,
        region: int,
        num_regions: int,
        device: torch.device,
        inside: RegionStore,
    ) -> None:
        self.region = region
        self.num_regions = num_regions
        self.lane, self.num_lanes = 0, 1
        self.replicas = True
        self.timing = "measured"
        self._link = leader_link
        self.agreement: StopAgreement | None = None
        self._device, self._home = device, HOST
        self._inside = inside

    @property
    def awaits(self) -> int | None:
        return None if self._link is None else self._link.awaits

    def mean(self, parcel: Parcel) -> Handle:
        handle = None if self._link is None else self._link.mean(parcel)
        return _SharedHandle(self, handle, parcel)

    def bring_to(self, home: Pool) -> None:
        self._home = home.device
        if self._link is not None:
            self._link.bring_to(home)

    def give(self, mean: Tensor) -> None:
        if self._link is not None:
            self._link.give(mean)

    def total(self, values: Tensor) -> Tensor:
        return values

    def clock(self) -> float:
        return time.perf_counter()

    def tick(self, inner_step: int) -> None:
        if self._link is not None:
            self._link.tick(inner_step)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        self.lead(lambda link: link.broadcast(flat, what, source), what)
        flat.copy_(self.share(flat))

    def count_broadcasts(self) -> int:
        return 0 if self._link is None else self._link.count_broadcasts()

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        records = self.lead(lambda link: link.gather(record, what), what)
        return self.share_records(type(record), records or ())

    def leave_note(self, reason: str) -> None:
        if self._link is not None:
            self._link.leave_note(reason)

    def note_of(self, region: int) -> str | None:
        return None if self._link is None else self._link.note_of(region)

    def close(self, reason: str | None = None) -> None:
        if self._link is not None:
            self._link.close(reason)

    def lead(self, call: Callable[[Link], T], what: str) -> T | None:
        """Let the leader make a call that waits for other regions; returns None on the other ranks, which wait, too."""

        def on_the_leader() -> T:
            assert self._link is not None
            return call(self._link)

        return self._inside.lead(on_the_leader, what)

    def share(self, tensor: Tensor) -> Tensor:
        """The leader's `tensor`, on every rank of the region."""
        return self._broadcast(tensor.to(self._device)).to(tensor.device)

    def hand_out(self, mean: Tensor) -> None:
        """On the leader: give the mean to every rank of the region."""
        self._broadcast(mean.to(self._device))

    def receive(self, numel: int) -> Tensor:
        """On the other ranks: the mean that the leader hands out."""
        return self._broadcast(torch.empty(numel, dtype=torch.float32, device=self._device)).to(self._home)

    def share_records(self, kind: type[Record], records: Sequence[Record]) -> tuple[Record, ...]:
        """The leader's records, one per region, on every rank."""
        rows = torch.zeros(self.num_regions, ROW, dtype=torch.float64)
        for region, record in enumerate(records):
            rows[region] = to_row(record)
        return tuple(from_row(kind, row, region) for region, row in enumerate(self.share(rows)))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0)
        return tensor


class _SharedHandle:
    def __init__(self, shared: SharedLink, handle: Handle | None, parcel: Parcel) -> None:
        self._shared, self._handle = shared, handle
        self._numel, self._what = parcel.numel, parcel.what
        self._then = parcel.then if handle is None else None  # the leader's link calls it there
        self._arrival: Arrival | None = None

    def wait(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._receive()
            then, self._then = self._then, None
            if then is not None:
                then(self._arrival)
        return self._arrival

    def _receive(self) -> Arrival:
        arrival = self._shared.lead(lambda _: self._on_the_leader(), self._what)
        if arrival is not None:
            self._shared.hand_out(arrival.result.mean)
            self._shared.share(torch.tensor([arrival.square], dtype=torch.float64))
            self._shared.share_records(Trailer, arrival.trailers)
            return arrival
        mean = self._shared.receive(self._numel)
        square = float(self._shared.share(torch.empty(1, dtype=torch.float64)))
        trailers = self._shared.share_records(Trailer, ())
        return Arrival(Result(mean, lambda: mean, {}), trailers, 0, 0.0, square, self._shared.members)

    def _on_the_leader(self) -> Arrival:
        assert self._handle is not None
        return self._handle.wait()


class LaneLink(FixedSet):
    """A link for one rank of a sharded region (FSDP2): it exchanges its shards with the same rank of every other region.

    Decisions need numbers that are equal in all lanes: norms of whole tensors, and trailers. The region's own process
    group settles both with small collective calls. Every rank waits for the same transfers in the same order.

    Args:
        link: the link of this lane.
        lane: this rank in its region.
        num_lanes: ranks of the region.
        device: device of the tensors that the region's own process group accepts (a GPU under NCCL).
        inside: the region's own store, where the other ranks wait for the leader; None if there is only one rank.
    """

    def __init__(
        self,
        link: Link,
        lane: int,
        num_lanes: int,
        device: torch.device,
        inside: RegionStore | None = None,
    ) -> None:
        self.region, self.num_regions = link.region, link.num_regions
        self.lane, self.num_lanes = lane, num_lanes
        self.replicas = False
        self.timing = link.timing
        self.agreement: StopAgreement | None = None
        self._link = link
        self._device, self._inside = device, inside

    @property
    def awaits(self) -> int | None:
        return self._link.awaits

    def mean(self, parcel: Parcel) -> Handle:
        return _LaneHandle(self, self._link.mean(parcel))

    def bring_to(self, home: Pool) -> None:
        self._link.bring_to(home)

    def give(self, mean: Tensor) -> None:
        self._link.give(mean)

    def total(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def clock(self) -> float:
        return self._link.clock()

    def tick(self, inner_step: int) -> None:
        self._link.tick(inner_step)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        self._link.broadcast(flat, what, source)

    def count_broadcasts(self) -> int:
        return self._link.count_broadcasts()

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        return self._link.gather(record, what)

    def lead(self, call: Callable[[Link], T], what: str) -> T | None:
        return call(self._link) if self._inside is None else self._inside.lead(lambda: call(self._link), what)

    def leave_note(self, reason: str) -> None:
        self._link.leave_note(reason)

    def note_of(self, region: int) -> str | None:
        return self._link.note_of(region)

    def close(self, reason: str | None = None) -> None:
        self._link.close(reason)

    def agree(self, arrival: Arrival) -> Arrival:
        """The arrival with trailers that are equal in all lanes, and with the bytes of all lanes."""
        names = Trailer._fields
        rows = torch.tensor([list(trailer) for trailer in arrival.trailers], dtype=torch.float64)
        signs = torch.tensor([_SETTLED.get(name, 0.0) for name in names], dtype=torch.float64)
        settled = self._reduce(torch.where(signs == 0, 0.0, rows * signs).flatten(), dist.ReduceOp.MAX)
        rows = torch.where(signs == 0, rows, settled.view_as(rows) * signs)
        trailers = tuple(from_numbers(Trailer, dict(zip(names, row, strict=True))) for row in rows.tolist())
        sums = self.total(torch.tensor([arrival.bytes_sent, arrival.square], dtype=torch.float64)).tolist()
        return arrival._replace(trailers=trailers, bytes_sent=int(sums[0]), square=sums[1])

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved, operation)
        return moved.to(values.device)


_SETTLED = {
    **dict.fromkeys(("step_time_s", "sync_time_s", "ending", "round_lr", "layout"), 1.0),
    **dict.fromkeys(("weight", "saved_at", "compression"), -1.0),
}
"""How the lanes of a region agree on a number of a trailer: on the largest (1) or the smallest (-1). Other numbers may differ."""


class _LaneHandle:
    def __init__(self, link: LaneLink, handle: Handle) -> None:
        self._link, self._handle = link, handle
        self._arrival: Arrival | None = None

    def wait(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._link.agree(self._handle.wait())
        return self._arrival
