"""Two processes find a connection: whoever reaches the other one is enough, and both end with the same one."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from hf_cocodc.net import reaching
from hf_cocodc.net.mailbox import mailbox
from hf_cocodc.net.port import TOKEN_BYTES, Port
from hf_cocodc.net.reaching import Found, NotReached, Search
from tests.link.memory import at_once
from tests.net.storages import folder_url
from tests.net.swallowing import Swallowing

HOST = "127.0.0.1"


@contextmanager
def nowhere() -> Iterator[tuple[str, int]]:
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()


@contextmanager
def somebody_else() -> Iterator[tuple[str, int]]:
    """Somebody who takes every call, says something, and closes it."""
    with socket.create_server((HOST, 0)) as server:

        def work() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                caller.close()

        threading.Thread(target=work, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


def search(*told: tuple[tuple[str, int], ...] | None) -> tuple[Found, Found]:
    """What both ends find, if they tell each other these addresses; None for the right one."""
    ports, token = [Port(HOST), Port(HOST)], secrets.token_bytes(TOKEN_BYTES)
    searches = [Search(asks, 10.0) for asks in (True, False)]
    try:
        for port, each in zip(ports, searches, strict=True):
            port.expect(token, each.take)
        where = [
            ((HOST, port.number),) if addresses is None else addresses
            for port, addresses in zip(ports, told, strict=True)
        ]
        first, second = at_once(
            lambda: searches[0].run(where[1], token), lambda: searches[1].run(where[0], token)
        )
        return first, second
    finally:
        for port in ports:
            port.close()


def speak(first: Found, second: Found) -> None:
    """They are two ends of one connection, on which nothing else was said."""
    for one, other in ((first, second), (second, first)):
        one.connection.sendall(b"hello")
        assert other.connection.recv(100) == b"hello"
    for each in (first, second):
        each.connection.close()


def test_the_lower_regions_way_is_taken_where_both_exist() -> None:
    first, second = search(None, None)
    assert first.address is not None and second.address is None
    speak(first, second)


def test_one_way_is_enough() -> None:
    """In either direction, whatever is wrong with the other one."""
    with nowhere() as wrong:
        first, second = search((wrong,), None)
        assert (first.address is not None, second.address is not None) == (True, False)
        speak(first, second)
        first, second = search(None, (wrong,))
        assert (first.address is not None, second.address is not None) == (False, True)
        speak(first, second)


def test_who_is_called_before_it_searches_has_found_a_way() -> None:
    """Or has closed it, if it never does."""
    port, tokens = Port(HOST), [secrets.token_bytes(TOKEN_BYTES) for _ in range(2)]
    called = [Search(False, 10.0) for _ in tokens]
    for token, each in zip(tokens, called, strict=True):
        port.expect(token, each.take)
    first, unmet = (Search(True, 10.0).run(((HOST, port.number),), token) for token in tokens)
    second = called[0].run((), tokens[0])
    assert second.address is None and first.words == second.words and len(set(first.words)) > 200
    speak(first, second)
    called[1].close()
    assert unmet.connection.recv(1) == b""
    unmet.connection.close()
    port.close()


def test_one_that_answers_and_expects_nobody_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a router, only this end reaches the other one, which may begin later."""
    monkeypatch.setattr(reaching, "REACH_S", 1.0)
    port, token = Port(HOST), secrets.token_bytes(TOKEN_BYTES)
    first, second = Search(True, 10.0), Search(False, 10.0)

    def late() -> Found:
        time.sleep(1.5)
        port.expect(token, second.take)
        return second.run((), token)

    speak(*at_once(lambda: first.run(((HOST, port.number),), token), late))
    port.close()


