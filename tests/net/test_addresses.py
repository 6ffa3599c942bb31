"""Which address of this machine the other regions hear of."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.net import addresses
from hf_cocodc.net.addresses import own_address


def an_address(address: str) -> Any:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, address=address)


def test_the_address_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 where there is one. A host may have IPv6 alone; nobody elsewhere reaches its link-local addresses."""
    ours = {
        "eth0": ["fe80::1%eth0", "2001:db8::1", "10.0.0.1"],
        "wg0": ["fe80::2%wg0", "fd00::2"],
        "eth1": ["fe80::3%eth1"],
    }
    found = {name: [an_address(each) for each in addresses] for name, addresses in ours.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    there = "coordinator:29650"
    assert own_address(there, "eth0") == "10.0.0.1"
    assert own_address(there, "wg0") == "fd00::2"
    with pytest.raises(
        InputError, match=r"interface='eth1' has no address .* reach. Set it to one that has: eth0, wg0\."
    ):
        own_address(there, "eth1")
    with pytest.raises(InputError, match="interface='wg1' is not a network interface of this machine"):
        own_address(there, "wg1")


def test_the_address_of_a_real_interface() -> None:
    assert own_address("coordinator:29650", "lo") == "127.0.0.1"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["", "::"])
def test_who_listens_everywhere_takes_both_families(host: str) -> None:
    with addresses.listen_at(host, 0) as listener:
        for there in ("127.0.0.1", "::1"):
            socket.create_connection((there, listener.getsockname()[1]), 5.0).close()


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have an address first that this machine has not, or to which no way leads."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        places = [("203.0.113.1", 0), ("127.0.0.1", 0)]
        known = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: known)
        with addresses.listen_at("many.example", 0) as listener:
            assert listener.getsockname()[0] == "127.0.0.1"
        known[:] = [
            (99, socket.SOCK_DGRAM, 0, "", ("::1", 1)),
            (socket.AF_INET, socket.SOCK_DGRAM, 0, "", other.getsockname()),
        ]
        assert addresses.own_address("many.example:1", None) == "127.0.0.1"
