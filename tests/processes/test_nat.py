"""Regions behind routers and firewalls: network namespaces, and the kernel's own NAT (`apt-get install nftables conntrack`)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hf_cocodc.settings.environment import ENV_SECRET
from tests.processes.nat_worker import SECONDS
from tests.secret import secret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("nft", "ip", "conntrack"))),
        reason="needs root, iproute2, nftables and conntrack",
    ),
]
PORT = 29650


class Network:
    """An internet in which each machine has a namespace: 198.51.100.N, or behind a router of its own, 10.0.N.2."""

    def __init__(self) -> None:
        self._name = f"nat{os.getpid()}"
        self._added: list[str] = []
        self.add("net")
        self.run("net", "ip link add bridge type bridge", "ip link set bridge up")

    def add(self, machine: str) -> None:
        subprocess.run(["ip", "netns", "add", self._name + machine], check=True)
        self._added.append(machine)
        self.run(machine, "ip link set lo up")

    def run(self, machine: str, *commands: str) -> None:
        for command in commands:
            subprocess.run(
                ["ip", "netns", "exec", self._name + machine, *command.split()],
                check=True,
                capture_output=True,
            )

    def start(self, machine: str, *command: str) -> subprocess.Popen[str]:
        words = ["ip", "netns", "exec", self._name + machine, sys.executable, "-m", *command]
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env={**os.environ, ENV_SECRET: secret()}
        )

    def connect(self, machine: str, number: int, six: bool = False) -> None:
        """Give a machine a cable to the internet, and an address."""
        there = self._name + machine
        self.run("net", f"ip link add to{number} type veth peer name eth0 netns {there}")
        self.run("net", f"ip link set to{number} master bridge", f"ip link set to{number} up")
        address = f"fd00::{number}/64 nodad" if six else f"198.51.100.{number}/24"
        self.run(machine, "ip link set eth0 up", f"ip addr add {address} dev eth0")

    def host(self, machine: str, number: int, six: bool = False) -> None:
        self.add(machine)
        self.connect(machine, number, six)

    def behind_router(self, machine: str, number: int, mapped: str = "") -> None:
        """A machine behind a router that lets nobody in, but for a port that is `mapped` to another one: "29750 29700"."""
        router = f"router{number}"
        self.host(router, number)
        self.add(machine)
        self.run(router, f"ip link add lan type veth peer name eth0 netns {self._name}{machine}")
        self.run(router, "ip link set lan up", f"ip addr add 10.0.{number}.1/24 dev lan")
        self.run(router, "sysctl -q -w net.ipv4.ip_forward=1")
        self.run(machine, "ip link set eth0 up", f"ip addr add 10.0.{number}.2/24 dev eth0")
        self.run(machine, f"ip route add default via 10.0.{number}.1")
        self.run(
            router,
            "nft add table ip nat",
            "nft add chain ip nat out { type nat hook postrouting priority 100 ; }",
        )
        self.run(router, "nft add rule ip nat out oifname eth0 masquerade random")
        self.run(router, "nft add chain ip nat pass { type filter hook forward priority 0 ; policy drop ; }")
        self.run(router, "nft add rule ip nat pass ct state established,related accept")
        self.run(router, "nft add rule ip nat pass iifname lan accept")
        if mapped:
            outside, inside = mapped.split()
            self.run(router, "nft add chain ip nat in { type nat hook prerouting priority -100 ; }")
            self.run(
                router,
                f"nft add rule ip nat in iifname eth0 tcp dport {outside} dnat to 10.0.{number}.2:{inside}",
            )
            self.run(router, "nft add rule ip nat pass ct status dnat accept")

    def close(self) -> None:
        for machine in self._added:
            subprocess.run(["ip", "netns", "del", self._name + machine], check=False)


@pytest.fixture
def network() -> Iterator[Network]:
    found = Network()
    yield found
    found.close()


@contextlib.contextmanager
def coordinator(network: Network, *options: str, host: str = "198.51.100.4") -> Iterator[str]:
    """On a machine of its own; its address."""
    network.host("coordinator", 4, six=":" in host)
    with network.start("coordinator", "hf_cocodc", "coordinator", "--host", host, *options) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        finally:
            started.kill()


def results(network: Network, address: str, *places: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the two regions print: each with its machine, port and what it announces."""
    started = [
        network.start(machine, "tests.processes.nat_worker", address, str(region), *more)
        for region, (machine, *more) in enumerate(places)
    ]
    return [json.loads(each.communicate(timeout=120.0)[0].splitlines()[-1]) for each in started]


def check(found: list[dict[str, Any]], way: str) -> None:
    told = [[float(second + second % 2)] for second in range(SECONDS)]
    assert found == [{"ways": {str(1 - region): way}, "told": told} for region in range(2)]


def test_one_region_behind_a_router(network: Network) -> None:
    with coordinator(network) as address:
        network.host("a", 1)
        network.behind_router("b", 2)
        check(results(network, address, ("a",), ("b",)), "reversed")


def test_both_behind_routers_do_not_reach_each_other(network: Network) -> None:
    """Within 10 seconds the error names the addresses of both, and the ways out."""
    with coordinator(network) as address:
        network.behind_router("a", 1)
        network.behind_router("b", 2)
        began = time.monotonic()
        found = results(network, address, ("a", "29700"), ("b", "29701"))
        assert time.monotonic() - began < 40.0
        for each in found:
            words = each["error"]
            assert "10.0.1.2:29700" in words and "10.0.2.2:29701" in words, words
            assert all(each in words for each in ("regions.announce", "ssh -R", "--coordinator URL"))


def test_a_port_that_a_router_maps_to_another_number(network: Network) -> None:
    with coordinator(network) as address:
        network.behind_router("a", 1)
        network.behind_router("b", 2, mapped="29750 29700")
        check(results(network, address, ("a",), ("b", "29700", "198.51.100.2:29750")), "direct")


def test_one_port_is_open_in_a_firewall(network: Network) -> None:
    with coordinator(network) as address:
        network.behind_router("a", 1)
        network.host("b", 2)
        network.run(
            "b",
            "nft add table ip fw",
            "nft add chain ip fw in { type filter hook input priority 0 ; policy drop ; }",
        )
        network.run("b", "nft add rule ip fw in ct state established,related accept")
        network.run("b", "nft add rule ip fw in tcp dport 29700 accept")
        check(results(network, address, ("a",), ("b", "29700")), "direct")


def test_version_six_alone(network: Network) -> None:
    with coordinator(network, host="fd00::4") as address:
        network.host("a", 1, six=True)
        network.host("b", 2, six=True)
        check(results(network, address, ("a",), ("b",)), "direct")


def test_an_address_that_nobody_has_is_no_harm_if_another_way_exists(network: Network) -> None:
    with coordinator(network) as address:
        network.host("a", 1)
        network.host("b", 2)
        check(results(network, address, ("a",), ("b", "29700", "198.51.100.99:29700")), "reversed")


def test_a_router_that_forgets_all_connections_costs_no_bit(network: Network) -> None:
    """It gives other ports to what comes next: the region behind it calls again."""
    with coordinator(network) as address:
        network.host("a", 1)
        network.behind_router("b", 2)
        begun = [
            network.start(machine, "tests.processes.nat_worker", address, str(region))
            for region, machine in enumerate("ab")
        ]
        for each in begun:
            assert each.stdout is not None
            assert each.stdout.readline() == "met\n"  # a break before that ends the start with an error
        for _ in range(4):
            network.run("router2", "conntrack -F")
            time.sleep(1.5)
        check([json.loads(each.communicate(timeout=120.0)[0].splitlines()[-1]) for each in begun], "reversed")
