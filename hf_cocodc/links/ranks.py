"""Links of regions with several ranks: the leader shares what it gets (DDP), or every rank has a lane of its own (FSDP2)."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..parts.codecs.base import Conversation, Result
from ..tensors.pools import HOST, Pool
from .base import Arrival, Handle, Link
from .trailer import Trailer


class SharedLink:
    """A link for a region of several ranks that hold the same parameters (DDP): the leader talks, all receive.

    Args:
        leader_link: the link, on the region's rank 0; None on the others.
        region: this region.
        num_regions: number of regions M.
        device: where the region's own process group wants tensors (a GPU under NCCL).
    """

    def __init__(self, leader_link: Link | None, region: int, num_regions: int, device: torch.device) -> None:
        self.region = region
        self.num_regions = num_regions
        self.lane, self.num_lanes = 0, 1
        self._link = leader_link
        self._device, self._home = device, HOST

    def mean(
        self, conversation: Conversation, numel: int, trailer: Callable[[], Trailer], what: str
    ) -> Handle:
        handle = None if self._link is None else self._link.mean(conversation, numel, trailer, what)
        return _SharedHandle(self, handle, numel)

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

    def tick(self) -> None:
        if self._link is not None:
            self._link.tick()

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        if self._link is not None:
            self._link.broadcast(flat, what, source)
        flat.copy_(self.share(flat))

    def gather(self, trailer: Trailer, what: str) -> tuple[Trailer, ...]:
        own = () if self._link is None else self._link.gather(trailer, what)
        return self.share_trailers(own)

    def leave_note(self, reason: str) -> None:
        if self._link is not None:
            self._link.leave_note(reason)

    def note_of(self, region: int) -> str | None:
        return None if self._link is None else self._link.note_of(region)

    def close(self, reason: str | None = None) -> None:
        if self._link is not None:
            self._link.close(reason)

    def share(self, tensor: Tensor) -> Tensor:
        """The leader's `tensor`, on every rank of the region."""
        return self._spread(tensor.to(self._device)).to(tensor.device)

    def hand_out(self, mean: Tensor) -> None:
        """On the leader: let every rank of the region have the mean."""
        self._spread(mean.to(self._device))

    def receive(self, numel: int) -> Tensor:
        """On the others: the mean that the leader hands out."""
        return self._spread(torch.empty(numel, dtype=torch.float32, device=self._device)).to(self._home)

    def _spread(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0)
        return tensor

    def share_trailers(self, trailers: Sequence[Trailer]) -> tuple[Trailer, ...]:
        flat = torch.zeros(self.num_regions, len(Trailer._fields), dtype=torch.float64)
        if trailers:
            flat.copy_(torch.tensor([list(trailer) for trailer in trailers], dtype=torch.float64))
        return tuple(Trailer(*row) for row in self.share(flat).tolist())


class _SharedHandle:
    def __init__(self, shared: SharedLink, handle: Handle | None, numel: int) -> None:
        self._shared, self._handle, self._numel = shared, handle, numel
        self._arrival: Arrival | None = None

    def wait(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._receive()
        return self._arrival

    def _receive(self) -> Arrival:
        if self._handle is not None:
            arrival = self._handle.wait()
            self._shared.hand_out(arrival.result.mean)
            self._shared.share(torch.tensor([arrival.square], dtype=torch.float64))
            self._shared.share_trailers(arrival.trailers)
            return arrival
        mean = self._shared.receive(self._numel)
        square = float(self._shared.share(torch.empty(1, dtype=torch.float64)))
        trailers = self._shared.share_trailers(())
        return Arrival(Result(mean, lambda: mean, {}), trailers, 0, 0.0, square)


class LaneLink:
    """A link for one rank of a sharded region (FSDP2): it exchanges its shards with the same rank of every other region.

    Decisions need numbers that all lanes hold alike: whole-tensor norms, and trailers. Both are settled in the region, by
    small collective calls of its own process group; every rank waits for the same transfers in the same order.

    Args:
        link: of this lane.
        lane: this rank in its region.
        num_lanes: ranks of the region.
        device: where the region's own process group wants tensors (a GPU under NCCL).
    """

    def __init__(self, link: Link, lane: int, num_lanes: int, device: torch.device) -> None:
        self.region, self.num_regions = link.region, link.num_regions
        self.lane, self.num_lanes = lane, num_lanes
        self._link = link
        self._device = device

    def mean(
        self, conversation: Conversation, numel: int, trailer: Callable[[], Trailer], what: str
    ) -> Handle:
        return _LaneHandle(self, self._link.mean(conversation, numel, trailer, what))

    def bring_to(self, home: Pool) -> None:
        self._link.bring_to(home)

    def give(self, mean: Tensor) -> None:
        self._link.give(mean)

    def total(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def clock(self) -> float:
        return self._link.clock()

    def tick(self) -> None:
        self._link.tick()

    def broadcast(self, flat: Tensor, what: str, source: int = 0) -> None:
        self._link.broadcast(flat, what, source)

    def gather(self, trailer: Trailer, what: str) -> tuple[Trailer, ...]:
        return self._link.gather(trailer, what)

    def leave_note(self, reason: str) -> None:
        self._link.leave_note(reason)

    def note_of(self, region: int) -> str | None:
        return self._link.note_of(region)

    def close(self, reason: str | None = None) -> None:
        self._link.close(reason)

    def agree(self, arrival: Arrival) -> Arrival:
        """The arrival with trailers that are the same in all lanes, and the bytes of all of them."""
        rows = torch.tensor([list(trailer) for trailer in arrival.trailers], dtype=torch.float64)
        signs = torch.tensor([_SETTLED.get(name, 0.0) for name in Trailer._fields], dtype=torch.float64)
        settled = self._reduce(torch.where(signs == 0, 0.0, rows * signs).flatten(), dist.ReduceOp.MAX)
        rows = torch.where(signs == 0, rows, settled.view_as(rows) * signs)
        trailers = tuple(Trailer(*row) for row in rows.tolist())
        sums = self.total(torch.tensor([arrival.bytes_sent, arrival.square], dtype=torch.float64)).tolist()
        return arrival._replace(trailers=trailers, bytes_sent=int(sums[0]), square=sums[1])

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved, operation)
        return moved.to(values.device)


_SETTLED = {
    **dict.fromkeys(("step_time_s", "sync_time_s", "ending", "round_lr"), 1.0),
    **dict.fromkeys(("weight", "saved_at", "compression"), -1.0),
}
"""What the lanes of a region take of a trailer's number: the largest (1), the smallest (-1); else each its own."""


class _LaneHandle:
    def __init__(self, link: LaneLink, handle: Handle) -> None:
        self._link, self._handle = link, handle
        self._arrival: Arrival | None = None

    def wait(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._link.agree(self._handle.wait())
        return self._arrival