def test_several_addresses_are_tried() -> None:
    """One at which somebody else answers is not taken for the other end."""
    with nowhere() as wrong, somebody_else() as foreign:
        port = Port(HOST)
        token = secrets.token_bytes(TOKEN_BYTES)
        searches = [Search(asks, 10.0) for asks in (True, False)]
        port.expect(token, searches[1].take)
        where = wrong, foreign, (HOST, port.number)
        first, second = at_once(
            lambda: searches[0].run(where, token), lambda: searches[1].run((wrong,), token)
        )
        assert first.address == (HOST, port.number)
        speak(first, second)
        port.close()


def test_a_way_on_which_large_packets_vanish_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken, and the error names the MTU: a run hung there until its time-out. Another way is taken."""
    for name, seconds in (("REACH_S", 1.0), ("_LARGE_S", 0.5)):
        monkeypatch.setattr(reaching, name, seconds)
    port, token = Port(HOST), secrets.token_bytes(TOKEN_BYTES)
    way = Swallowing(f"{HOST}:{port.number}")
    with nowhere() as wrong:
        for places in ([(HOST, way.port)], [(HOST, way.port), (HOST, port.number)]):
            searches = [Search(asks, 10.0) for asks in (True, False)]
            port.expect(token, searches[1].take)
            runs = partial(searches[0].run, places, token), partial(searches[1].run, (wrong,), token)
            if len(places) == 1:
                with pytest.raises(NotReached, match=r"small packets pass, and large ones vanish .*MTU"):
                    at_once(*runs)
                continue
            first, second = at_once(*runs)
            assert first.address == (HOST, port.number)
            speak(first, second)
    for each in (way, port):
        each.close()


@contextmanager
def swallowed() -> Iterator[tuple[str, int]]:
    """An address that answers no call: the queue of the one that listens there is full."""
    with (
        socket.create_server((HOST, 0), backlog=0) as full,
        socket.socket() as first,
        socket.socket() as second,
    ):
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield full.getsockname()


def test_addresses_that_swallow_calls_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called side by side: one after the other, the third would not be called before the search is over."""
    monkeypatch.setattr(reaching, "REACH_S", 2.0)
    with swallowed() as one, swallowed() as two, nowhere() as wrong:
        port, token = Port(HOST), secrets.token_bytes(TOKEN_BYTES)
        searches = [Search(asks, 10.0) for asks in (True, False)]
        port.expect(token, searches[1].take)
        where = one, two, ("localhost", port.number)
        first, second = at_once(
            lambda: searches[0].run(where, token), lambda: searches[1].run((wrong,), token)
        )
        assert first.address == (HOST, port.number), "of a name, the address that has answered"
        speak(first, second)
        port.close()


def test_both_ends_agree_on_one_of_two_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both call at the same moment."""
    monkeypatch.setattr(reaching, "_HEAD_START_S", 0.0)
    for _ in range(20):
        first, second = search(None, None)
        assert (first.address is None) != (second.address is None)
        speak(first, second)


def test_where_no_way_exists_the_error_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "REACH_S", 0.5)
    with nowhere() as wrong, somebody_else() as foreign, pytest.raises(NotReached) as caught:
        search((wrong, foreign), (wrong, foreign))
    assert f"{HOST}:{wrong[1]} (Connection refused)" in str(caught.value)
    assert f"{HOST}:{foreign[1]} (what answers there is not that region)" in str(caught.value)


def test_an_end_that_comes_to_the_storage_and_is_too_slow_is_named(tmp_path: Path) -> None:
    """It is the right one: `regions.timeout_s` is too short for this storage."""
    url, token, sockets = folder_url(tmp_path), secrets.token_bytes(TOKEN_BYTES), list[socket.socket]()

    def come() -> None:
        with contextlib.suppress(OSError):
            sockets.append(mailbox(url).meet((token + bytes(1)).hex(), False, 5.0))

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(
        NotReached, match=r"the other end has come, and has not answered within 1 s, regions\.timeout_s"
    ):
        Search(True, 1.0, storage=url).run((), b"", token)
    other.join()
    for each in sockets:
        each.close()
