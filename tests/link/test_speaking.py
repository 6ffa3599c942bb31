"""The ranks of a region speak with the coordinator over their leader: with real sockets between them."""

from __future__ import annotations

import socket
import time
from typing import Any, cast

import pytest

from hf_cocodc.coordinator.client import Client
from hf_cocodc.coordinator.messages import Ask, Back, Beat, Bye, Note, Paired, Ready, Report, Welcome
from hf_cocodc.link import speaking
from hf_cocodc.link.speaking import LeaderClient, RankClient, lines_of
from hf_cocodc.link.voice import LEADER, AllHold, Holds, RankEnded
from hf_cocodc.net.members import Member
from hf_cocodc.net.port import TOKEN_BYTES, Port
from tests.link.memory import wait_until
from tests.link.ranks import on_ranks

RANKS = 3
ME, OTHER = Member(0, 1), Member(1, 2)
WELCOME = Welcome(run="r", generation=(1, "a"), me=ME, joins=False, members=())


class Coordinated:
    """A client whose coordinator is the test."""

    def __init__(self) -> None:
        self.welcome, self.me, self.host = WELCOME, ME, "h"
        self.sent: list[Any] = []
        self.bye: Bye | None = None

    def start(self, on: Any, beat: Any, back: Any, away: Any = None) -> None:
        self.say, self.beat, self.away = on, beat, away

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self, bye: Bye | None = None) -> None:
        self.bye = bye


class Region:
    """Three ranks. `heard`: by rank, what its link has heard."""

    def __init__(self) -> None:
        self.coordinator = Coordinated()
        found = on_ranks(RANKS, lambda group: (group.rank, lines_of(group)))
        self.lines = dict(each.result() for each in found)
        self.heard: list[list[Any]] = [[] for _ in range(RANKS)]
        self.aways: list[int] = []
        client = cast(Client, self.coordinator)
        self.clients: list[Any] = [LeaderClient(client, self.lines[LEADER])]
        self.clients += [RankClient(WELCOME, "h", self.lines[rank][LEADER]) for rank in range(1, RANKS)]
        for rank, each in enumerate(self.clients):
            waits = Beat(step=rank, op=1, awaits=1, waited_s=float(rank))
            each.start(
                self.heard[rank].append, lambda w=waits: w, _no_back, lambda r=rank: self.aways.append(r)
            )

    def all_hear(self, message: Any) -> None:
        wait_until(lambda: all(message in heard for heard in self.heard))


def _no_back() -> Back:
    raise AssertionError("the leader's alone")


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(speaking, "_BEAT_S", 0.02)
    found = Region()
    yield found
    for each in found.clients:
        each.close(Bye(how="finished"))
    for lines in found.lines.values():
        for line in lines.values():
            wait_until(lambda line=line: line._socket.fileno() == -1)  # type: ignore[misc]


def test_all_ranks_hear_the_coordinator_and_it_hears_one_voice(region: Region) -> None:
    coordinator = region.coordinator
    coordinator.say(Ask(number=0))
    region.all_hear(Ask(number=0))
    for rank, client in enumerate(region.clients):
        client.send(Holds(number=1, losses=0))
        client.send(Paired(member=OTHER))
        client.send(Ready())
        client.send(Report(number=0, member=ME, first=1, done=rank, has=False))
    wait_until(lambda: len(coordinator.sent) == 3)
    assert {type(each) for each in coordinator.sent} == {Paired, Ready, Report}
    assert [each.done for each in coordinator.sent if isinstance(each, Report)] == [RANKS - 1]
    wait_until(lambda: coordinator.beat().waited_s == RANKS - 1.0)
    assert coordinator.beat().step == 0, "the leader's"
    coordinator.away()
    wait_until(lambda: sorted(region.aways) == [0, 1, 2])


def test_a_result_that_all_ranks_hold_completes(region: Region) -> None:
    for client in region.clients:
        client.send(Holds(number=1, losses=0))
    region.all_hear(AllHold(number=1, losses=0))


def test_all_hear_of_the_end_of_a_rank(region: Region) -> None:
    """Without a word, or in an error; one that has ended well keeps nobody from going on."""
    region.clients[1].close(Bye(how="finished"))
    region.clients[2].send(Note(text="out of memory"))
    region.lines[2][LEADER].close()
    wait_until(lambda: any(isinstance(each, RankEnded) for each in region.heard[0]))
    [ended] = [each for each in region.heard[0] if isinstance(each, RankEnded)]
    assert ended.why == "rank 2 of this region has ended. Look at its last output."
    assert region.coordinator.sent == [Note(text="out of memory")]


@pytest.mark.parametrize(("how", "is_told"), [("finished", False), ("failed", True)])
def test_ranks_hear_of_the_end_of_their_leader(how: str, is_told: bool, region: Region) -> None:
    region.clients[0].close(Bye(how=how))
    assert region.coordinator.bye == Bye(how=how)
    if is_told:
        ended = RankEnded(why="the leader (rank 0) of this region has ended. Look at its last output.")
        wait_until(lambda: all(ended in region.heard[rank] for rank in (1, 2)))
    else:
        time.sleep(0.1)
        assert not region.heard[1] and not region.heard[2]


def test_strangers_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, and one that knows no token."""
    ports = []

    class Visited(Port):
        def __init__(self, host: str) -> None:
            super().__init__(host)
            ports.extend(socket.create_connection(("127.0.0.1", self.number)) for _ in range(2))
            ports[-1].sendall(b"\0" * TOKEN_BYTES + b"\1")

    monkeypatch.setattr(speaking, "Port", Visited)
    lines = [line for each in on_ranks(2, lines_of) for line in each.result().values()]
    assert len(lines) == 2
    for line in lines:
        line.send(Ready())
        line.close()
    for line in lines:
        assert (line.receive(), line.receive()) == (Ready(), None)
    for port in ports:
        port.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "_MEET_S", 0.3)

    def refuse(*given: Any, **more: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    leader, other = on_ranks(2, lines_of)
    assert "rank 1 of this region has not reached its leader" in str(leader.exception())
    assert "cannot reach its leader (rank 0)" in str(other.exception())
