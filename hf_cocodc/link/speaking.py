"""How the ranks of a region whose shards differ speak with the coordinator: over their leader, who has the one connection to it.

The ranks' links have a `RankClient`, the leader's a `LeaderClient`; both look like the client of a region of one rank. What is
passed on is in `voice`. A rank is connected to its leader by a socket, and hears of its end as the leader hears of the rank's.
"""

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..coordinator.client import Client
from ..coordinator.messages import AnyMessage, Back, Beat, Bye, ControlMessage, Welcome, from_line
from ..errors import LinkError
from ..net.channel import line_of
from ..net.port import TOKEN_BYTES, Port, dial
from .group import RegionGroup
from .voice import (
    LEADER,
    AllHold,
    Effect,
    Holds,
    RankEnded,
    ToCoordinator,
    ToRank,
    Voice,
    beat_of_all_ranks,
    heard,
    said,
)

logger = logging.getLogger(__name__)

_MEET_S = 60.0
_BEAT_S = 1.0
_END_S = 2.0


class _Away(ControlMessage, frozen=True):
    """The connection to the coordinator has gone."""


_decoder = msgspec.json.Decoder(AnyMessage | Holds | AllHold | RankEnded | _Away)


class RankLine:
    """Messages between two ranks, a JSON object a line. Any thread may send; one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._lines = connected, connected.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Does nothing once the other end has gone: whoever receives hears of that."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(line_of(message, 1 << 30))

    def receive(self) -> Any:
        """The next message; None, and nothing more can be said, once the other end has gone."""
        with contextlib.suppress(OSError, ValueError, LinkError):
            line = self._lines.readline()
            if line.endswith(b"\n"):
                return from_line(line, _decoder)
        self._lines.close()
        self._socket.close()
        return None

    def close(self) -> None:
        """Say nothing more. What the other end says may still be received, to its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def lines_of(group: RegionGroup) -> dict[int, RankLine]:
    """On the leader, a line to each other rank, by rank; on another one, the line to the leader. A collective call.

    Raises LinkError, in all ranks, if one of them cannot reach the leader.
    """
    own, port = None, None
    came: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    if group.rank == LEADER:
        port, tokens = Port(""), [secrets.token_bytes(TOKEN_BYTES) for _ in range(group.num_ranks)]
        for rank, token in enumerate(tokens):
            port.expect(token, lambda connection, _, rank=rank: came.put((rank, connection)))  # type: ignore[misc]
        own = [[token.hex() for token in tokens], port.number, socket.gethostname()]
    told, number, host = group.say(LEADER, own, "where the leader listens")

    def meet() -> dict[int, RankLine]:
        if group.rank == LEADER:
            return _accept(came, group.num_ranks)
        hosts, token = [os.environ.get("MASTER_ADDR", ""), host], bytes.fromhex(told[group.rank])
        return {LEADER: _call(hosts, number, token, group.rank)}

    with contextlib.nullcontext() if port is None else contextlib.closing(port):
        return group.together(meet, "the connections to the leader")


def _accept(came: "queue.SimpleQueue[tuple[int, socket.socket]]", num_ranks: int) -> dict[int, RankLine]:
    lines: dict[int, RankLine] = {}
    until = time.monotonic() + _MEET_S
    while missing := sorted({*range(1, num_ranks)} - lines.keys()):
        try:
            rank, connection = came.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty as error:
            raise LinkError(
                f"rank {missing[0]} of this region has not reached its leader (rank 0)."
            ) from error
        lines[rank] = RankLine(connection)
    return lines


def _call(hosts: list[str], port: int, token: bytes, rank: int) -> RankLine:
    failure: OSError | None = None
    for host in filter(None, hosts):
        try:
            return RankLine(dial(host, port, token, 0, _MEET_S / 2))
        except OSError as error:
            failure = error
    raise LinkError(
        f"rank {rank} of this region cannot reach its leader (rank 0) at port {port} of {' or '.join(hosts)}: {failure}. Set "
        "MASTER_ADDR, in all ranks, to an address at which they reach rank 0."
    )


