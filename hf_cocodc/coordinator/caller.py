"""Calls to the coordinator: asyncio streams, and a blocking connection for commands."""

import asyncio
import concurrent.futures
import contextlib
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..errors import CocodcError, InputError, LinkError, MeetingError, MeetingRefused, error_named, short
from ..net.addresses import Unreachable, is_loopback, is_url, parts_of, resolve
from ..net.channel import MAX_LINE, keep_from_forks, line_of, object_of, put
from ..net.keys import Keys, identity
from ..net.storage import StorageError
from .entrance import HERE, LONGEST_LINE, key_id, other_version, versions
from .in_storage import call_in_storage
from .messages import Refuse, from_line

_T = TypeVar("_T")
CONNECT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 2.0
"""Seconds between two attempts to connect."""
_LONGEST_ANSWER = 256 << 20
"""Bytes of a line of the coordinator, which is trusted: it may hold what every region compares."""
_EACH_S = 3.0
"""Seconds for each address of a host that has several, but the last."""
_LOOK_S = 0.2
FLUSH_S = 1.0


class ConnectionEnded(LinkError):
    """The coordinator has closed a connection, or the connection has failed."""


class NobodyAnswers(MeetingError):
    """No coordinator answers."""


class _TryAgain(Exception):
    """No coordinator answers yet."""


def error_of(refusal: Refuse) -> CocodcError:
    """The error that a refusal names."""
    return error_named(refusal.error, refusal.why, MeetingError)


class OpenCall:
    """An open connection to the coordinator, for the thread of its loop."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address, self.reader, self.writer = address, reader, writer
        thread = threading.current_thread()
        assert isinstance(thread, LoopThread)
        self._open = thread.calls
        self._open.add(self)

    def say(self, message: Any) -> None:
        """Send a message, or another object, soon. Raises InputError if it is too long."""
        try:
            line = line_of(message, LONGEST_LINE)
        except ValueError as error:
            raise InputError(f"the coordinator at {self._address} cannot be told: {error}.") from error
        if not put(self.writer.transport, line):
            self.drop()

    async def hear(self) -> bytes:
        """The next line. Raises ConnectionEnded."""
        try:
            return await self.reader.readuntil()
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise ConnectionEnded(f"the coordinator at {self._address} has closed the connection") from error

    async def finish(self) -> None:
        """Close the connection once the coordinator has taken all, or after a second. It closes its end when it has read all."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            (self.writer.write_eof if self.writer.can_write_eof() else self.writer.close)()
            await asyncio.wait_for(self._hear_out(), FLUSH_S)
        self.drop()

    async def _hear_out(self) -> None:
        while await self.reader.read(1 << 16):
            pass

    def drop(self) -> None:
        """Close the connection at once."""
        self._open.discard(self)
        self.writer.transport.abort()


async def connect(address: str, run: str, purpose: str, keys: Keys | None, timeout_s: float) -> OpenCall:
    """Call the coordinator; see CoordinatorConnection."""
    until, wait_s = time.monotonic() + timeout_s, FIRST_WAIT_S
    while True:
        try:
            call = await _connect(address, keys, until)
            call.say({"run": run, "for": purpose})
            return call
        except (_TryAgain, Unreachable) as error:
            if time.monotonic() + wait_s > until:
                if isinstance(error, Unreachable):
                    raise
                raise _nobody(address, str(error)) from error
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


async def _connect(address: str, keys: Keys | None, until: float) -> OpenCall:
    """Connect once, and prove both ends, until that time. Raises _TryAgain if that may succeed later."""
    if is_url(address):
        return await _connect_in_storage(address, keys, until)
    addresses = resolve(address, socket.SOCK_STREAM)
    why = "it has no address"
    for number, (family, kind, _, _, where) in enumerate(addresses, start=1):
        try:
            connection = socket.socket(family, kind)
        except OSError as error:  # this kernel does not speak IPv6
            why = error.strerror or str(error)
            continue
        connection.setblocking(False)
        keep_from_forks(connection)
        reaching = asyncio.get_running_loop().sock_connect(connection, where)
        # an address that drops packets must leave time for the next one
        each_s = _EACH_S if number < len(addresses) else math.inf
        try:
            await asyncio.wait_for(reaching, min(each_s, _left_s(until)))
        except asyncio.TimeoutError:
            why = "it does not answer"
        except OSError as error:
            why = os.strerror(error.errno or 0)
        except BaseException:
            connection.close()
            raise
        else:
            return await _proven(address, connection, keys, until)
        connection.close()
    raise _TryAgain(why)


