"""Serves callers that have proven themselves: hears them in turns, and writes what the rules send."""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..errors import LinkError, short
from ..net.channel import keep_alive, line_of, object_of, put
from ..net.keys import Keys
from .caller import end_tasks
from .entrance import Entrance, key_id
from .messages import (
    Alive,
    Back,
    FromCommand,
    Give,
    Hello,
    Pull,
    Refuse,
    ToRegion,
    from_line,
)
from .pulls import Pulls
from .runs import Hosted, Runs
from .state import State

logger = logging.getLogger(__name__)

_TICK_S = 0.2
ALIVE_S = 1.0
"""Seconds between two signs of life that a coordinator gives its callers."""
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
    """What a run may say (a token bucket). While it has said too much, its connections are not heard."""

    left: float = _BURST
    at: float = field(default_factory=time.monotonic)

    @property
    def is_spent(self) -> bool:
        if self.left < 1:
            now = time.monotonic()
            self.left, self.at = min(_BURST, self.left + _RATE * (now - self.at)), now
        return self.left < 1


@dataclass(eq=False)
class _Connection:
    """A caller that has proven itself. `greets`: its next message is its first. `gives`: for which caller all else is that it
    sends.
    """

    who: int
    writer: asyncio.StreamWriter
    key: str
    allowance: _Allowance
    task: "asyncio.Task[None]"
    purpose: str = ""
    name: str = ""
    hosted: Hosted | None = None
    greets: bool = True
    gives: str = ""
    num_bad: int = 0

    @property
    def transport(self) -> asyncio.WriteTransport:
        return self.writer.transport


class Coordinator:
    """Serves callers in the loop's thread, until `close`. Without `secrets`, callers must have none.

    `fail` is called with the error if the state file cannot be written.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        secrets: Sequence[Keys],
        state: State | None,
        say: Callable[[str], None],
        fail: Callable[[OSError], None],
        alive_s: float,
    ) -> None:
        self._loop, self._say, self._alive_s = loop, say, alive_s
        self._numbers = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        self._allowances: dict[tuple[str, str], _Allowance] = {}
        self._writer = ThreadPoolExecutor(1, "hf_cocodc-writing")
        self._runs = Runs(self._send, say, fail, self._end, self._later, state)
        self._pulls = Pulls(self._send)
        self._line_of: tuple[Any, bytes] = (None, b"")
        by_id = {key_id(keys): keys for keys in secrets}
        self._entrance = Entrance(loop, listener, by_id, self._adopt, say)
        self._alive = line_of(Alive())
        self._alive_at = self._expire_at = loop.time()
        self._timing = loop.create_task(self._keep_time())
        self._is_closed = False

    def _later(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """See `Runs`: one thread writes the file, for a slow disk must not hold other runs."""
        writing = self._loop.run_in_executor(self._writer, work)
        writing.add_done_callback(lambda written: done(written.exception()))

    @property
    def num_callers(self) -> int:
        return len(self._connections)

    async def close(self) -> None:
        self._writer.shutdown()
        self._is_closed = True
        await end_tasks()

    async def _keep_time(self) -> None:
        while True:
            # a process that stood still hears what has come before it judges by the clock: tasks wake in the order of events
            await asyncio.sleep(_TICK_S)
            try:
                self._tick()
            except Exception:
                logger.exception("the coordinator goes on")

    def _tick(self) -> None:
        now = self._loop.time()
        self._runs.tick()
        self._pulls.look_after(now)
        self._entrance.look_after()
        if now >= self._alive_at:
            self._alive_at = now + self._alive_s
            for connection in list(self._connections.values()):
                if connection.purpose == "region" or self._pulls.waits(connection.who):
                    self._write(connection, self._alive)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_S
            self._runs.expire()
            used = {id(each.allowance) for each in self._connections.values()}
            self._allowances = {k: each for k, each in self._allowances.items() if id(each) in used}

    # -- connections

    async def _adopt(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        """Serve a caller that has proven itself until its connection ends."""
        keep_alive(writer.get_extra_info("socket"))
        task = asyncio.current_task()
        assert task is not None
        who = next(self._numbers)
        connection = _Connection(who, writer, key, self._allowance(key, ""), task)
        self._connections[who] = connection
        is_cut = True
        try:
            await self._hear_all(connection, reader)
        except asyncio.IncompleteReadError:
            is_cut = False
        except OSError as error:
            is_cut = not isinstance(error, BrokenPipeError)
        except (asyncio.CancelledError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.transport.abort()
            del self._connections[who]
            self._pulls.ended(who)
        if connection.hosted is not None and not self._is_closed:
            self._runs.ended(connection.hosted, who, is_cut)

    async def _hear_all(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        for number in itertools.count(1):
            line = await reader.readuntil()
            while connection.allowance.is_spent:
                await asyncio.sleep(_TICK_S)
            connection.allowance.left -= 1 + len(line) / _COUNTS_AS_ONE
            try:
                self._hear(connection, line)
            except Exception:
                logger.exception("run %r: a message cannot be heeded", short(connection.name))
            if connection.gives:
                await self._pulls.pass_on(connection.gives, reader)
                return
            if number % _PORTION == 0:
                await asyncio.sleep(0)

    def _allowance(self, key: str, name: str) -> _Allowance:
        return self._allowances.setdefault((key, name), _Allowance())

    def _write(self, connection: _Connection, line: bytes) -> None:
        if not put(connection.transport, line):
            connection.task.cancel()

    # -- messages

    def _send(self, to: int, message: ToRegion) -> None:
        connection = self._connections.get(to)
        if connection is None:
            return
        if self._line_of[0] is not message:  # many get the same
            self._line_of = message, line_of(message, 1 << 30)
        self._write(connection, self._line_of[1])
        if isinstance(message, Refuse):  # the other end takes what it was told, and closes the connection
            self._loop.call_later(_FAREWELL_S, connection.task.cancel)

    def _end(self, who: int) -> None:
        """Close a connection soon: a step of its run may be in hand."""
        if who in self._connections:
            self._connections[who].task.cancel()

    def _hear(self, connection: _Connection, line: bytes) -> None:
        match connection.purpose:
            case "":
                self._hear_purpose(connection, line)
            case "region" | "command":
                self._hear_message(connection, line)
            case "echo":  # whoever asks learns whether large messages pass
                self._write(connection, line)

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
                self._write(connection, line_of({"runs": runs}, 1 << 30))
            case "echo":
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
        is_command = isinstance(message, FromCommand | Pull | Give)
        if is_command != (connection.purpose == "command") or (
            is_first != connection.greets and not is_command
        ):
            self._note_bad(connection, f"{type(message).__name__} at the wrong time")
            return
        connection.greets = False
        match message:
            case Pull():
                self._pulls.come(connection.who, hosted, connection.writer, self._loop.time())
            case Give(pull=name):
                connection.gives = name
            case _:
                self._runs.came(hosted, connection.who, message)

    def _note_bad(self, connection: _Connection, what: str) -> None:
        """A message is none of ours. A connection that sends many is closed."""
        connection.num_bad += 1
        if connection.num_bad == 1:
            self._say(f"run {short(connection.name)!r}: ignored a message: {short(what, 200)}")
        if connection.num_bad >= _MOST_BAD:
            connection.task.cancel()
