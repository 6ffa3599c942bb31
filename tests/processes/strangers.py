"""Strangers at every port of a run: they send garbage, say nothing, or give orders. And regions that they reach."""

from __future__ import annotations

import contextlib
import random
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from hf_cocodc.coordinator.messages import PROTOCOL, AskLeave
from hf_cocodc.errors import LinkError, MeetingError
from hf_cocodc.net.keys import Keys
from tests.coordinator.regions import ask
from tests.processes.coming_worker import loop

GARBAGE = 200
HALF_OPEN = 200
FEW_FILES = 300
"""What a region may open: more than it keeps of callers at all its ports together, fewer than strangers come to one port."""
_FILES = 8192
_AT_ONCE = 40
_KEPT = 2000


def with_few_files(*arguments: Any, **regions: Any) -> None:
    """A region that may open few files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    loop(*arguments, **regions)


def ports_of(*pids: int) -> list[int]:
    """The ports on which these processes listen."""
    found = [each for pid in pids for each in psutil.Process(pid).net_connections(kind="tcp")]
    return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})


def garbage(number: int) -> bytes:
    """What somebody could send: small numbers, requests, JSON without an end, noise."""
    chance = random.Random(number)
    kinds = (
        (number % 8).to_bytes(8, "little") + chance.randbytes(chance.randrange(64)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"[" * 9999 + b"\n",
        b'{"hf_cocodc": %d, "key": "00"}\n' % PROTOCOL,
        chance.randbytes(chance.randrange(1, 20_000)),
        b"\n" * 1000,
    )
    return kinds[number % len(kinds)]


@contextlib.contextmanager
def knocking(ports: Callable[[], list[int]]) -> Iterator[Counter[int]]:
    """In the block, strangers come to each port that there is then, some tens several times a second: silent ones, and garbage.

    Yields how many came, by port.
    """
    came: Counter[int] = Counter()
    kept: deque[socket.socket] = deque()
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.1):
            new = []
            for port in ports():
                for number in range(_AT_ONCE):
                    one = socket.socket()
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.1", port))
                    new.append((one, number))
                    came[port] += 1
            done.wait(0.1)
            for one, number in new:
                if number % 2 and number % 6:  # every sixth would say a small number
                    with contextlib.suppress(OSError):
                        one.send(garbage(number))
                kept.append(one)
            while len(kept) > _KEPT:
                kept.popleft().close()

    thread = threading.Thread(target=work)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _FILES), hard))
    thread.start()
    try:
        yield came
    finally:
        done.set()
        thread.join()
        for one in kept:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def strangers(
    ports: list[int], num_garbage: int = GARBAGE, num_silent: int = HALF_OPEN
) -> Iterator[dict[int, int]]:
    """At each port, so many connections that send garbage, and so many that say nothing, kept inside the block.

    Yields how many of them were answered, by port.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _FILES), hard))
    kept: list[socket.socket] = []
    answered = dict.fromkeys(ports, 0)
    try:
        with selectors.DefaultSelector() as selector:
            for port in ports:
                for number in range(num_garbage + num_silent):
                    one = socket.socket()
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.1", port))
                    kept.append(one)
                    selector.register(one, selectors.EVENT_WRITE, (one, port, number))
            until = time.monotonic() + 2.0
            while selector.get_map() and time.monotonic() < until:
                for key, _ in selector.select(0.1):
                    one, port, number = key.data
                    selector.unregister(one)
                    answered[port] += not one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if number < num_garbage:
                        with contextlib.suppress(OSError):
                            one.send(garbage(number))
        yield answered
    finally:
        for one in kept:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def ordering(address: str, run: str, *secrets: str | None) -> Iterator[list[str]]:
    """Somebody without the secret asks every region to leave, ten times a second; what the coordinator says to that."""
    said: list[str] = []
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.1):
            for secret in secrets:
                try:
                    keys = None if secret is None else Keys.from_secret(secret)
                    ask(address, run, AskLeave(region=len(said) % 2), keys=keys)
                    said.append("")
                except (MeetingError, LinkError) as error:
                    said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield said
    finally:
        done.set()
        thread.join()
