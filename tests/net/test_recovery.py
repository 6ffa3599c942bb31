"""Connections that break come back, and no bit is lost; a region is lost if its process has gone, or does not come back."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import random
import select
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from hf_cocodc.coordinator.messages import Terms
from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.link.part import Part, Standing
from hf_cocodc.link.rules import why_lost
from hf_cocodc.net import recovery
from hf_cocodc.net.awake import awake_s
from hf_cocodc.net.connection import Connection, ConnectionLost, Operation
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.members import Member
from hf_cocodc.net.port import dial
from hf_cocodc.net.recovery import Recovery, stream_verdict
from hf_cocodc.net.view import View
from hf_cocodc.net.wire import Wire
from tests.link.memory import PATIENCE_S, at_once, connect, wait_until
from tests.secret import secret

HOST = "127.0.0.1"
KEYS = Keys.from_secret(secret("a secret of the tests of recovery"))


HERE, THERE = Member(0, 1), Member(1, 2)


def judged(
    closed_at: float = -math.inf, timeout_s: float = 30.0, cut_at: float = -math.inf
) -> Callable[[int, float, bool, bool], str | None]:
    """What a link's rules say of the other region, whose connection to the coordinator was closed, or reset, at a time."""
    part = Part(
        me=HERE,
        terms=Terms(count=2, timeout_s=timeout_s),
        standing=Standing.MEMBER,
        closed={THERE: closed_at},
        cut={THERE: cut_at},
    )
    return lambda region, *facts: why_lost(part, THERE, *facts, awake_s())


