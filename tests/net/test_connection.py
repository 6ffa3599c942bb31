"""One connection: messages arrive in the memory that asks for them, and those of void attempts nowhere."""

from __future__ import annotations

import contextlib
import math
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from hf_cocodc.net import pipe
from hf_cocodc.net.awake import awake_s
from hf_cocodc.net.connection import Connection, ConnectionLost, Operation
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.pipe import Pipe, Swallowed
from tests.link.memory import PATIENCE_S, at_once, wait_until
from tests.net.ends import end_with_it, ends_on, sealing

KEYS = Keys(bytes(range(32)))
Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    both = ends_on((one, other))
    yield both[0], both[1]
    for each in both:
        each.close()


def full(value: int, size: int = 100) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def send(end: Connection, order: int, tag: int, memory: torch.Tensor) -> Operation:
    operation = Operation(order, tag, memory)
    end.send(operation)
    return operation


def ask(end: Connection, order: int, tag: int, size: int = 100) -> Operation:
    operation = Operation(order, tag, torch.zeros(size, dtype=torch.uint8))
    end.receive(operation)
    return operation


def come(operation: Operation) -> list[int]:
    """Each value that has come."""
    operation.wait(PATIENCE_S)
    return operation.memory.unique().tolist()


@pytest.mark.parametrize("size", [0, 1, 100, 3 << 20])
def test_messages_arrive_where_they_are_asked_for(ends: Ends, size: int) -> None:
    """By their tags, and those of one tag in their sequence; before or after they were sent; both ways at once."""
    asked = [ask(ends[1], 5, tag, size) for tag in (1, 2, 1)]
    for tag, value in ((1, 11), (1, 12), (2, 21)):
        send(ends[0], 5, tag, full(value, size))
        send(ends[1], 5, tag, full(value + 100, size))
    found = [come(each) for each in asked]
    late = [come(ask(ends[0], 5, tag, size)) for tag in (1, 1, 2)]
    assert found == ([[11], [21], [12]] if size else [[]] * 3)
    assert late == ([[111], [112], [121]] if size else [[]] * 3)


def test_a_message_of_a_later_attempt_waits(ends: Ends) -> None:
    """The other end may be ahead."""
    send(ends[0], 7, 0, full(7))
    early = ask(ends[1], 6, 0)
    with pytest.raises(TimeoutError):
        early.wait(0.1)
    ends[1].revoke(6, LookupError("void"))
    with pytest.raises(LookupError):
        early.wait(PATIENCE_S)
    assert come(ask(ends[1], 7, 0)) == [7]


def test_messages_of_void_attempts_are_passed_over(ends: Ends) -> None:
    """Nobody asks for them any more: they keep no other message from coming, however large they are."""
    for tag in range(3):
        send(ends[0], 3, tag, full(3, 3 << 20))
    ends[1].revoke(3, LookupError("void"))
    send(ends[0], 4, 0, full(4))
    assert come(ask(ends[1], 4, 0)) == [4]
    send(ends[0], 5, 9, full(5))
    send(ends[0], 6, 0, full(6))
    assert come(ask(ends[1], 6, 0)) == [6], "who asks for a later attempt asks for no earlier one any more"


def test_what_was_not_sent_of_a_void_attempt_is_not_sent(ends: Ends) -> None:
    """It does not delay the next attempt: the other end takes none of it."""
    operations = [send(ends[0], 3, tag, full(3, 8 << 20)) for tag in range(4)]
    ends[0].revoke(3, LookupError("void"))
    ends[1].revoke(3, LookupError("void"))
    send(ends[0], 4, 0, full(4))
    assert come(ask(ends[1], 4, 0)) == [4]
    for operation in operations:
        operation.wait(PATIENCE_S)


def test_memory_of_a_void_message_is_the_connections_own(ends: Ends) -> None:
    """A message that is just arriving when its attempt becomes void arrives, and no error stays behind."""
    taken = ask(ends[1], 1, 0, 64 << 20)
    send(ends[0], 1, 0, full(1, 64 << 20))
    wait_until(lambda: bool(taken.memory[0]))
    ends[1].revoke(1, LookupError("void"))
    send(ends[0], 2, 0, full(2))
    assert come(ask(ends[1], 2, 0)) == [2]
    assert come(taken) == [1]


@pytest.mark.parametrize("has_unread", [False, True])
def test_a_connection_knows_whether_the_other_end_has_closed_its_socket_in_good_order(
    has_unread: bool,
) -> None:
    """Until it has another one. The system resets what a killed process has not read."""

    def two() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return socket.create_connection(server.getsockname()), server.accept()[0]

    def answer(there: socket.socket) -> Pipe:
        bare = Pipe(there)
        bare.open(PATIENCE_S, None)
        bare.send(bytes(8))
        bare.fill(memoryview(bytearray(8)))
        return bare

    end = Connection("a", lambda connection: None)
    for _ in range(2):
        here, there = two()
        at_once(partial(end.attach, here), partial(answer, there))
        assert not end.is_closed
        if has_unread:
            send(end, 1, 1, full(1)).wait(PATIENCE_S)
            assert there.recv(1, socket.MSG_PEEK)
        there.close()
        wait_until(lambda: end.broken_at < math.inf)
        assert end.is_closed != has_unread
    end.close()


