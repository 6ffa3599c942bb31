"""Serves callers that have proven themselves: hears them in turns, and writes what the rules send."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from ..errors import LinkError, short
from ..net.channel import Channel, keep_alive, line_of, object_of
from ..net.keys import Keys
from .caller import LONGEST_LINE
from .entrance import Entrance, Limits, key_id
from .messages import (
    Alive,
    AskLeave,
    Back,
    Claim,
    Hello,
    Refuse,
    ToRegion,
    Ways,
    Welcome,
    from_line,
)
from .runs import Hosted, Runs
from .state import StateFile

_MOST_TOLD = 256 << 10
"""Bytes of a doctor's report."""
_TICK_S = 0.2
_ALIVE_S = 1.0
_EXPIRE_S = 60.0
_PORTION = 50
"""Lines of a connection that are heard before others have their turn."""
_RATE, _BURST = 300.0, 3000.0
"""Messages a second of a run that are heard, on average, and at once."""
_COUNTS_AS_ONE = 16 << 10
"""Bytes of a message that count as one more."""
_MOST_BAD = 100
_FAREWELL_S = 5.0


@dataclass(eq=False)
class _Allowance:
    """What a run may say (a token bucket). While it has said too much, its connections are not read."""

    left: float = _BURST
    at: float = field(default_factory=time.monotonic)
    paused: "set[_Connection]" = field(default_factory=set)

    def refill(self) -> None:
        now = time.monotonic()
        self.left, self.at = min(_BURST, self.left + _RATE * (now - self.at)), now


@dataclass(eq=False)
class _Connection:
    """A caller that has proven itself. `greets`: its next message is its first; `is_due`: lines wait for the next turn."""

    who: int
    channel: Channel
    key: str
    allowance: _Allowance
    purpose: str = ""
    name: str = ""
    hosted: Hosted | None = None
    greets: bool = True
    num_bad: int = 0
    is_due: bool = False
    is_read: bool = False
    is_written: bool = False
    is_closed: bool = False


