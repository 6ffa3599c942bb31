"""The store listens where it is told to, and nowhere else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from hf_cocodc.cli.main import parse
from hf_cocodc.errors import InputError, MeetingError
from hf_cocodc.meeting import store as meeting_store
from hf_cocodc.meeting.store import SteadyStore, StoreAwayError, connect_store, serve_store
from tests.processes.stores import StoreProcess

T = TypeVar("T")


@pytest.mark.parametrize("host", ["127.0.0.2", "127.0.0.1", "0.0.0.0", "localhost"])
def test_a_store_of_one_address_comes_up(host: str) -> None:
    """Also of an address that is not the one to which localhost leads; no other address reaches it."""
    server = serve_store(host)
    connect_store(f"{'127.0.0.1' if host == '0.0.0.0' else host}:{server.port}", 5.0).set("key", "value")
    assert server.get("key") == b"value"
    if host == "127.0.0.2":
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_the_command_serves_no_other_machine_unless_told() -> None:
    """hf-cocodc store listens on the loopback by default."""
    assert parse(["store"]).host == "127.0.0.1"


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "http"])
def test_another_server_is_not_taken_for_a_store(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One paragraph within the time-out, whatever listens there."""
    monkeypatch.setattr(meeting_store, "LOOKUP_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer_all, server, says)
            with pytest.raises(MeetingError, match=f"what listens at {address} is not a store") as caught:
                connect_store(address, 1.0)
            server.shutdown(socket.SHUT_RDWR)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_name_server_that_is_slow_keeps_nobody_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks up the name of the store's address at every connection: that takes longer than any call may take."""
    connect = dist.TCPStore

    def slowly(*args: Any, **options: Any) -> dist.TCPStore:
        time.sleep(1.0)
        assert options["timeout"].total_seconds() > 1.0, "torch counts it, too"
        return connect(*args, **options)

    server = serve_store()
    monkeypatch.setattr(dist, "TCPStore", slowly)
    address = f"127.0.0.1:{server.port}"
    connect_store(address, 0.5).set("key", "value")
    assert SteadyStore(address, timeout_s=0.5).peek("key") == b"value"


def test_a_store_that_is_not_reached_names_the_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens, but does not answer: the message has the line for /etc/hosts."""
    monkeypatch.setattr(meeting_store, "LOOKUP_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = SteadyStore(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(
            StoreAwayError, match="does not answer.*put the line '::ffff:127.0.0.1 store' into /etc/hosts"
        ):
            store.peek("key")


def answer_all(server: socket.socket, says: bytes) -> None:
    """Accept every connection, say the same to each, and keep it open."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as kept:
        while True:
            kept.enter_context(server.accept()[0]).sendall(says)


def test_an_address_of_another_machine_is_refused() -> None:
    """The message names the address and both options."""
    with pytest.raises(
        InputError, match="cannot listen on 203.0.113.9:0: .* Choose another --host or --port"
    ):
        serve_store("203.0.113.9")


def until_it_answers(call: Callable[[], T]) -> T:
    deadline = time.monotonic() + 60
    while True:
        try:
            return call()
        except StoreAwayError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_store_that_freezes_dies_and_comes_back_empty(tmp_path: Path) -> None:
    """Calls end in time, with few threads; they succeed again as soon as the store, or another in its place, answers."""
    with StoreProcess(tmp_path) as process:
        store = SteadyStore(process.address, timeout_s=0.5)
        before = threading.active_count()
        assert (
            store.compare_set("decision", "", "first")
            == b"first"
            == store.compare_set("decision", "", "second")
        )
        store.set("key", "value")
        assert (store.peek("key"), store.peek("no key"), store.add("number", 2)) == (b"value", b"", 2)
        process.freeze()
        store.timeout_s = 0.05
        for _ in range(50):
            with pytest.raises(StoreAwayError, match=f"the store at {process.address} does not answer"):
                store.peek("key")
        assert threading.active_count() <= before + 3
        store.timeout_s = 0.5
        process.thaw()
        assert until_it_answers(lambda: store.peek("key")) == b"value"
        process.kill()
        with pytest.raises(StoreAwayError, match="has gone"):
            store.peek("key")
        process.start()
        assert until_it_answers(lambda: store.peek("key")) == b""
        store.set("key", "again")
        assert store.peek("key") == b"again"