async def _connect_in_storage(url: str, keys: Keys | None, until: float) -> OpenCall:
    """The same where regions meet in a storage."""
    calling = asyncio.get_running_loop().run_in_executor(None, call_in_storage, url, _left_s(until))
    try:
        connection = await calling
    except OSError as error:
        if isinstance(error, StorageError) and not error.may_pass:
            raise
        raise _TryAgain(str(error)) from error
    connection.setblocking(False)
    keep_from_forks(connection)
    # the other end has come: where requests take long, so do its first words
    return await _proven(url, connection, keys, max(until, time.monotonic() + CONNECT_S))


async def _proven(address: str, connection: socket.socket, keys: Keys | None, until: float) -> OpenCall:
    try:
        return await asyncio.wait_for(_prove(address, connection, keys), _left_s(until))
    except asyncio.TimeoutError as error:
        raise _TryAgain("what listens there does not answer as a coordinator does") from error


async def _prove(address: str, connection: socket.socket, keys: Keys | None) -> OpenCall:
    """Say who this is, and hear that it is the coordinator."""
    call, loop = None, asyncio.get_running_loop()
    try:
        await loop.sock_sendall(connection, line_of({**versions(), "key": key_id(keys) or None}))
        said = b""
        while not said.endswith(b"\n") and len(said) < MAX_LINE:
            chunk = await loop.sock_recv(connection, 1 << 16)
            if not chunk:
                raise EOFError
            said += chunk
        _check(address, object_of(said))
        proof = None if keys is None else identity(keys)
        reader, writer = await asyncio.open_connection(
            sock=connection,
            limit=_LONGEST_ANSWER,
            ssl=None if proof is None else proof.contexts[False],
            server_hostname=None if proof is None else "",
        )
        call = OpenCall(address, reader, writer)
        if proof is not None:
            if writer.get_extra_info("ssl_object").getpeercert(True) != proof.certificate:
                raise ssl.SSLError("another certificate")
            if object_of(await reader.readuntil()) != HERE:
                raise MeetingRefused(f"the coordinator at {address} says what no coordinator says.")
        return call
    except BaseException as error:
        if call is not None:
            call.drop()
        connection.close()
        if isinstance(error, ssl.SSLError):
            raise MeetingRefused(
                f"what listens at {address} does not prove that it has the secret of the run: it is another one, or somebody "
                "between here and there alters what is said."
            ) from error
        if isinstance(error, OSError | EOFError):
            raise _TryAgain("it has closed the connection without an answer") from error
        raise


def _check(address: str, answer: dict[str, Any] | None) -> None:
    """The coordinator's first line."""
    if answer is None or "hf_cocodc" not in answer:
        raise MeetingRefused(
            f"what listens at {address} is not a coordinator. Correct the address (regions.coordinator, --coordinator), or start "
            "one there with `hf-cocodc coordinator`."
        )
    why = other_version(answer, f"the coordinator at {address}", "this process")
    if why is None and "refused" in answer:
        why = f"the coordinator at {address} refuses this process: {short(answer['refused'], 1000)}"
    if why is not None:
        raise MeetingRefused(f"{why}.")


def _nobody(address: str, why: str) -> NobodyAnswers:
    if is_url(address):
        return NobodyAnswers(
            f"no coordinator answers in {address} ({why}). A region that trains there serves as one; another takes over within "
            "half a minute if it ends. Start a region with this URL, or correct it."
        )
    host, port = parts_of(address)
    secret = "" if is_loopback(host) else " --secret-file FILE"
    return NobodyAnswers(
        f"no coordinator answers at {address} ({why}). Start one there with `hf-cocodc coordinator --host {host} --port "
        f"{port}{secret}`, and check that no firewall keeps a region from it."
    )


def _left_s(until: float) -> float:
    """Seconds until a time; a few in any case, in which what is begun then is cleared away."""
    return max(until - time.monotonic(), 0.01)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, and let them end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def end_tasks() -> None:
    """Cancel all other tasks of the loop, before it is closed."""
    await cancel(*(asyncio.all_tasks() - {asyncio.current_task()}))
    for _ in range(3):  # the sockets of aborted connections are closed, those with TLS a turn later
        await asyncio.sleep(0)


