"""The relay: a process that carries bytes between two regions neither of which can call the other one.

Both call it with one ticket, and it passes on what each of them says to the other one. It cannot read that: regions seal what
they send. It is a process of its own, so that bytes never delay what the coordinator decides: `python -m hf_cocodc.net.relay`.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import InputError
from .addresses import listen_at, named
from .channel import keep_alive
from .keys import Keys

_TICKET_BYTES = 32
_NONCE_BYTES = _TICKET_BYTES // 2
_GREETING_BYTES = _TICKET_BYTES + 2
"""A ticket, the number of a connection, and which of its two ends calls."""
_GREET_S = 5.0
"""Seconds in which a caller has said its ticket."""
_MOST_STRANGERS = 256
"""Callers that have not. Of more, the oldest goes that comes from where most of them come from: a region says its ticket at once,
and is shut out by nobody.
"""
_NETWORK_BITS = 64
"""Who has one IPv6 address has all that begin alike."""
_WAIT_S = 120.0
"""Seconds for which a caller waits for the other one."""
_MOST_WAITING = 4096
_CHUNK = 256 << 10
"""Bytes of a connection that lie here at most, each way, beside what the kernel holds."""
_TELL_S = 60.0
_AGAIN_S = 1.0


JOINED = b"+"
"""What both callers hear first, once both are there."""


def ticket(keys: Keys | None, *about: bytes) -> bytes:
    """A ticket about something; both ends of a pair make the same one. Without the keys of the secret nobody can make it."""
    nonce = hashlib.sha256(b"".join(about)).digest()[:_NONCE_BYTES]
    return nonce + _tag(None if keys is None else keys.of("relay"), nonce)


def role_at_relay(is_first: bool) -> bytes:
    """What a caller says of its end: nobody must be joined to what it has said before."""
    return bytes([is_first])


def _tag(key: Keys | None, nonce: bytes) -> bytes:
    return bytes(_NONCE_BYTES) if key is None else hmac.digest(key.raw, nonce, hashlib.sha256)[:_NONCE_BYTES]


def _network(host: str) -> str:
    """What callers of one machine have in common.

    >>> _network("10.0.0.1"), _network("2001:db8:0:1::7") == _network("2001:db8:0:1:a:b:c:d")
    ('10.0.0.1', True)
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return host
    return str(address.ipv4_mapped or ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


@dataclass(eq=False)
class _End:
    role: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    until: float


class _Rate:
    """Keeps a rate of all connections together."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free_at = rate, 0.0

    async def take(self, num_bytes: int) -> None:
        if self._rate is None:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + num_bytes / self._rate
        await asyncio.sleep(self._free_at - now)


class Relay:
    """Joins callers. `keys`: those for tickets, of each secret; without any, every ticket counts. `rate`: bytes a second of all
    connections together, or None.
    """

    def __init__(self, keys: Iterable[Keys], rate: float | None, say: Callable[[str], None]) -> None:
        self._keys: list[Keys | None] = [*keys] or [None]
        self._say = say
        self._rate = _Rate(rate)
        self._num_bytes = self._num_open = 0
        self._strangers: dict[asyncio.StreamWriter, str] = {}
        self._waiting: dict[bytes, _End] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Serve callers until it is canceled."""
        server = await asyncio.start_server(self._come, sock=listener, limit=_CHUNK)
        async with server:
            while True:
                await asyncio.sleep(_TELL_S)
                self._forget()
                carried, self._num_bytes = self._num_bytes, 0
                if carried:
                    self._say(f"relay: {carried / 1e6:.1f} MB in a minute, on {self._num_open} connections")

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A caller: join it with the other one, or keep it until that one comes."""
        writer.transport.set_write_buffer_limits(_CHUNK)
        keep_alive(writer.get_extra_info("socket"))
        greeting = await self._greeting(reader, writer)
        if greeting is None or not self._is_good(greeting[:_TICKET_BYTES]):
            writer.close()
            return
        key, caller = greeting[:-1], _End(greeting[-1], reader, writer, time.monotonic() + _WAIT_S)
        other = self._waiting.pop(key, None)
        if other is not None and other.role != caller.role and not other.reader.at_eof():
            await self._join(other, caller)
            return
        if other is not None:  # it has gone, or calls once more
            other.writer.close()
        self._forget()
        if len(self._waiting) >= _MOST_WAITING:
            writer.close()
            return
        self._waiting[key] = caller

    async def _greeting(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        self._strangers[writer] = _network(str((writer.get_extra_info("peername") or ("0.0.0.0",))[0]))
        if len(self._strangers) > _MOST_STRANGERS:
            [(crowd, _)] = Counter(self._strangers.values()).most_common(1)
            oldest = next(each for each, network in self._strangers.items() if network == crowd)
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            return await asyncio.wait_for(reader.readexactly(_GREETING_BYTES), _GREET_S)
        except (asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError, OSError):
            return None
        finally:
            self._strangers.pop(writer, None)

    def _is_good(self, claimed: bytes) -> bool:
        nonce, tag = claimed[:_NONCE_BYTES], claimed[_NONCE_BYTES:]
        return any(hmac.compare_digest(_tag(keys, nonce), tag) for keys in self._keys)

    def _forget(self) -> None:
        """Close those that have waited too long, or have gone."""
        now = time.monotonic()
        for greeting, caller in list(self._waiting.items()):
            if caller.until <= now or caller.reader.at_eof():
                del self._waiting[greeting]
                caller.writer.close()

    async def _join(self, one: _End, other: _End) -> None:
        self._num_open += 1
        for caller in (one, other):
            caller.writer.write(JOINED)
        ways = [asyncio.ensure_future(self._pass_on(*each)) for each in ((one, other), (other, one))]
        try:
            await asyncio.wait(ways)  # either end may go on after the other has said all
        finally:
            self._num_open -= 1
            for way in ways:
                way.cancel()
            for caller in (one, other):
                caller.writer.close()

    async def _pass_on(self, source: _End, target: _End) -> None:
        try:
            while chunk := await source.reader.read(_CHUNK):
                await self._rate.take(len(chunk))
                self._num_bytes += len(chunk)
                target.writer.write(chunk)
                await target.writer.drain()
            target.writer.write_eof()
        except (OSError, RuntimeError):  # one of the two has gone: so must the other one
            for each in (source, target):
                each.writer.transport.abort()


class RelayProcess:
    """Runs the relay in a process of its own, and restarts it if it ends. It ends with this process, however that ends.

    Raises InputError if this machine cannot listen there.
    """

    def __init__(
        self, host: str, port: int, secrets: Sequence[Keys], rate: float | None, say: Callable[[str], None]
    ) -> None:
        self._told = {
            "host": host,
            "port": port,
            "keys": [keys.of("relay").raw.hex() for keys in secrets],  # it needs no other
            "rate": rate,
        }
        self._say, self._closes = say, threading.Event()
        try:
            listen_at(host, port).close()
        except OSError as error:
            raise InputError(
                f"cannot listen on {named(host, port)} for the relay: {error.strerror}. Choose another --relay PORT."
            ) from error
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="hf_cocodc-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closes.set()
        self._process.terminate()
        self._thread.join()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", __name__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: that is seen where its lines are read
            process.stdin.write(json.dumps(self._told) + "\n")  # not by its arguments, which everybody sees
            process.stdin.flush()
        return process

    def _watch(self) -> None:
        process: subprocess.Popen[str] | None = self._process
        while True:
            if process is not None:
                assert process.stdin is not None and process.stdout is not None
                with process.stdin, process.stdout:
                    for line in process.stdout:
                        self._say(line.rstrip())
                process.wait()
            if self._closes.wait(_AGAIN_S):
                return
            self._say("relay: it has ended, and is started again")
            try:
                self._process = process = self._start()
            except OSError as error:  # too many processes, or files
                self._say(f"relay: it cannot be started yet: {error.strerror}")
                process = None
            if self._closes.is_set():  # meanwhile
                self._process.terminate()


def main() -> None:
    """The relay's process: it is told what to do on its input, and ends when that ends."""
    settings = json.loads(sys.stdin.readline())
    # a terminal that interrupts the coordinator interrupts this one, too: it ends with its input
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def say(line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # whoever reads it has gone: so has the input
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    async def work() -> None:
        relay = Relay([Keys(bytes.fromhex(each)) for each in settings["keys"]], settings["rate"], say)
        serving = asyncio.ensure_future(relay.serve(listen_at(settings["host"], settings["port"])))
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        os._exit(0)  # connections may still be open

    try:
        asyncio.run(work())
    except OSError as error:
        say(f"relay: {error.strerror or error}")


if __name__ == "__main__":
    main()
