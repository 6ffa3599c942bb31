"""The link of a region whose ranks hold the same parameters (DDP): the leader talks to other regions, all ranks hear."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Arrival, Handle, Link, MeanRequest
from .group import RegionGroup
from .log import Marker
from .records import Record, from_numbers
from .stopping import StopAgreement

T = TypeVar("T")


class _News(NamedTuple):
    """What the leader tells of the run with each call."""

    members: Sequence[int]
    parties: Sequence[int]
    takes_part: bool


class SharedLink:
    """A link for a region of several ranks that hold the same parameters (DDP): the leader talks, and tells the others.

    All ranks call `lead`, `gather` and `broadcast` together. Transfers are the leader's alone: its engine has `leader_link`.

    Args:
        leader_link: None on all ranks but 0.
        device: of tensors that the region's own process group accepts (a GPU under NCCL).

    Attributes:
        heard: what `news` of the last call of `lead` has made of its result; in all ranks.
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
        self.region, self.device = region, device
        self.is_elastic = is_elastic
        self.lane, self.num_lanes = 0, 1
        self.timing = "measured"
        self.agreement: StopAgreement | None = None
        self.heard: Any = None
        self._count, everybody = num_regions, range(num_regions)
        self._news = _News(everybody, everybody, takes_part=True)
        self._link, self._group = leader_link, group

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._news.members)

    @property
    def num_regions(self) -> int:
        return len(self._news.members)

    @property
    def most_regions(self) -> int:
        return self._count if self._link is None else self._link.most_regions

    @property
    def parties(self) -> tuple[int, ...]:
        return tuple(self._news.parties)

    @property
    def knows(self) -> int:
        return 0 if self._link is None else self._link.knows

    def takes_part(self) -> bool:
        return self._news.takes_part

    @property
    def awaits(self) -> int | None:
        return None if self._link is None else self._link.awaits

    def mean(self, request: MeanRequest) -> Handle:
        return self._own.mean(request)

    def landed(self, arrival: Arrival) -> None:
        self._own.landed(arrival)

    def total(self, values: Tensor) -> Tensor:
        return values

    def clock(self) -> float:
        return time.perf_counter()

    def tick(self, inner_step: int) -> None:
        if self._link is not None:
            self._link.tick(inner_step)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        self.lead(lambda link: link.broadcast(flat, what, source), what)
        flat.copy_(self.share(flat.to(self.device)))

    def count_broadcasts(self) -> int:
        return 0 if self._link is None else self._link.count_broadcasts()

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        kind = type(record)
        self.lead(lambda link: link.gather(record, what), what, lambda records: list(map(list, records)))
        names: Sequence[str] = kind._fields  # type: ignore[attr-defined]
        return tuple(from_numbers(kind, dict(zip(names, each, strict=True))) for each in self.heard)

    def regroup(self, known: int) -> tuple[int, ...]:
        """See `TcpLink.regroup`."""
        self.lead(
            lambda link: link.regroup(known),  # type: ignore[attr-defined]
            "who comes in or leaves",
            list,
        )
        return tuple(self.heard)

    def apply(self, marker: Marker) -> bool:
        """See `TcpLink.apply`."""
        self.lead(lambda link: link.apply(marker), "the way in", bool)  # type: ignore[attr-defined]
        return bool(self.heard)

    def leave_note(self, reason: str) -> None:
        if self._link is not None:
            self._link.leave_note(reason)

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        return None if self._link is None else self._link.note_of(region, wait_s)

    def close(self, reason: str | None = None) -> None:
        if self._link is not None:
            self._link.close(reason)

    def lead(
        self, call: Callable[[Link], T], what: str, news: Callable[[T], Any] = lambda result: None
    ) -> T | None:
        """Let the leader make a call that waits for other regions; returns None on the other ranks, which wait, too.

        `news`: what the leader tells the others of the result (JSON).
        """

        def tell(result: T) -> Any:
            link = self._own
            return [*map(list, (link.members, link.parties)), link.takes_part()], news(result)

        result = self._group.lead(lambda: call(self._own), what, tell)
        run, self.heard = self._group.heard
        self._news = _News(*run)
        return result

    def share(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor of `device` with what the leader has in it, in all ranks; returns it."""
        dist.broadcast(tensor, src=0)
        return tensor

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader."""
        return self._link is not None

    @property
    def _own(self) -> Link:
        assert self._link is not None, "only the leader reaches other regions"
        return self._link