@pytest.mark.parametrize(
    ("broken_s", "whole_s", "has_control", "is_over"),
    [
        (9.0, 60.0, True, False),
        (11.0, 60.0, True, True),  # the other end would have called again
        (50.0, 9.0, True, False),  # the network has just come back
        (50.0, 11.0, True, True),
        (50.0, -math.inf, True, False),  # nothing comes through: what becomes of the pair decides
        (0.0, 60.0, False, True),
    ],
)
def test_when_a_stream_is_over(broken_s: float, whole_s: float, has_control: bool, is_over: bool) -> None:
    error = stream_verdict(100.0, 100.0 - broken_s, 100.0 - whole_s, has_control)
    assert (error is not None) == is_over


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("closes", [0, 1])
def test_a_stream_that_ends_without_a_word_costs_no_pair(
    caller: int, closes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end could not say goodbye, because its socket was broken: the other end hears of it, and transfers go on."""
    monkeypatch.setattr(recovery, "_STREAM_S", 1.0)
    with routed(caller=caller, timeout_s=6.0) as both:
        for wire in both.wires:
            wire.why_lost = judged(awake_s())  # it has just lost both
        streams = at_once(*(partial(wire.stream, 1 - wire.region, 70, 5.0) for wire in both.wires))
        ends = streams
        wait_until(lambda: all(math.isinf(end.broken_at) for end in ends))
        waits = Operation(0, 0, torch.empty(0, dtype=torch.uint8), most=9)
        ends[1 - closes].receive(waits)
        broken = threading.Event()
        ends[closes]._broken = lambda connection: broken.set()  # it does not come back by itself
        pipe = ends[closes]._pipe
        assert pipe is not None
        pipe.socket.shutdown(socket.SHUT_RDWR)
        assert broken.wait(PATIENCE_S)  # the other end may have brought it back by now
        ends[closes].close()
        with pytest.raises(ConnectionLost):
            waits.wait(5.0)
        views = [wire.view([0, 1], 1) for wire in both.wires]
        at_once(*(partial(swapped, view, 40, 4, 1000) for view in views))


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_stream_that_nobody_has_taken_costs_no_pair(
    caller: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer that has gone to another donor leaves it there. One that takes it late, after it has broken, has it."""
    monkeypatch.setattr(recovery, "_STREAM_S", 1.0)
    with routed(caller=caller, timeout_s=6.0) as both:
        calls, called = both.wires[caller], both.wires[1 - caller]
        stream = calls.stream(called.region, 70, 5.0)
        wait_until(lambda: 70 in called._pairs[calls.region]._came)
        both.router.cut()
        if is_taken:
            late = called.stream(calls.region, 70, 5.0)
            waits = Operation(0, 0, torch.empty(0, dtype=torch.uint8), most=9)
            late.receive(waits)
            stream.send(Operation(0, 0, torch.ones(3, dtype=torch.uint8)))
            waits.wait(5.0)
        else:
            wait_until(lambda: stream.lost_at < math.inf)
        views = [wire.view([0, 1], 1) for wire in both.wires]
        at_once(*(partial(swapped, view, 40, 4, 1000) for view in views))


def test_a_call_that_fails_in_whatever_way_is_made_again() -> None:
    """The connection may have broken before its pair knows it."""

    class Broken:
        broken_at, lost_at = awake_s(), math.inf

    connection: Any = Broken()
    failures = [ValueError("it is not in the list"), ConnectionLost("it says nothing"), TimeoutError()]

    def call(again: Any) -> None:
        if failures:
            raise failures.pop()
        again.broken_at = math.inf

    recovering = Recovery(call, lambda broken_at, is_denied: None, pytest.fail)
    for _ in range(2):  # one thread is enough
        recovering.begin(connection)
    wait_until(lambda: math.isinf(connection.broken_at) and not recovering._under_way)


class Router:
    """Passes on what comes to its port; it may forget all connections, and let none through for a while."""

    def __init__(self, port: int) -> None:
        self._to, self._open = port, set[socket.socket]()
        self._lock = threading.Lock()
        self._server = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.is_blocked = False
        self.num_cut = 0
        self.alters = 0  # of so many chunks to come, each first byte
        self.heard = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                if self.is_blocked:
                    with self._lock:
                        self._open.add(caller)
                    continue
                there = socket.create_connection((HOST, self._to))
                with self._lock:
                    self._open |= {caller, there}
                for one, other in ((caller, there), (there, caller)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while self._waits(one) and (chunk := one.recv(1 << 16)):
                self.heard += chunk
                if self.alters and len(chunk) > 1000:
                    self.alters -= 1
                    chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
                other.sendall(chunk)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _waits(self, one: socket.socket) -> bool:
        """Wait for a chunk, not in the kernel: a socket is not reset while a thread is in it. False once it is closed."""
        with contextlib.suppress(ValueError):
            while not select.select([one], [], [], 0.02)[0]:
                pass
            return True
        return False

    def cut(self, closes: bool = True, resets: bool = True) -> None:
        """Close all connections in good order, reset them, or first the one and then the other."""
        with self._lock:
            cut, self._open = self._open, set()
        for each in cut:
            with contextlib.suppress(OSError):
                if resets:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if closes:
                    each.shutdown(socket.SHUT_RDWR)
                self.num_cut += 1
            each.close()

    def close(self, resets: bool = False) -> None:
        """Refuse new connections; close the others in good order, or reset them."""
        with contextlib.suppress(OSError):  # it is closed already
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut(closes=not resets, resets=resets)


class Routed:
    """Two wires; whoever calls goes through a router."""

    def __init__(
        self, caller: int = 0, timeout_s: float = 20.0, hidden: str = HOST, **settings: object
    ) -> None:
        self._hidden = socket.socket()
        self._hidden.bind((hidden, 0))
        nowhere = self._hidden.getsockname()
        self.wires = [
            Wire(region, 2, timeout_s=timeout_s, announce=lambda port: [nowhere], **settings)  # type: ignore[arg-type]
            for region in range(2)
        ]
        called = self.wires[1 - caller]
        self.router = Router(called.port)
        called.addresses = (self.router.address,)
        connect(*self.wires)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        self.router.close()
        self._hidden.close()


@contextlib.contextmanager
def routed(**settings: object) -> Iterator[Routed]:
    found = Routed(**settings)  # type: ignore[arg-type]
    try:
        yield found
    finally:
        found.close()


def swapped(view: View, seed: int, count: int, size: int) -> list[torch.Tensor]:
    """What the other end has sent; each time on another connection, from memory that is used again at once."""
    mine, found = torch.zeros(size, dtype=torch.uint8), []
    for number in range(count):
        tag, asked = view.tag(), torch.zeros(size, dtype=torch.uint8)
        pending = [view.receive(1 - view.region, asked, tag, number, "a piece")]
        mine[:] = (seed + number) % 251
        view.wait([view.send(1 - view.region, mine, tag, number, "a piece")], "a piece")
        mine[:] = 255
        view.wait(pending, "a piece", may_be_late=True)
        view.swap(torch.tensor([float(number)]), "a number")
        found.append(asked)
    return found


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "secret"])
def test_resets_in_the_middle_of_transfers_cost_no_bit(caller: int, keys: Keys | None) -> None:
    """Of either end's calls; payloads and control messages; also while nothing is under way."""
    count, size = 80, 300_000
    with routed(caller=caller, keys=keys) as both:
        views = [wire.view([0, 1], 1) for wire in both.wires]
        over, rng = threading.Event(), random.Random(caller)

        def cut() -> list[torch.Tensor]:
            while not over.wait(0.05 + rng.random() * 0.1):
                both.router.cut()
            return []

        def talk() -> list[torch.Tensor]:
            try:
                one, other = at_once(
                    *(partial(swapped, view, 100 * i, count, size) for i, view in enumerate(views))
                )
            finally:
                over.set()
            return one + other

        found, _ = at_once(talk, cut)
        wanted = [*range(100, 100 + count), *range(count)]
        assert [each.unique().tolist() for each in found] == [[value % 251] for value in wanted]
        assert both.router.num_cut > 5, "nothing was cut"
        assert [wire.ways[1 - wire.region] for wire in both.wires] == 2 * [
            "direct" if caller == 0 else "reversed"
        ]