class LeaderClient:
    """The leader's client: what a `Client` says goes to all ranks, and what they say becomes one voice.

    Args:
        client: has met the other regions.
        lines: to the other ranks.
    """

    def __init__(self, client: Client, lines: dict[int, RankLine]) -> None:
        self._client, self._lines = client, lines
        self.welcome, self.me, self.host = client.welcome, client.me, client.host
        self._voice = Voice(num_ranks=len(lines) + 1, losses=client.welcome.losses)
        self._speaking = threading.Lock()  # what a rank hears comes in one order
        self._beats: dict[int, Beat] = {}
        self._ended: set[int] = set()
        self._is_closing = False
        self._said: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(
        self,
        on: Callable[[Any], None],
        beat: Callable[[], Beat],
        back: Callable[[], Back],
        away: Callable[[], None] = lambda: None,
    ) -> None:
        """See `Client.start`. `on` is also called in a thread of this object."""

        def tell_away() -> None:
            self._tell_all(_Away())
            away()

        self._on, self._beat = on, beat
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-lead", daemon=True)
        self._thread.start()
        for rank, line in self._lines.items():
            threading.Thread(
                target=self._listen, args=(rank, line), name="hf_cocodc-rank", daemon=True
            ).start()
        self._client.start(self._hear, self._beat_of_all, back, tell_away)

    def send(self, message: Any) -> None:
        self._said.put((LEADER, message))

    def hang_up(self, why: str) -> None:
        self._client.hang_up(why)

    def close(self, bye: Bye | None = None) -> None:
        self._is_closing = True
        self._said.put((LEADER, None))
        if self._thread is not None:
            self._thread.join(_END_S)
        self._client.close(bye)
        if bye is not None:
            self._tell_all(bye)
        for line in self._lines.values():
            line.close()

    def _listen(self, rank: int, line: RankLine) -> None:
        while (message := line.receive()) is not None:
            self._said.put((rank, message))
        self._said.put((rank, None))

    def _hear(self, message: Any) -> None:
        """Take a message of the coordinator, in the thread of the client."""
        with self._speaking:
            self._voice, effects = heard(self._voice, message)
            own = self._tell(effects)
        for each in own:
            self._on(each)

    def _work(self) -> None:
        """Take what ranks say, one by one."""
        while True:
            rank, message = self._said.get()
            if message is None and rank == LEADER:
                return
            try:
                self._take(rank, message)
            except Exception:
                logger.exception("a message of rank %d cannot be heeded", rank)

    def _take(self, rank: int, message: Any) -> None:
        match message:
            case None:
                if rank not in self._ended and not self._is_closing:
                    self._on(rank_ended(rank))
            case Beat():
                self._beats[rank] = message
            case Bye(how=how):
                if how != "failed":
                    self._ended.add(rank)
            case _:
                with self._speaking:
                    self._voice, effects = said(self._voice, rank, message)
                    own = self._tell(effects)
                for each in own:
                    self._on(each)

    def _tell(self, effects: tuple[Effect, ...]) -> list[Any]:
        """Do what is to be done for other processes; returns what this rank is to hear."""
        own = []
        for effect in effects:
            match effect:
                case ToCoordinator(message):
                    self._client.send(message)
                case ToRank(rank, message):
                    self._tell_all(message, rank)
                    if rank in (None, LEADER):
                        own.append(message)
        return own

    def _tell_all(self, message: Any, rank: int | None = None) -> None:
        for other, line in self._lines.items():
            if rank in (None, other):
                line.send(message)

    def _beat_of_all(self) -> Beat:
        return beat_of_all_ranks({**self._beats, LEADER: self._beat()})


class RankClient:
    """The client of another rank: it hears and tells the coordinator all over the leader.

    Args:
        welcome: as the leader has been welcomed.
        host: the coordinator's.
    """

    def __init__(self, welcome: Welcome, host: str, line: RankLine) -> None:
        self.welcome, self.me, self.host = welcome, welcome.me, host
        self._line = line
        self._closes = threading.Event()

    def start(
        self,
        on: Callable[[Any], None],
        beat: Callable[[], Beat],
        back: Callable[[], Back],
        away: Callable[[], None] = lambda: None,
    ) -> None:
        """See `Client.start`."""
        self._on, self._beat, self._away = on, beat, away
        for work in (self._listen, self._work):
            threading.Thread(target=work, name="hf_cocodc-rank", daemon=True).start()

    def send(self, message: Any) -> None:
        self._line.send(message)

    def hang_up(self, why: str) -> None:
        """The leader does."""

    def close(self, bye: Bye | None = None) -> None:
        if bye is not None:
            self.send(bye)
        self._closes.set()
        self._line.close()

    def _listen(self) -> None:
        self._has_ended = False
        while (message := self._line.receive()) is not None:
            try:
                self._take(message)
            except Exception:
                logger.exception("a message of the leader cannot be heeded")
        if not self._has_ended and not self._closes.is_set():
            self._on(rank_ended(LEADER))

    def _take(self, message: Any) -> None:
        match message:
            case _Away():
                self._away()
            case Bye(how=how):
                self._has_ended = how != "failed"
            case _:
                self._on(message)

    def _work(self) -> None:
        while not self._closes.wait(_BEAT_S):
            with contextlib.suppress(Exception):  # a part of a region that ends
                self.send(self._beat())


def rank_ended(rank: int) -> RankEnded:
    """What ends the calls of a region, one of whose ranks has ended."""
    whom = "the leader (rank 0)" if rank == LEADER else f"rank {rank}"
    return RankEnded(why=f"{whom} of this region has ended. Look at its last output.")


AnyClient = Client | LeaderClient | RankClient