class LoopThread(threading.Thread):
    """An asyncio loop in a thread of its own: the caller's may have one already, as in a notebook.

    `calls`: those that are open. Whoever asked for one may have been interrupted before it had it.
    """

    def __init__(self) -> None:
        super().__init__(name="hf_cocodc-coordinator", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.calls: set[OpenCall] = set()
        self._ends = threading.Lock()
        self.start()

    def run(self) -> None:
        self.loop.run_forever()
        for call in list(self.calls):
            call.drop()
        self.loop.run_until_complete(end_tasks())
        self.loop.close()

    def wait_for(self, work: Coroutine[Any, Any, _T], look: Callable[[], None] = lambda: None) -> _T:
        """The result of `work` in the loop. `look` is called several times a second meanwhile."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            while not concurrent.futures.wait((future,), _LOOK_S).done:
                look()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, work: Callable[..., Any], *args: Any) -> None:
        """Call `work` in the loop. Any thread or signal handler may call this."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(work, *args)

    def end(self) -> None:
        """End the loop, and wait for that; any thread may call this, also again."""
        if self._ends.acquire(blocking=False):  # a second stop would end what the loop does last
            self.soon(self.loop.stop)
        self.join(FLUSH_S)  # it may wait for a name server


class CoordinatorConnection:
    """A blocking connection to the coordinator at `address` (HOST:PORT).

    Args:
        purpose: "region", "command", "status" or "echo".
        timeout_s: how long to keep trying while the coordinator does not answer.
        look: called several times a second meanwhile; what it raises goes to the caller.

    Raises:
        Unreachable: the host name is unknown, or no way leads there.
        MeetingError: nobody answers; MeetingRefused if what answers has another secret, another version, or is no coordinator.
    """

    def __init__(
        self,
        address: str,
        run: str,
        purpose: str,
        keys: Keys | None,
        timeout_s: float = CONNECT_S,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._thread = LoopThread()
        try:
            self.call = self._thread.wait_for(connect(address, run, purpose, keys, timeout_s), look)
        except BaseException:
            self._thread.end()
            raise

    def send(self, message: Any) -> None:
        """Send a message, or another object, soon. Raises InputError if it is too long."""

        async def say() -> None:
            self.call.say(message)

        self._thread.wait_for(say())

    def receive(self, timeout_s: float) -> Any | None:
        """The next message; None if none comes in time. Raises ConnectionEnded, or LinkError if what comes is no message."""
        line = self.receive_line(timeout_s)
        return None if line is None else from_line(line)

    def receive_line(self, timeout_s: float) -> bytes | None:
        try:
            return self._thread.wait_for(asyncio.wait_for(self.call.hear(), timeout_s))
        except asyncio.TimeoutError:
            return None

    def send_bytes(self, data: bytes, timeout_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Send bytes, at the pace at which they are taken. Raises ConnectionEnded, also if none is taken for `timeout_s`."""

        async def send() -> None:
            self.call.writer.write(data)
            await asyncio.wait_for(self.call.writer.drain(), timeout_s)

        try:
            self._thread.wait_for(send(), look)
        except (OSError, asyncio.TimeoutError) as error:
            raise ConnectionEnded(f"the coordinator at {self.address} takes nothing more") from error

    def wait_for_end(self, timeout_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Wait until the other end has closed the connection, for at most `timeout_s`."""

        async def hear() -> None:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self.call.reader.read(1), timeout_s)

        self._thread.wait_for(hear(), look)

    def receive_bytes(self, most: int, timeout_s: float, look: Callable[[], None] = lambda: None) -> bytes:
        """The next bytes. Raises ConnectionEnded: there are no more, or none comes for `timeout_s`."""
        try:
            data = self._thread.wait_for(asyncio.wait_for(self.call.reader.read(most), timeout_s), look)
        except (OSError, asyncio.TimeoutError) as error:
            raise ConnectionEnded(f"the coordinator at {self.address} passes on nothing more") from error
        if not data:
            raise ConnectionEnded(f"the coordinator at {self.address} has closed the connection")
        return data

    def close(self) -> None:
        """Close the connection once the coordinator has taken all, or after a second."""
        self._thread.wait_for(self.call.finish())
        self._thread.end()

    def drop(self) -> None:
        """Close the connection at once."""
        self._thread.end()
