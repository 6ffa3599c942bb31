"""The store listens where it is told to, and nowhere else."""

from __future__ import annotations

import socket

import pytest

from hf_cocodc.cli.main import parse
from hf_cocodc.errors import InputError
from hf_cocodc.meeting.store import connect_store, serve_store


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


def test_an_address_of_another_machine_is_refused() -> None:
    """The message names the address and both options."""
    with pytest.raises(
        InputError, match="cannot listen on 203.0.113.9:0: .* Choose another --host or --port"
    ):
        serve_store("203.0.113.9")
