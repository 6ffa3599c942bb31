"""The relay joins two callers with one ticket, and costs little for all others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.net import relay as relaying
from hf_cocodc.net.relay import JOINED, RelayProcess, role_at_relay, ticket
from tests.coordinator.regions import OTHER, SECRET, wait_until
from tests.listening import free_port

HOST = "127.0.0.1"
ABOUT = b"a pair"


class Running:
    """A relay, and what it has said."""

    def __init__(self, secrets: list | None = None, rate: float | None = None) -> None:
        self.port, self.said = free_port(), list[str]()
        secrets = [SECRET] if secrets is None else secrets
        self.process = RelayProcess(HOST, self.port, secrets, rate, self.said.append)
        wait_until(lambda: _answers(self.port), 20.0)

    def call(self, said: bytes, number: int = 0, is_first: bool = True) -> socket.socket:
        connection = socket.create_connection((HOST, self.port), 10.0)
        connection.sendall(said + bytes([number]) + role_at_relay(is_first))
        return connection

    def other(self, said: bytes, number: int = 0) -> socket.socket:
        return self.call(said, number, is_first=False)


def joined(*connections: socket.socket) -> None:
    """Both ends hear that they are."""
    for each in connections:
        assert each.recv(1) == JOINED


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
        return True
    return False


@pytest.fixture
def running() -> Iterator[Running]:
    found = Running()
    yield found
    found.process.close()


def received(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (chunk := connection.recv(1 << 20)):
        found += chunk
    return bytes(found)


def test_two_callers_with_one_ticket_reach_each_other(running: Running) -> None:
    """Also what one of them has said before the other came; each number joins two of its own."""
    good = ticket(SECRET, ABOUT)
    assert good == ticket(SECRET, ABOUT) != ticket(SECRET, b"another pair") and good != ticket(OTHER, ABOUT)
    with contextlib.ExitStack() as kept:
        first = [kept.enter_context(running.call(good, number)) for number in (0, 1)]
        for number, each in enumerate(first):
            each.sendall(b"early %d" % number)
        second = [kept.enter_context(running.other(good, number)) for number in (0, 1)]
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            joined(one, other)
            assert received(other, 7) == b"early %d" % number
            payload = os.urandom(3 << 20)
            sender = threading.Thread(target=other.sendall, args=(payload,))
            sender.start()
            assert received(one, len(payload)) == payload
            sender.join()
        first[0].shutdown(socket.SHUT_WR)
        assert second[0].recv(1) == b""
        second[0].sendall(b"still")
        assert received(first[0], 5) == b"still", "the other way goes on"


def test_nobody_is_joined_to_what_it_has_said_before(running: Running) -> None:
    """A caller that calls once more waits for the other end, like before; its earlier call is closed."""
    good = ticket(SECRET, ABOUT)
    with running.call(good) as early, running.call(good) as late, contextlib.ExitStack() as kept:
        early.sendall(b"early")
        late.sendall(b"late")
        assert early.recv(1) == b""
        other = kept.enter_context(running.other(good))
        joined(late, other)
        assert received(other, 4) == b"late"


@pytest.mark.parametrize(
    "said",
    [ticket(OTHER, ABOUT), ticket(None, ABOUT), bytes(32), b"GET / HTTP/1.1\r\nHost: example.com\r\n"],
    ids=["another secret", "no secret", "zeros", "a request"],
)
def test_who_has_no_ticket_is_closed(running: Running, said: bytes) -> None:
    with running.call(said[:32]) as stranger:
        assert stranger.recv(1) == b""


def test_without_a_secret_every_ticket_counts() -> None:
    running = Running([])
    good = ticket(None, ABOUT)
    with running.call(good) as one, running.other(good) as other:
        joined(one, other)
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    running.process.close()


def test_a_crowd_of_strangers_shuts_out_no_region(running: Running) -> None:
    """Not the region that calls then, nor one that had begun to say its ticket."""
    good = ticket(SECRET, ABOUT)
    with contextlib.ExitStack() as kept:
        early = kept.enter_context(socket.create_connection((HOST, running.port), 10.0))
        early.sendall(good[:5])
        for _ in range(relaying._MOST_STRANGERS + 50):
            stranger = socket.create_connection((HOST, running.port), 10.0, ("127.0.0.2", 0))
            kept.enter_context(stranger).sendall(b"?")
        late = kept.enter_context(running.call(good))
        early.sendall(good[5:] + b"\0" + role_at_relay(False))
        joined(early, late)


def test_its_process_gets_no_key_but_its_own(running: Running) -> None:
    told = running.process._told
    assert told["keys"] == [SECRET.of("relay").raw.hex()] and SECRET.raw.hex() not in str(told)


@pytest.mark.slow
def test_whoever_says_nothing_is_closed_in_time_and_keeps_nobody_out(running: Running) -> None:
    crowd = [socket.create_connection((HOST, running.port), 20.0) for _ in range(200)]
    good = ticket(SECRET, ABOUT)
    with running.call(good) as one, running.other(good) as other:
        joined(one, other)
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    began = time.monotonic()
    for each in crowd:
        assert each.recv(1) == b""
        each.close()
    assert time.monotonic() - began < 10.0


def test_what_nobody_takes_waits_at_its_sender(running: Running) -> None:
    """The relay keeps a bounded part of it."""
    good = ticket(SECRET, ABOUT)
    with running.call(good) as one, running.other(good):
        one.settimeout(2.0)
        process = psutil.Process(running.process._process.pid)
        before = process.memory_info().rss
        with contextlib.suppress(TimeoutError):
            for _ in range(400):
                one.sendall(bytes(1 << 20))
        assert process.memory_info().rss < before + (20 << 20)


def test_if_one_end_dies_the_other_one_ends(running: Running) -> None:
    good = ticket(SECRET, ABOUT)
    one, other = running.call(good), running.other(good)
    joined(one, other)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    one.close()
    with contextlib.suppress(ConnectionResetError):
        assert other.recv(1) == b""
    other.close()


def test_the_rate_of_all_together_is_kept() -> None:
    running = Running(rate=2e6)
    good = ticket(SECRET, ABOUT)
    with running.call(good) as one, running.other(good) as other:
        joined(one, other)
        began = time.monotonic()
        threading.Thread(target=one.sendall, args=(bytes(2_000_000),), daemon=True).start()
        received(other, 2_000_000)
        assert time.monotonic() - began > 0.7
    running.process.close()


def test_a_relay_that_ends_is_started_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "_AGAIN_S", 0.1)
    first = running.process._process.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "relay: it has ended, and is started again" in running.said, 10.0)
    wait_until(lambda: _answers(running.port), 20.0)
    assert running.process._process.pid != first


def test_a_relay_that_cannot_be_started_is_tried_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine may have too many processes for a while."""
    monkeypatch.setattr(relaying, "_AGAIN_S", 0.1)
    begin, failures = subprocess.Popen, [OSError(11, "Resource temporarily unavailable")] * 2

    def start(*given: Any, **how: Any) -> subprocess.Popen[str]:
        if failures:
            raise failures.pop()
        return begin(*given, **how)

    monkeypatch.setattr(subprocess, "Popen", start)
    os.kill(running.process._process.pid, signal.SIGKILL)
    wait_until(lambda: not failures and _answers(running.port), 20.0)
    assert "relay: it cannot be started yet: Resource temporarily unavailable" in running.said


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=f"cannot listen on {HOST}:{port} for the relay: Address already in use"
        ):
            RelayProcess(HOST, port, [], None, print)


def test_it_ends_with_its_coordinator(running: Running) -> None:
    """Its input ends, however the coordinator does."""
    process = running.process._process
    assert process.stdin is not None
    running.process._closes.set()
    process.stdin.close()
    process.wait(10.0)
