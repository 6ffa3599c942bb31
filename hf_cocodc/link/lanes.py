"""The link of one rank of a sharded region (FSDP2): every rank has its own lane."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DonorLost, LeftBehind, LinkError, RunOver
from ..parts.tensors.memory import HOST
from .base import Arrival, Awaited, Handle, Link, MeanRequest
from .group import RegionGroup
from .log import Marker
from .records import Record, Trailer, in_order
from .tcp import TcpLink
from .voice import RankEnded

T = TypeVar("T")

_SETTLED = {
    **dict.fromkeys(("step_time_s", "sync_time_s", "ending", "round_lr", "norm", "loss"), 1.0),
    **dict.fromkeys(("weight", "saved_at", "compression", "knows"), -1.0),
}
"""How the lanes of a region agree on a number of a trailer: on the largest (1) or smallest (-1). Other numbers may differ."""


_FAILURES = LinkError, DonorLost, LeftBehind, RunOver


class LaneLink(Link):
    """A link for one rank of a sharded region (FSDP2): it exchanges its shards with the same rank of every other region.

    Decisions need numbers that are equal in all lanes: norms of whole tensors, trailers, and who takes part. The region's own
    process group settles them with small collective calls, on tensors of `device` (a GPU under NCCL). Every rank waits for the
    same transfers in the same order.
    """

    members: tuple[int, ...] = ()

    def __init__(
        self,
        link: Link,
        lane: int,
        num_lanes: int,
        device: torch.device,
        group: RegionGroup | None = None,
    ) -> None:
        self.region, self.is_elastic, self.session = link.region, link.is_elastic, link.session
        self.lane, self.num_lanes = lane, num_lanes
        self.timing, self.members = link.timing, link.members
        self._link: Link = link
        self._device, self._group = device, group
        self._may_lose = isinstance(link, TcpLink)

    def mean(self, request: MeanRequest) -> Handle:
        handle = self._link.mean(request)
        return Awaited(lambda: self.agree(self.all_ranks(handle.wait)))

    def total(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def tick(self, inner_step: int, work: float = 1.0) -> None:
        """Members come and leave at the same step in all lanes."""
        if not isinstance(self._link, TcpLink):
            self._link.tick(inner_step, work)
            return
        self._link.switched = ((), ())
        self._link.tick(inner_step, work)
        joined, left = self._link.switched
        self.members = tuple(sorted({*self.members, *joined} - {*left}))

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        self.all_ranks(lambda: self._link.broadcast(flat, what, source))

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        records = self.all_ranks(lambda: self._link.gather(record, what))
        if self._may_lose:
            self._settle_members(self._reduce(self._gone(), dist.ReduceOp.MAX))
        return records

    def lead(self, call: Callable[[Link], T], what: str) -> T | None:
        link, group = self._link, self._group
        if group is None:
            return link.lead(call, what)
        result = group.lead(lambda: link.lead(call, what), what, lambda result: getattr(link, "num_calls", 0))
        if group.rank and isinstance(link, TcpLink) and link.num_calls < group.heard:
            link.led(group.heard)
        return result

    def all_ranks(self, call: Callable[[], T]) -> T:
        """What a call over this rank's lane returns, if it fails in no rank: where a region may come back, all ranks do.

        Raises what it has raised here, or an error of the same kind as in another rank.
        """
        if not self._may_lose:
            return call()
        failed: LinkError | None = None
        try:
            result = call()
        except LinkError as error:
            failed = error
            if isinstance(self._link, TcpLink) and not isinstance(error, LeftBehind | DonorLost | RunOver):
                self._link.send(RankEnded(why=str(error)))
        worst = [index for index, kind in enumerate(_FAILURES, 1) if isinstance(failed, kind)][-1:] or [0]
        [of_all] = self._reduce(_numbers(worst), dist.ReduceOp.MAX).tolist()
        if failed is not None:
            raise failed
        if of_all:
            raise _FAILURES[int(of_all) - 1](
                f"another rank of region {self.region} says why (look at its output)."
            )
        return result

    def regroup(self, known: int) -> tuple[int, ...]:
        """See `TcpLink.regroup`."""
        assert isinstance(self._link, TcpLink)
        self.members = self._link.regroup(known)
        return self.members

    def apply(self, marker: Marker) -> bool:
        """See `TcpLink.apply`: in all ranks."""
        link = self._link
        assert isinstance(link, TcpLink)
        is_in = self.all_ranks(lambda: link.apply(marker))
        self.members = tuple(sorted({self.region, *(member.region for member in marker.members)}))
        return is_in

    def begin_again(self) -> None:
        """The region is a newcomer now."""
        self.members = (self.region,)

    def agree(self, arrival: Arrival) -> Arrival:
        """The arrival with trailers that are equal in all lanes, and with the bytes of all lanes."""
        rows = _numbers([list(trailer) for trailer in arrival.trailers])
        signs = _numbers([_SETTLED.get(name, 0.0) for name in Trailer._fields])
        rows = torch.where(rows.isnan(), -math.inf, rows)  # a loss that is unknown: no maximum is one with it
        own = torch.cat([torch.where(signs == 0, 0.0, rows * signs).flatten(), self._gone()])
        settled, gone = self._reduce(own, dist.ReduceOp.MAX).split([rows.numel(), len(self.members)])
        self._settle_members(gone)
        rows = torch.where(signs == 0, rows, settled.view_as(rows) * signs)
        rows = torch.where(rows == -math.inf, math.nan, rows)
        trailers = tuple(in_order(Trailer, row) for row in rows.tolist())
        sums = self.total(_numbers([arrival.bytes_sent, arrival.square])).tolist()
        return arrival._replace(trailers=trailers, bytes_sent=int(sums[0]), square=sums[1])

    def _gone(self) -> Tensor:
        """For each member, whether it is lost, as far as this rank knows."""
        now = self._link.members
        return _numbers([float(member not in now) for member in self.members])

    def _settle_members(self, gone: Tensor) -> None:
        """All ranks know a loss from the same call on: some hear of it earlier."""
        losses = zip(self.members, gone.tolist(), strict=True)
        self.members = tuple(member for member, is_gone in losses if not is_gone or member == self.region)

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        moved = values.to(self._device, copy=True)
        dist.all_reduce(moved, operation)
        return moved.to(values.device)


def _numbers(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=HOST)
