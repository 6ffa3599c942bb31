"""The link of a region whose ranks hold the same parameters (DDP): the leader talks to other regions, all ranks hear."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Handle, Link, MeanRequest
from .group import RegionGroup
from .log import Marker
from .records import Record, in_order

T = TypeVar("T")


class SharedLink(Link):
    """A link for a region of several ranks that hold the same parameters (DDP): the leader talks, and tells the others.

    All ranks call `lead`, `gather` and `broadcast` together. Transfers are the leader's alone: its engine has `leader_link`.

    Args:
        leader_link: None on all ranks but 0.
        device: of tensors that the region's own process group accepts (a GPU under NCCL).

    Attributes:
        heard: what `news` of the last call of `lead` has made of its result; in all ranks.
    """

    members: tuple[int, ...] = ()
    parties: tuple[int, ...] = ()

    def __init__(
        self,
        leader_link: Link | None,
        region: int,
        num_regions: int,
        device: torch.device,
        group: RegionGroup,
        is_elastic: bool = False,
    ) -> None:
        self.region, self.device, self.is_elastic = region, device, is_elastic
        self.session = None if leader_link is None else leader_link.session
        self.heard: Any = None
        self.members = self.parties = tuple(range(num_regions))
        self._most, self._takes_part = num_regions, True
        self._link, self._group = leader_link, group

    @property
    def most_regions(self) -> int:
        return self._most if self._link is None else self._link.most_regions

    def takes_part(self) -> bool:
        return self._takes_part

    def mean(self, request: MeanRequest) -> Handle:
        return self._own.mean(request)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        self.lead(lambda link: link.broadcast(flat, what, source), what)
        flat.copy_(self.share(flat.to(self.device)))

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        kind = type(record)
        self.lead(lambda link: link.gather(record, what), what, lambda records: list(map(list, records)))
        return tuple(in_order(kind, each) for each in self.heard)

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
        (members, parties, self._takes_part), self.heard = self._group.heard
        self.members, self.parties = tuple(members), tuple(parties)
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