def test_a_changed_byte_costs_a_socket_and_no_region(caplog: pytest.LogCaptureFixture) -> None:
    """What it was in comes again; the log says once that something alters what is sent."""
    with routed(keys=KEYS) as both:
        views = [wire.view([0, 1], 1) for wire in both.wires]
        both.router.alters = 5
        found = at_once(*(partial(swapped, view, 100 * i, 20, 300_000) for i, view in enumerate(views)))
        assert [each.unique().tolist() for each in found[0]] == [[100 + number] for number in range(20)]
        assert both.router.alters == 0
    assert "altered on its way" in caplog.text


def test_who_says_a_token_that_was_heard_cuts_no_connection() -> None:
    """It cannot answer for the other end: the socket that there is stays."""
    with routed(keys=KEYS) as both:
        pair = both.wires[1]._pairs[0]
        before = [each.whole_since for each in pair.connections]
        for number in range(3):
            with (
                dial(HOST, both.wires[1].port, pair._resumes, number, 5.0) as stranger,
                contextlib.suppress(OSError),
            ):
                stranger.sendall(bytes(32) + bytes(5000))
                stranger.settimeout(PATIENCE_S)
                while stranger.recv(1 << 16):
                    pass
        views = [wire.view([0, 1], 1) for wire in both.wires]
        at_once(*(partial(swapped, view, 40, 4, 1000) for view in views))
        assert before == [each.whole_since for each in pair.connections]
        heard = bytes(both.router.heard)
        assert heard[:32] not in (pair._token, pair._resumes)
        for what in (b"payloads", b"again"):
            assert hashlib.sha256(what + heard[:32]).digest() not in (pair._token, pair._resumes)


def test_who_listens_between_two_regions_learns_nothing() -> None:
    """Neither what they send, nor what their keys come from."""
    with routed(keys=KEYS) as both:
        pair = both.wires[0]._pairs[1]
        views = [wire.view([0, 1], 1) for wire in both.wires]
        at_once(*(partial(swapped, view, 40, 4, 1000) for view in views))
        heard = bytes(both.router.heard)
    assert pair._first_token(1) in heard, "the caller says it"
    assert not any(each in heard for each in (pair._agreed.raw, KEYS.raw))
    assert not any(bytes([40 + number]) * 8 in heard for number in range(4))


