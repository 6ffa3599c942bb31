"""Lines about the way to other regions: each from facts that are given."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.settings import RegionConfig
from hf_cocodc.tools.doctor import facts, way
from hf_cocodc.tools.doctor.facts import OK, UNKNOWN, WARN, WRONG, Network

FAR = Network(
    address="10.0.0.2",
    interface="wg0",
    is_up=True,
    congestion="bbr",
    known=("reno", "cubic"),
    ports=(32768, 60999),
    rtt_s=0.1,
)
STORE = "10.0.0.1:29650"
BBR = "sysctl -w net.ipv4.tcp_congestion_control=bbr"


@pytest.mark.parametrize(
    ("changes", "line", "level", "words", "command"),
    [
        ({}, "address", OK, "announces 10.0.0.2 on wg0", None),
        ({"is_up": False}, "address", WRONG, "10.0.0.2 on wg0: the interface is down", "ip link set wg0 up"),
        ({}, "port", OK, "listens on any free port of 32768 .. 60999", None),
        ({}, "congestion", OK, "TCP bbr", None),
        ({"congestion": "cubic"}, "congestion", WARN, "TCP cubic needs seconds", f"modprobe tcp_bbr; {BBR}"),
        ({"congestion": "cubic", "known": ("bbr",)}, "congestion", WARN, "TCP cubic", BBR),
        ({"congestion": "cubic", "rtt_s": 0.001}, "congestion", OK, "a round trip is short (1.0 ms)", None),
    ],
)  # fmt: skip
def test_each_line(changes: dict[str, Any], line: str, level: str, words: str, command: str | None) -> None:
    """Its level, its words, and the command that mends it."""
    network = replace(FAR, **changes)
    more = {"address": (STORE,), "congestion": (None,), "port": (None,)}.get(line, ())
    found = getattr(way, line)(network, *more)
    assert (found.level, words in found.words) == (level, True), found
    assert found.command == command or (command is not None and str(found.command).startswith(command))


@pytest.mark.parametrize("line", ["port", "congestion"])
def test_what_a_machine_does_not_say_is_not_known(line: str) -> None:
    """Elsewhere than on Linux nothing is made up."""
    more = () if line == "packets" else (None,)
    found = getattr(way, line)(Network(), *more)
    assert (found.level, found.words) == (UNKNOWN, "not known here")


@pytest.mark.parametrize(
    ("address", "coordinator", "level", "words"),
    [
        ("10.0.0.2", STORE, OK, "announces 10.0.0.2"),
        ("192.168.1.7", "8.8.8.8:29650", WARN, "behind NAT"),
        ("127.0.0.1", STORE, WRONG, "which no other machine reaches"),
        ("127.0.0.1", "127.0.0.1:29650", OK, "all regions must run on this machine"),
        (None, STORE, UNKNOWN, "not known here"),
    ],
)
def test_the_address_that_is_announced(address: str | None, coordinator: str, level: str, words: str) -> None:
    """Others must be able to call it."""
    found = way.address(replace(FAR, address=address), coordinator)
    assert (found.level, words in found.words) == (level, True), found


NEAR = replace(FAR, rtt_s=0.0003)
NO_GLOO = "torch 2.6.0 has no gloo on this machine"


@pytest.mark.parametrize(
    ("settings", "more", "level", "words"),
    [
        ({}, {}, OK, "tcp, gloo or nccl: regions choose by round trips and devices when they meet"),
        ({}, {"has_secret": True}, OK, "tcp: a secret is set, and a process group does not encrypt"),
        ({}, {"no_gloo": NO_GLOO}, OK, f"tcp: {NO_GLOO}"),
        ({"rate_limit": 90.0}, {"no_gloo": NO_GLOO}, OK, "tcp: regions.rate_limit is set"),
        ({"connections": 4}, {}, OK, "tcp: regions.connections is set"),
        ({"congestion": "system"}, {}, OK, "tcp: regions.congestion is set"),
        ({"announce": "203.0.113.7"}, {}, OK, "tcp: regions.announce is set"),
        ({"link": "tcp"}, {"no_gloo": NO_GLOO}, OK, "tcp, by regions.link"),
        ({"link": "gloo"}, {}, OK, "gloo, by regions.link: it takes any free ports between the machines"),
        ({"link": "gloo"}, {"has_secret": True}, WARN, "does not encrypt payloads of means. Only all else is encrypted"),
        ({"link": "nccl"}, {"has_secret": True, "no_gloo": NO_GLOO}, WARN, "does not encrypt payloads of means"),
        ({"link": "gloo", "announce": "203.0.113.7"}, {}, WARN, "and not the addresses of regions.announce"),
        ({"link": "gloo"}, {"no_gloo": NO_GLOO}, WRONG, f"regions.link=gloo, but {NO_GLOO}"),
    ],
)  # fmt: skip
def test_what_carries_payloads(
    settings: dict[str, Any], more: dict[str, Any], level: str, words: str
) -> None:
    """As far as one machine knows, with the reason; what does not suit names the link that does."""
    known = {"has_secret": False, "no_gloo": None} | more
    found = way.link(RegionConfig(**settings), **known)
    assert (found.level, words in found.words) == (level, True), found
    assert (found.command == way.TCP) == (level != OK)


def test_the_port_and_the_addresses_of_the_user() -> None:
    assert "listens on 29700: a firewall must let other regions in there" in way.port(FAR, 29700).words
    found = way.address(replace(FAR, address="192.168.1.7"), "8.8.8.8:29650", ["203.0.113.7:29700"])
    assert (found.level, found.words) == (OK, "announces 203.0.113.7:29700 (regions.announce)")


def test_a_limit_of_the_rate_does_for_cubic() -> None:
    """As the documentation says."""
    found = way.congestion(replace(FAR, congestion="cubic"), 900.0)
    assert (found.level, found.words) == (OK, "TCP cubic, with regions.rate_limit=900 Mbit/s")


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_a_limit_that_the_kernel_does_not_keep(congestion: str) -> None:
    """It is kept all the same, but not as well."""
    found = way.congestion(replace(FAR, congestion=congestion, paces=False), 900.0)
    assert found.level == WARN
    assert "regions.rate_limit=900 Mbit/s; this machine's kernel does not keep a rate limit" in found.words


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback is found with its name, and the time of a round trip; without /proc nothing is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        found = facts.network(coordinator, None)
        assert (found.address, found.interface, found.is_up) == ("127.0.0.1", "lo", True)
        assert found.rtt_s is not None
        assert found.paces is not None
        with pytest.raises(InputError, match="regions.interface='wg9' is not a network interface"):
            facts.network(coordinator, "wg9")
    monkeypatch.setattr(facts, "SYSCTL", tmp_path)
    blind = facts.network(coordinator, None)
    assert (blind.congestion, blind.ports) == (None, None)
    assert blind.rtt_s is None  # nobody listens any more
