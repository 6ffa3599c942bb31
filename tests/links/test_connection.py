"""One connection: messages arrive in the memory that asks for them, and those of void attempts nowhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from hf_cocodc.links.connection import Connection, ConnectionLost, Operation
from tests.links.memory import PATIENCE_S, wait_until

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    both = Connection(one, "a"), Connection(other, "b")
    yield both
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


def test_what_follows_a_message_is_done_once_it_has_come(ends: Ends) -> None:
    done: list[str] = []
    operation = Operation(1, 0, full(0), lambda: done.append("opened"))
    ends[1].receive(operation)
    send(ends[0], 1, 0, full(1))
    operation.wait(PATIENCE_S)
    assert done == ["opened"]


def test_what_the_other_end_has_taken_was_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it closes the connection at once: at the end of a run it needs nothing more."""
    send_it = Connection._send

    def send_and_end(end: Connection, operation: Operation) -> None:
        send_it(end, operation)
        end.close()

    monkeypatch.setattr(Connection, "_send", send_and_end)
    send(ends[0], 1, 0, full(1)).wait(PATIENCE_S)
