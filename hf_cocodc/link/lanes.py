"""The link of one rank of a sharded region (FSDP2): every rank has its own lane."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..parts.tensors.memory import HOST
from .base import Arrival, FixedMembers, Handle, Link, MeanRequest
from .group import RegionGroup
from .records import Record, Trailer, from_numbers
from .stopping import StopAgreement

T = TypeVar("T")

_SETTLED = {
    **dict.fromkeys(("step_time_s", "sync_time_s", "ending", "round_lr", "norm", "loss"), 1.0),
    **dict.fromkeys(("weight", "saved_at", "compression"), -1.0),
}
"""How the lanes of a region agree on a number of a trailer: on the largest (1) or smallest (-1). Other numbers may differ."""


class LaneLink(FixedMembers):
    """A link for one rank of a sharded region (FSDP2): it exchanges its shards with the same rank of every other region.

    Decisions need numbers that are equal in all lanes: norms of whole tensors, and trailers. The region's own process group
    settles both with small collective calls, on tensors of `device` (a GPU under NCCL). Every rank waits for the same transfers
    in the same order.
    """

    def __init__(
        self,
        link: Link,
        lane: int,
        num_lanes: int,
        device: torch.device,
        group: RegionGroup | None = None,
    ) -> None:
        self.region, self.num_regions = link.region, link.num_regions
        self.lane, self.num_lanes = lane, num_lanes
        self.timing = link.timing
        self.agreement: StopAgreement | None = None
        self._link = link
        self._device, self._group = device, group

    @property
    def awaits(self) -> int | None:
        return self._link.awaits

    def mean(self, request: MeanRequest) -> Handle:
        return _LaneHandle(self, self._link.mean(request))

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
        return call(self._link) if self._group is None else self._group.lead(lambda: call(self._link), what)

    def leave_note(self, reason: str) -> None:
        self._link.leave_note(reason)

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        return self._link.note_of(region, wait_s)

    def close(self, reason: str | None = None) -> None:
        self._link.close(reason)

    def agree(self, arrival: Arrival) -> Arrival:
        """The arrival with trailers that are equal in all lanes, and with the bytes of all lanes."""
        names = Trailer._fields
        rows = _numbers([list(trailer) for trailer in arrival.trailers])
        signs = _numbers([_SETTLED.get(name, 0.0) for name in names])
        rows = torch.where(rows.isnan(), -math.inf, rows)  # a loss that is unknown: no maximum is one with it
        settled = self._reduce(torch.where(signs == 0, 0.0, rows * signs).flatten(), dist.ReduceOp.MAX)
        rows = torch.where(signs == 0, rows, settled.view_as(rows) * signs)
        rows = torch.where(rows == -math.inf, math.nan, rows)
        trailers = tuple(from_numbers(Trailer, dict(zip(names, row, strict=True))) for row in rows.tolist())
        sums = self.total(_numbers([arrival.bytes_sent, arrival.square])).tolist()
        return arrival._replace(trailers=trailers, bytes_sent=int(sums[0]), square=sums[1])

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved, operation)
        return moved.to(values.device)


class _LaneHandle:
    def __init__(self, link: LaneLink, handle: Handle) -> None:
        self._link, self._handle = link, handle
        self._arrival: Arrival | None = None

    def wait(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._link.agree(self._handle.wait())
        return self._arrival


def _numbers(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=HOST)
