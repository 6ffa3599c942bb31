"""The link of a region whose ranks hold the same parameters (DDP): the leader shares its arrivals."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..parts.codecs.base import Result
from ..parts.tensors.memory import HOST, Home
from .base import Arrival, Handle, Link, MeanRequest
from .group import RegionGroup
from .records import ROW, Record, Trailer, from_row, to_row
from .stopping import StopAgreement

T = TypeVar("T")


class _News(NamedTuple):
    """What the leader tells with each call of an elastic run. `of_mean`, `changes`: of the transfer that has ended, if any."""

    members: Sequence[int]
    parties: Sequence[int]
    takes_part: bool
    of_mean: Sequence[int]
    changes: int


class SharedLink:
    """A link for a region of several ranks that hold the same parameters (DDP): the leader talks, all ranks receive.

    `leader_link` is None on all ranks but 0. The region's own process group accepts tensors on `device` (a GPU under NCCL).
    """

    def __init__(
        self,
        leader_link: Link | None,
        region: int,
        num_regions: int,
        device: torch.device,
        group: RegionGroup,
        is_elastic: bool = False,
    ) -> None:
        self.region = region
        self.is_elastic = is_elastic
        everybody = range(num_regions)
        self._news = _News(everybody, everybody, takes_part=True, of_mean=everybody, changes=-1)
        self.lane, self.num_lanes = 0, 1
        self.replicas = True
        self.timing = "measured"
        self._link = leader_link
        self.agreement: StopAgreement | None = None
        self._device = device
        self._group = group

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._news.members)

    @property
    def num_regions(self) -> int:
        return len(self._news.members)

    @property
    def most_regions(self) -> int:
        return self.num_regions if self._link is None else self._link.most_regions

    @property
    def parties(self) -> tuple[int, ...]:
        return tuple(self._news.parties)

    @property
    def knows(self) -> int:
        return 0 if self._link is None else self._link.knows

    def takes_part(self) -> bool:
        if self.is_elastic:
            self.lead(lambda link: None, "whether it takes part")
        return self._news.takes_part

    def landed(self, arrival: Arrival) -> None:
        if self._link is not None:
            self._link.landed(arrival)

    @property
    def awaits(self) -> int | None:
        return None if self._link is None else self._link.awaits

    def mean(self, request: MeanRequest) -> Handle:
        handle = None if self._link is None else self._link.mean(request)
        return _SharedHandle(self, handle, request)

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
        return self.share_records(type(record), records or (), self.parties)

    def leave_note(self, reason: str) -> None:
        if self._link is not None:
            self._link.leave_note(reason)

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        return None if self._link is None else self._link.note_of(region, wait_s)

    def close(self, reason: str | None = None) -> None:
        if self._link is not None:
            self._link.close(reason)

    def lead(self, call: Callable[[Link], T], what: str) -> T | None:
        """Let the leader make a call that waits for other regions; returns None on the other ranks, which wait, too."""

        def on_the_leader() -> T:
            assert self._link is not None
            return call(self._link)

        if not self.is_elastic:
            return self._group.lead(on_the_leader, what)
        result = self._group.lead(on_the_leader, what, self._tell)
        self._news = _News(*self._group.heard)
        return result

    def _tell(self, result: Any) -> _News:
        """On the leader: what the other ranks must know after a call with this result."""
        assert self._link is not None
        now = self._link.members, self._link.parties, self._link.takes_part()
        is_mean = isinstance(result, Arrival)
        return _News(*now, *(result.members, result.changes) if is_mean else ((), -1))

    def share(self, tensor: Tensor) -> Tensor:
        """The leader's `tensor`, on every rank of the region."""
        return self._broadcast(tensor.to(self._device)).to(tensor.device)

    def hand_out(self, mean: Tensor) -> None:
        """On the leader: give the mean to every rank of the region."""
        self._broadcast(mean.to(self._device))

    def receive(self, numel: int, home: Home) -> Tensor:
        """On the other ranks: the mean that the leader hands out."""
        return self._broadcast(torch.empty(numel, dtype=torch.float32, device=self._device)).to(home.rest)

    def share_records(
        self, kind: type[Record], records: Sequence[Record], regions: Sequence[int]
    ) -> tuple[Record, ...]:
        """The leader's records, one for each of these regions, on every rank."""
        rows = torch.zeros(len(regions), ROW, dtype=torch.float64, device=HOST)
        for row, record in zip(rows, records, strict=False):  # the other ranks have none
            row.copy_(to_row(record))
        rows_by_region = zip(regions, self.share(rows), strict=True)
        return tuple(from_row(kind, row, region) for region, row in rows_by_region)

    @property
    def of_mean(self) -> tuple[tuple[int, ...], int]:
        """Members and changes of the transfer that has just ended."""
        return tuple(self._news.of_mean), self._news.changes

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0)
        return tensor


class _SharedHandle:
    def __init__(self, shared: SharedLink, handle: Handle | None, request: MeanRequest) -> None:
        self._shared, self._handle = shared, handle
        self._numel, self._what, self._home = request.numel, request.what, request.home
        self._arrival: Arrival | None = None

    def wait(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._receive()
        return self._arrival

    def _receive(self) -> Arrival:
        arrival = self._shared.lead(lambda _: self._on_the_leader(), self._what)
        members, changes = self._shared.of_mean
        if arrival is not None:
            self._shared.hand_out(arrival.result.mean)
            self._shared.share(torch.tensor([arrival.square], dtype=torch.float64, device=HOST))
            self._shared.share_records(Trailer, arrival.trailers, members)
            return arrival
        mean = self._shared.receive(self._numel, self._home)
        square = float(self._shared.share(torch.empty(1, dtype=torch.float64, device=HOST)))
        trailers = self._shared.share_records(Trailer, (), members)
        return Arrival(Result(mean, lambda: mean, {}), trailers, 0, 0.0, square, members, changes)

    def _on_the_leader(self) -> Arrival:
        assert self._handle is not None
        return self._handle.wait()
