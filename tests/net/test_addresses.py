"""Which address of this machine the other regions hear of."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hf_cocodc.errors import InputError
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
