"""A region of several ranks over a link whose regions come and go: all ranks know what the leader knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hf_cocodc.errors import DonorLost, LeftBehind, LinkError
from hf_cocodc.link.base import Arrival, Awaited, Link, MeanRequest, as_they_say
from hf_cocodc.link.group import RegionGroup
from hf_cocodc.link.ranks import SharedLink
from hf_cocodc.link.records import Trailer
from hf_cocodc.link.spreading import gather, spread_all
from hf_cocodc.parts.codecs.base import Result
from tests.processes.forks import TIMEOUT_S, fork, rank_env, torch_master

T = TypeVar("T")
RANKS = 3


class Told(NamedTuple):
    """A number."""

    number: int


ENDS: dict[str, Exception] = {
    "too late": LeftBehind("the others have gone on without region 2"),
    "in vain": DonorLost("region 0 sends its log no more"),
}
"""Transfers that end with an error."""


class Scripted(Link):
    """The leader's link of region 2: others come, are lost in the middle of calls that belong together, and go on without it."""

    region, knows, most_regions = 2, 7, 5
    members: tuple[int, ...] = (0, 2)
    parties: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.is_member, self.broadcasts = True, 0
        self.landings: list[Arrival] = []

    def takes_part(self) -> bool:
        return self.is_member

    def landed(self, arrival: Arrival) -> None:
        self.landings.append(arrival)

    def mean(self, parcel: MeanRequest) -> Any:
        if parcel.what in ENDS:
            return Ended(ENDS[parcel.what])
        mean = torch.full((parcel.numel,), float(sum(self.members)))
        trailers = tuple(Trailer(knows=region) for region in self.members)
        return Awaited(
            lambda: Arrival(
                Result(mean, mean.clone, {}),
                trailers,
                5,
                0.0,
                1.0,
                self.members,
                as_they_say(trailers),
                changes=4,
            )
        )

    def gather(self, record: Any, what: str) -> tuple[Any, ...]:
        self.parties = self.members
        return tuple(Told(10 * region) if isinstance(record, Told) else record for region in self.members)

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        self.broadcasts += 1
        if self.broadcasts == 2:
            self.members = tuple(region for region in self.members if region != 0)
        self.parties = self.members
        flat.view(torch.uint8).fill_(65 + (source or 0))


class Ended:
    """The handle of a transfer that ends with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> Arrival:
        raise self._error


def live(rank: int, folder: str) -> None:
    """One rank: makes the calls, and writes down what it was told."""
    dist.init_process_group("gloo")
    leader = Scripted() if rank == 0 else None
    link = SharedLink(cast(Link, leader), 2, 3, torch.device("cpu"), RegionGroup(), is_elastic=True)
    link.lead(lambda own: None, "the beginning")
    said: list[Any] = [link.takes_part(), link.members]

    def change(call: Callable[[Scripted], None]) -> None:
        link.lead(lambda found: call(cast(Scripted, found)), "a change")

    def mean(what: str) -> Any:
        """The leader's transfer, as its engine makes it, and what it tells of it."""

        def land(own: Link) -> Arrival:
            arrival = own.mean(MeanRequest(list, 3, Trailer, what)).wait()  # type: ignore[arg-type]
            own.landed(arrival)
            return arrival

        link.lead(land, what, lambda arrival: [arrival.result.mean.tolist(), list(arrival.members)])
        return *link.heard, link.members

    said.append(mean("two regions"))
    change(lambda found: setattr(found, "members", (0, 2, 3, 9)))
    said += [mean("four regions"), link.num_regions]
    said.append(list(gather(link, Told(1), "numbers").items()))
    told = spread_all(link, b"....", "texts")
    said.append({region: text.decode() for region, text in told.items()})
    change(lambda found: setattr(found, "is_member", False))
    said.append(link.takes_part())
    for what in ENDS:
        try:
            mean(what)
        except LinkError as error:
            said.append([type(error).__name__, str(error)])
    if leader is not None:
        assert len(leader.landings) == 2 and (link.knows, link.most_regions) == (7, 5)
    else:
        assert link.knows == 0
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def test_all_ranks_know_who_takes_part(tmp_path: Path) -> None:
    """Transfers and records of two, four and three regions, in processes of their own. Region 0 is lost between two calls that
    belong together: all ranks make them again. All ranks hear as well that the others have gone on without this region, or that a
    newcomer's donor is lost."""
    master, log = torch_master(), tmp_path / "log"
    ranks = [
        fork(live, rank, str(tmp_path), log=log, **rank_env(master, rank, RANKS)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, log.read_text()[-4000:]
    first, *others = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert first == [
        True,
        [0, 2],
        [[2.0] * 3, [0, 2], [0, 2]],
        [[14.0] * 3, [0, 2, 3, 9], [0, 2, 3, 9]],
        4,
        [[0, [0]], [2, [20]], [3, [30]], [9, [90]]],
        {"2": "CCCC", "3": "DDDD", "9": "JJJJ"},
        False,
        ["LeftBehind", "the others have gone on without region 2"],
        ["DonorLost", "region 0 sends its log no more"],
    ]
    assert others == [first] * (RANKS - 1)