def test_a_region_that_refuses_calls_is_lost_once_the_coordinator_has_lost_it_too() -> None:
    """While the coordinator hears it, it may come back."""
    with routed(timeout_s=60.0) as both:
        both.wires[0].why_lost = judged(timeout_s=60.0)
        view = both.wires[0].view([0, 1], 1)
        pending = view.receive(1, torch.zeros(10, dtype=torch.uint8), view.tag(), 0, "a piece")
        both.router.close()
        with pytest.raises(TimeoutError):
            pending.operation.wait(0.7)
        both.wires[0].why_lost = judged(awake_s())
        with pytest.raises(
            RegionLostError, match=r"region 1 closed its connection while region 0 waited for a piece"
        ):
            view.wait([pending], "a piece", may_be_late=True)


@pytest.mark.parametrize("resets", [False, True])
def test_a_region_whose_connection_to_the_coordinator_was_reset_is_lost_if_it_has_closed_another(
    resets: bool,
) -> None:
    """Killed with unread bytes. A router that restarts resets all connections: then the region may come back."""
    with routed(timeout_s=60.0) as both:
        both.wires[0].why_lost = judged(timeout_s=60.0, cut_at=awake_s())
        view = both.wires[0].view([0, 1], 1)
        pending = view.receive(1, torch.zeros(10, dtype=torch.uint8), view.tag(), 0, "a piece")
        both.router.close(resets)
        with pytest.raises(TimeoutError if resets else ConnectionLost):
            pending.operation.wait(1.0 if resets else PATIENCE_S)


def test_one_connection_of_a_pair_has_no_unread_bytes() -> None:
    """A killed process closes it in good order, whatever the process has not read."""

    def unread(connection: Connection) -> int:
        assert connection._last is not None
        count = fcntl.ioctl(connection._last.socket, termios.FIONREAD, bytes(4))
        return int(struct.unpack("i", count)[0])

    with routed() as both:
        here, there = (wire._pairs[1 - wire.region] for wire in both.wires)
        wait_until(lambda: here._line is not None and math.isinf(here._line.broken_at))
        for each in here.connections:
            for _ in range(2):  # the header of the first one is read
                each.send(Operation(1, 1, torch.zeros(1000, dtype=torch.uint8)))
        wait_until(lambda: all(map(unread, there.connections)))
        assert there._line is not None and not unread(there._line)


@pytest.mark.parametrize("hidden", [HOST, "127.0.0.2"])
def test_another_machine_does_not_speak_for_a_region_that_calls(hidden: str) -> None:
    """Behind a router, a region announces an address that another machine has here: what refuses there says nothing of it."""
    with routed(timeout_s=60.0, hidden=hidden) as both:
        both.wires[1].why_lost = judged(awake_s(), timeout_s=60.0)
        view = both.wires[1].view([0, 1], 1)
        pending = view.receive(0, torch.zeros(10, dtype=torch.uint8), view.tag(), 0, "a piece")
        both.router.is_blocked = True
        both.router.cut()
        with pytest.raises(ConnectionLost if hidden == HOST else TimeoutError):
            pending.operation.wait(3.0)


def test_a_region_that_nobody_reaches_again_is_lost_after_the_time_out() -> None:
    with routed(timeout_s=3.0) as both:
        for wire in both.wires:
            wire.why_lost = judged(timeout_s=3.0)
        view = both.wires[0].view([0, 1], 1)
        pending = view.receive(1, torch.zeros(10, dtype=torch.uint8), view.tag(), 0, "a piece")
        both.router.is_blocked = True
        both.router.cut()
        with pytest.raises(
            RegionLostError,
            match=r"region 1 cannot be reached: its connections broke .* within 3 s \(regions.timeout_s\)",
        ):
            view.wait([pending], "a piece", may_be_late=True)


def test_a_pair_that_was_dropped_is_not_called_again() -> None:
    """The other end hears a goodbye, or is not known any more."""
    with routed() as both:
        views = [wire.view([0, 1], 1) for wire in both.wires]
        both.wires[1].drop(0)
        with pytest.raises(LinkError):
            views[0].swap(torch.zeros(1), "a number")
        wait_until(lambda: not any("connect" in each.name for each in threading.enumerate()))