class Coordinator:
    """Serves callers in the loop's thread, until `close`. Without `secrets`, callers must have none.

    `fail` is called with the error if the state file cannot be written. `relay`: port of the relay on this machine, if any.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        secrets: Sequence[Keys],
        state: StateFile | None,
        say: Callable[[str], None],
        fail: Callable[[OSError], None],
        limits: Limits | None = None,
        relay: int | None = None,
    ) -> None:
        self._loop, self._say, self._relay = loop, say, relay
        self._numbers = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        self._allowances: dict[tuple[str, str], _Allowance] = {}
        self._writer = ThreadPoolExecutor(1, "hf_cocodc-writing")
        self._runs = Runs(self._send, say, fail, state, self._end, self._later)
        self._line_of: tuple[Any, bytes] = (None, b"")
        by_id = {key_id(keys): keys for keys in secrets}
        self._entrance = Entrance(loop, listener, by_id, limits or Limits(), self._adopt, say)
        self._alive = line_of(Alive())
        self._alive_at = self._expire_at = loop.time()
        self._timer = loop.call_later(_TICK_S, self._tick)

    def _later(self, work: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        """See `Runs`: one thread writes the file, for a slow disk must not hold other runs."""

        def written(future: "Future[None]") -> None:
            error = future.exception()
            assert error is None or isinstance(error, Exception)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(done, error)

        self._writer.submit(work).add_done_callback(written)

    def close(self) -> None:
        self._writer.shutdown()
        self._timer.cancel()
        self._entrance.close()
        for connection in list(self._connections.values()):
            self._close(connection)

    def _tick(self) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._runs.tick()
        self._entrance.look_after()
        if now >= self._alive_at:
            self._alive_at = now + _ALIVE_S
            for connection in list(self._connections.values()):
                if connection.purpose == "region":
                    self._write(connection, self._alive)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_S
            self._runs.expire()
            used = {id(each.allowance) for each in self._connections.values()}
            self._allowances = {k: each for k, each in self._allowances.items() if id(each) in used}

    # -- connections

    def _adopt(self, channel: Channel, key: str) -> None:
        """A caller has proven itself."""
        keep_alive(channel.socket)
        channel.longest = 2 * LONGEST_LINE
        connection = _Connection(next(self._numbers), channel, key, self._allowance(key, ""))
        self._connections[connection.who] = connection
        self._work(connection)

    def _allowance(self, key: str, name: str) -> _Allowance:
        return self._allowances.setdefault((key, name), _Allowance())

    def _readable(self, connection: _Connection) -> None:
        connection.channel.receive()
        self._work(connection)

    def _work(self, connection: _Connection) -> None:
        """Hear some of what has come."""
        connection.is_due = False
        channel = connection.channel
        for _ in range(_PORTION):
            if connection.is_closed or not channel.num_lines or self._is_paused(connection):
                break
            connection.allowance.left -= 1 + channel.next_bytes / _COUNTS_AS_ONE
            self._hear(connection, channel.take_line())
        if channel.ended and not channel.num_lines:
            self._close(connection)
        self._watch(connection)

    def _is_paused(self, connection: _Connection) -> bool:
        """Whether its run has said too much: then none of the run's connections is heard for a moment."""
        allowance = connection.allowance
        if allowance.left < 1:
            allowance.refill()
        if allowance.left >= 1:
            return False
        if not allowance.paused:
            self._loop.call_later(_TICK_S, self._resume, allowance)
        allowance.paused.add(connection)
        return True

    def _resume(self, allowance: _Allowance) -> None:
        paused, allowance.paused = allowance.paused, set()
        for connection in paused:
            if not connection.is_closed:
                self._work(connection)

    def _watch(self, connection: _Connection) -> None:
        """Let the loop look at what is of interest now."""
        if connection.is_closed:
            return
        channel, loop = connection.channel, self._loop
        waits = connection in connection.allowance.paused
        reads = not waits and not channel.num_lines and not channel.ended
        if reads and not connection.is_read:
            loop.add_reader(channel.socket, self._readable, connection)
        elif connection.is_read and not reads:
            loop.remove_reader(channel.socket)
        connection.is_read = reads
        if channel.num_lines and not waits and not connection.is_due:
            connection.is_due = True
            loop.call_soon(self._work, connection)
        writes = channel.unsent_since is not None and not channel.ended
        if writes and not connection.is_written:
            loop.add_writer(channel.socket, self._writable, connection)
        elif connection.is_written and not writes:
            loop.remove_writer(channel.socket)
        connection.is_written = writes

    def _writable(self, connection: _Connection) -> None:
        connection.channel.flush()
        self._after_write(connection)

    def _write(self, connection: _Connection, line: bytes) -> None:
        connection.channel.write(line)
        self._after_write(connection)

    def _after_write(self, connection: _Connection) -> None:
        if connection.channel.ended:
            # not at once: a step of its run may be in hand
            self._loop.call_soon(self._close, connection)
        self._watch(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.is_closed:
            return
        connection.is_closed = True
        connection.allowance.paused.discard(connection)
        del self._connections[connection.who]
        self._loop.remove_reader(connection.channel.socket)
        self._loop.remove_writer(connection.channel.socket)
        connection.channel.close()
        if connection.hosted is not None:
            self._runs.ended(connection.hosted, connection.who, not connection.channel.is_closed)

    # -- messages

    def _send(self, to: int, message: ToRegion) -> None:
        connection = self._connections.get(to)
        if connection is None:
            return
        if isinstance(message, Welcome):
            message = structs.replace(message, relay=self._relay)
        if self._line_of[0] is not message:  # many get the same
            self._line_of = message, line_of(message, 1 << 30)
        self._write(connection, self._line_of[1])
        if isinstance(message, Refuse) and not connection.is_closed:
            self._part(connection)

    def _part(self, connection: _Connection) -> None:
        """Let the other end take what it was told, and close the connection unless it does."""
        connection.channel.finish()
        self._loop.call_later(_FAREWELL_S, self._close, connection)

    def _end(self, who: int) -> None:
        """Close a connection soon: a step of its run may be in hand."""
        if who in self._connections:
            self._loop.call_soon(self._close, self._connections[who])

    def _hear(self, connection: _Connection, line: bytes) -> None:
        match connection.purpose:
            case "":
                self._hear_purpose(connection, line)
            case "region" | "command":
                self._hear_message(connection, line)
            case "doctor":
                self._hear_doctor(connection, line)
            case "echo":  # whoever asks learns whether large messages pass
                self._write(connection, line + b"\n")

    def _hear_purpose(self, connection: _Connection, line: bytes) -> None:
        message = object_of(line) or {}
        name, purpose = message.get("run"), message.get("for")
        if not isinstance(name, str) or len(name) > 1000:
            self._note_bad(connection, line[:200].decode(errors="replace"))
            return
        match purpose:
            case "region" | "command":
                connection.hosted = self._runs.come_in(connection.key, name, connection.who)
                connection.allowance = self._allowance(connection.key, f"run {name}")
            case "status":
                runs = self._runs.overview(connection.key, name)
                self._write(connection, line_of({"runs": runs, "relay": self._relay}, 1 << 30))
            case "doctor" | "echo":
                pass
            case _:
                self._note_bad(connection, line[:200].decode(errors="replace"))
                return
        connection.purpose, connection.name = purpose, name

    def _hear_message(self, connection: _Connection, line: bytes) -> None:
        hosted = connection.hosted
        assert hosted is not None
        try:
            message = from_line(line)
        except LinkError as error:
            self._note_bad(connection, str(error))
            return
        is_first = isinstance(message, Hello | Back)
        is_command = isinstance(message, Claim | AskLeave)
        if is_command != (connection.purpose == "command") or (
            is_first != connection.greets and not is_command
        ):
            self._note_bad(connection, f"{type(message).__name__} at the wrong time")
            return
        connection.greets = False
        if isinstance(message, Ways):
            hosted.note_ways(connection.who, message)
            return
        self._runs.came(hosted, connection.who, message)

    def _hear_doctor(self, connection: _Connection, line: bytes) -> None:
        message = object_of(line) or {}
        region, report = message.get("region"), message.get("told")
        if type(region) is not int or not isinstance(report, dict) or len(str(report)) > _MOST_TOLD:
            self._note_bad(connection, line[:200].decode(errors="replace"))
            return
        board = self._runs.on_board(connection.key, connection.name, region, report)
        answer = {"told": {str(each): content for each, content in board.items()}}
        self._write(connection, line_of(answer, 1 << 30))

    def _note_bad(self, connection: _Connection, what: str) -> None:
        """A message is none of ours. A connection that sends many is closed."""
        connection.num_bad += 1
        if connection.num_bad == 1:
            self._say(f"run {short(connection.name)!r}: ignored a message: {short(what, 200)}")
        if connection.num_bad >= _MOST_BAD:
            self._close(connection)