def test_the_end_of_a_connection_ends_all_that_waits(ends: Ends) -> None:
    """At both ends, in whatever thread; what was sent before arrives."""
    assert come(ask(ends[1], 1, 0)) == [1] if send(ends[0], 1, 0, full(1)) else None
    waiting = [ask(end, 1, 5) for end in ends]
    ends[0].close()
    ends[0].close()
    for operation in waiting:
        with pytest.raises(ConnectionLost):
            operation.wait(PATIENCE_S)
    for end in ends:
        for call in (end.send, end.receive):
            with pytest.raises(ConnectionLost):
                call(Operation(2, 0, full(0)))
    wait_until(lambda: not any(end._sender.is_alive() or end._receiver.is_alive() for end in ends))


def test_a_message_of_another_size_ends_the_connection(ends: Ends) -> None:
    asked = ask(ends[1], 1, 0, 99)
    send(ends[0], 1, 0, full(1))
    with pytest.raises(ConnectionLost, match="100 bytes have come where 99 were asked for"):
        asked.wait(PATIENCE_S)


def test_what_the_other_end_has_taken_was_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it closes the connection at once: at the end of a run it needs nothing more."""
    write = Connection._write

    def write_and_end(end: Connection, pipe: Pipe, operation: Operation | None, tag: int | None) -> None:
        write(end, pipe, operation, tag)
        if operation is not None:  # a look at what else there is may come first
            end.close()

    monkeypatch.setattr(Connection, "_write", write_and_end)
    send(ends[0], 1, 0, full(1)).wait(PATIENCE_S)


class Lasting:
    """Two ends whose sockets break, and are replaced at once."""

    def __init__(self, keys: Keys | None) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._broken: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.sockets = self._connect()
        self.ends = ends_on(self.sockets, (keys, keys), broken=self._broken.put)
        self.count = 0

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        one = socket.create_connection(self._server.getsockname())
        other, _ = self._server.accept()
        return one, other

    def cut(self, how: str) -> None:
        """Break the sockets: both ends notice, or one of them alone."""
        for each in self.sockets[: 1 if how == "one" else 2]:
            if how == "reset":
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.mend()

    def mend(self) -> None:
        """Give both ends new sockets."""
        self.sockets = self._connect()
        at_once(*(partial(end.attach, each) for end, each in zip(self.ends, self.sockets, strict=True)))
        self.count += 1

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._server.close()


@pytest.fixture(params=[None, KEYS], ids=["open", "sealed"])
def lasting(request: pytest.FixtureRequest) -> Iterator[Lasting]:
    found = Lasting(request.param)
    yield found
    found.close()


@pytest.mark.parametrize("how", ["close", "reset", "one"])
@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_no_message_is_lost_or_doubled_when_sockets_break(lasting: Lasting, how: str, size: int) -> None:
    """Whoever sends uses its memory again as soon as the operation has ended."""
    rng, count = random.Random(size), 200 if size < 1 << 20 else 40

    def talk(end: Connection, value: int) -> list[int]:
        memory, found = torch.zeros(size, dtype=torch.uint8), []
        for number in range(count):
            asked = ask(end, 1, number % 3, size)
            memory[:] = (value + number) % 251
            send(end, 1, number % 3, memory).wait(PATIENCE_S)
            memory[:] = 255
            found += come(asked)
            time.sleep(0.001)
        return found

    def cut() -> list[int]:
        while not over.wait(rng.random() * 0.02):
            lasting.cut(how)
        return []

    def both() -> list[int]:
        try:
            found = at_once(partial(talk, lasting.ends[0], 0), partial(talk, lasting.ends[1], 100))
        finally:
            over.set()
        return found[0] + found[1]

    over = threading.Event()
    found, _ = at_once(both, cut)
    assert found == [(100 + each) % 251 for each in range(count)] + [each % 251 for each in range(count)]
    assert lasting.count > 5, "the sockets have not broken"


def test_what_was_sent_before_memory_changes_comes_as_it_was(lasting: Lasting) -> None:
    """Also if an attempt becomes void at the sender first: the other end may not know yet, and complete it."""
    for value, ended in ((1, "waited for"), (2, "void")):
        memory = full(value, 1000)
        lasting.sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        operation = send(lasting.ends[0], value, 0, memory)
        wait_until(operation._ended.is_set)
        if ended == "void":
            lasting.ends[0].revoke(value, LookupError("void"))
        else:
            operation.wait(PATIENCE_S)
        memory[:] = 99
        lasting.cut("close")
        assert come(ask(lasting.ends[1], value, 0, 1000)) == [value]


def test_what_is_acknowledged_is_not_kept(lasting: Lasting) -> None:
    for number in range(100):
        asked = ask(lasting.ends[1], 1, 0, 100_000)
        send(lasting.ends[0], 1, 0, full(number, 100_000)).wait(PATIENCE_S)
        come(asked)
    wait_until(lambda: len(lasting.ends[0]._sent) < 16)


@pytest.mark.parametrize("how", ["whole", "cut"])
def test_who_drains_a_connection_knows_that_all_has_come(lasting: Lasting, how: str) -> None:
    """Also what the other end has no reason to acknowledge yet; and over the next socket, if this one breaks."""
    asked = [ask(lasting.ends[1], 1, 0, 1000) for _ in range(3)]
    for _ in asked:
        send(lasting.ends[0], 1, 0, full(3, 1000)).wait(PATIENCE_S)
    for each in asked:
        come(each)
    assert lasting.ends[0]._sent
    if how == "cut":
        lasting.sockets[0].shutdown(socket.SHUT_RDWR)
        wait_until(lambda: lasting.ends[0]._pipe is None)
        threading.Timer(0.3, lasting.mend).start()
    lasting.ends[0].drain(awake_s() + (0.0 if how == "cut" else PATIENCE_S))
    assert not lasting.ends[0]._sent
    if how == "cut":
        wait_until(lambda: lasting.count == 1)


def test_draining_ends_with_the_time_or_the_connection(lasting: Lasting) -> None:
    lasting.ends[0].drain(awake_s() + PATIENCE_S)
    send(lasting.ends[0], 1, 0, full(1)).wait(PATIENCE_S)  # nobody asks for it
    assert not lasting.ends[0].drain(awake_s() + 0.3)
    threading.Timer(0.3, lasting.ends[1].close).start()
    lasting.ends[0].drain(awake_s() + PATIENCE_S)
    assert lasting.ends[0]._sent


def test_a_void_message_that_has_come_in_part_waits_no_longer(lasting: Lasting) -> None:
    taken = ask(lasting.ends[1], 1, 0, 64 << 20)
    send(lasting.ends[0], 1, 0, full(1, 64 << 20))
    wait_until(lambda: bool(taken.memory[0]))
    lasting.ends[1].revoke(1, LookupError("void"))
    lasting.cut("close")
    with contextlib.suppress(LookupError):  # it may have come to its end before
        taken.wait(PATIENCE_S)
    send(lasting.ends[0], 2, 0, full(2))
    assert come(ask(lasting.ends[1], 2, 0)) == [2]


@pytest.mark.parametrize("count", [0, 3])
def test_a_count_that_cannot_be_is_not_believed(lasting: Lasting, count: int) -> None:
    """Fewer messages than it has acknowledged, or more than were sent: what follows would come in the place of others."""
    for number in range(2):
        asked = ask(lasting.ends[1], 1, 0)
        send(lasting.ends[0], 1, 0, full(number)).wait(PATIENCE_S)
        come(asked)
    lasting.ends[0].drain(awake_s() + PATIENCE_S)
    one, other = lasting._connect()
    pipe = Pipe(other)
    opening = threading.Thread(target=pipe.open, args=(PATIENCE_S, lasting.ends[1]._ciphers_for))
    opening.start()

    def say() -> None:
        opening.join()
        pipe.send(struct.pack(">Q", count))

    threading.Thread(target=say).start()
    with pytest.raises(
        ConnectionLost,
        match=f"{count} messages have come, and that cannot be: it has had 2 before, and 2 were",
    ):
        lasting.ends[0].attach(one)
    other.close()


def test_a_goodbye_ends_both(lasting: Lasting) -> None:
    """It is no break: nobody tries to come back."""
    asked = ask(lasting.ends[1], 1, 0)
    lasting.ends[0].close()
    with pytest.raises(ConnectionLost, match="the other end has closed the connection"):
        asked.wait(PATIENCE_S)
    with pytest.raises(ConnectionLost):
        lasting.ends[1].attach(socket.socket())
    assert lasting._broken.empty()


def test_a_broken_connection_that_ends_lets_all_go(lasting: Lasting) -> None:
    with contextlib.suppress(OSError):
        lasting.sockets[0].shutdown(socket.SHUT_RDWR)
    end = lasting._broken.get(timeout=PATIENCE_S)
    waiting = [send(end, 1, 0, full(1, 1 << 20)), ask(end, 1, 0)]
    with pytest.raises(TimeoutError):
        waiting[0].wait(0.1)
    end.end(ConnectionLost("it has not come back"))
    for operation in waiting:
        with pytest.raises(ConnectionLost, match="it has not come back"):
            operation.wait(PATIENCE_S)
    wait_until(lambda: not any(each.is_alive() for each in (end._sender, end._receiver)))


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "sealed"])
def test_a_way_on_which_only_small_packets_pass_is_named(
    keys: Keys | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The network may change while a run trains: then a connection cannot come back, and the log names the MTU."""
    monkeypatch.setattr(pipe, "_PROBE_S", 0.3)
    one, other = socket.socketpair()
    threading.Thread(target=lambda: other.sendall(other.recv(32))).start()
    end = Connection("a", end_with_it, ciphers_for=sealing(keys, True))
    with pytest.raises(Swallowed, match="MTU"):
        end.attach(one)
    assert "MTU" in caplog.text
    end.close()
    other.close()
