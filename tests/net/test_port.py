"""The one port of a region: who says a token that is expected is handed on, and strangers cost nothing."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.net import port as port_module
from hf_cocodc.net.port import TOKEN_BYTES, Port, dial, named, tuned
from tests.link.memory import PATIENCE_S

HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[Port]:
    with_port = Port(HOST)
    yield with_port
    with_port.close()


def expected(port: Port) -> tuple[bytes, queue.SimpleQueue[tuple[socket.socket, int]]]:
    token, came = secrets.token_bytes(TOKEN_BYTES), queue.SimpleQueue[tuple[socket.socket, int]]()
    port.expect(token, lambda *caller: came.put(caller))
    return token, came


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end closes the connection."""
    connection.settimeout(PATIENCE_S)
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionError:
            return True


def test_a_caller_gets_to_whom_expects_it(port: Port) -> None:
    """With its number, and with all that it says after that."""
    (first, at_first), (second, at_second) = expected(port), expected(port)
    callers = [dial(HOST, port.number, token, number, 5.0) for token, number in ((second, 7), (first, 0))]
    for caller, came, number in zip(callers, (at_second, at_first), (7, 0), strict=True):
        caller.sendall(b"and more")
        connection, told = came.get(timeout=PATIENCE_S)
        assert told == number and connection.gettimeout() is None
        assert connection.recv(100) == b"and more"
        connection.close()
        caller.close()


def test_a_greeting_may_come_in_pieces(port: Port) -> None:
    token, came = expected(port)
    with socket.create_connection((HOST, port.number)) as caller:
        for piece in (token[:1], token[1:20], token[20:] + b"\3"):
            caller.sendall(piece)
            time.sleep(0.05)
        connection, number = came.get(timeout=PATIENCE_S)
        assert number == 3
        connection.close()


def test_who_is_not_expected_is_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token at once; half of one, or nothing, after a while. A token counts only while somebody expects it."""
    monkeypatch.setattr(port_module, "_GREET_S", 0.3)
    token, came = expected(port)
    assert has_ended(dial(HOST, port.number, secrets.token_bytes(TOKEN_BYTES), 0, 5.0))
    with socket.create_connection((HOST, port.number)) as half:
        half.sendall(token[:-1])
        assert has_ended(half)
    port.forget(token)
    port.forget(token)
    assert has_ended(dial(HOST, port.number, token, 0, 5.0))
    assert came.empty()


def test_strangers_keep_nobody_waiting(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and whatever they say: they hold few places, and lose them to others."""
    monkeypatch.setattr(port_module, "_MOST_CALLERS", 8)
    token, came = expected(port)
    strangers = [socket.create_connection((HOST, port.number)) for _ in range(40)]
    for number, each in enumerate(strangers):
        each.sendall(bytes([number]) * (number % TOKEN_BYTES + 1))
    caller = dial(HOST, port.number, token, 1, 5.0)
    connection, _ = came.get(timeout=PATIENCE_S)
    # half a greeting each: all but those who hold a place are closed
    still = [each for each in strangers if not _is_closed(each)]
    assert len(still) <= 8
    for each in (*strangers, caller, connection):
        each.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_closed_port_answers_nobody() -> None:
    before = set(threading.enumerate())
    port = Port(HOST)
    token, came = expected(port)
    caller = dial(HOST, port.number, token, 0, 5.0)
    connection, _ = came.get(timeout=PATIENCE_S)
    port.close()
    with pytest.raises(OSError):
        dial(HOST, port.number, token, 0, 1.0)
    connection.sendall(b"x")
    assert caller.recv(1) == b"x", "what was handed on stays"
    caller.close()
    connection.close()
    assert not set(threading.enumerate()) - before


def test_a_port_that_is_taken_is_named(port: Port) -> None:
    with pytest.raises(InputError, match=rf"cannot listen on {HOST}:{port.number}: .*regions\.port"):
        Port(HOST, port.number)
    with pytest.raises(InputError, match="no machine has a port above 65535"):
        Port(HOST, 65_536)  # that of a rank


def test_version_six() -> None:
    try:
        port = Port("::1")
    except InputError:
        pytest.skip("this machine has no IPv6")
    token, came = expected(port)
    caller = dial("::1", port.number, token, 0, 5.0)
    came.get(timeout=PATIENCE_S)[0].close()
    caller.close()
    port.close()
    assert named("::1", 5) == "[::1]:5" and named("a.b", 5) == "a.b:5"


def test_a_region_that_takes_nothing_for_long_keeps_its_connections() -> None:
    """The kernel would end them after its user time-out: a late region would be sent the same again and again."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as made,
    ):
        tuned(made)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
