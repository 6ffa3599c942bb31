"""Two regions behind NAT train through ports that SSH forwards, by the words of docs/guides/network.md.

Machines are network namespaces. Each of the two reaches the host between them, and nothing else.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hf_cocodc.run.journal import read
from hf_cocodc.settings.environment import ENV_SECRET
from tests.net.storages import ssh_server
from tests.processes.pages import begin, prepare, shown
from tests.processes.test_nat import Network
from tests.secret import secret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "ssh", "ssh-keygen"))),
        reason="needs root, iproute2 and openssh-client",
    ),
]
HOST = "198.51.100.4"
TIMEOUT_S = 200
STEPS = 2000
PAGE = "docs/guides/network.md"


class Machines(Network):
    """Two machines that reach a host, and not each other. Commands run in a folder of each."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._begun: list[subprocess.Popen[bytes]] = []
        for number, machine in enumerate(("first", "second"), 1):
            self.host(machine, number)
            self.run(machine, f"ip route add unreachable 198.51.100.{3 - number}")
            prepare(folder / machine, STEPS)
        self.host("between", 4)

    def into(self, machine: str) -> list[str]:
        return ["ip", "netns", "exec", self._name + machine]

    def begin(self, machine: str, words: str, log: str) -> subprocess.Popen[bytes]:
        """Start a command as its user types it there. What it says goes to a file."""
        place, into = self.folder / machine, self.into(machine)
        begun = begin(f"exec {words}", place, self.folder / log, into, **{ENV_SECRET: secret()})
        self._begun.append(begun)
        return begun

    def said(self, log: str) -> str:
        return (self.folder / log).read_text()

    def kill(self, machine: str, command: str = "") -> None:
        """End all processes there, or those of a command: ssh -f has left its own."""
        words = ["ip", "netns", "pids", self._name + machine]
        for pid in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if command in Path("/proc", pid, "cmdline").read_bytes().decode().partition("\0")[0]:
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        for machine in ("first", "second", "between"):
            self.kill(machine)
        for begun in self._begun:
            begun.wait()
        super().close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def host(machines: Machines) -> Iterator[None]:
    """The SSH server of the host between them, which both machines know."""
    keys = machines.folder / "keys"
    keys.mkdir()
    with ssh_server(keys, HOST, machines.into("between")) as port:
        (keys / "config").write_text(
            f"Host {HOST}\nUser {getpass.getuser()}\nPort {port}\nIdentityFile {keys}/user\nIdentitiesOnly yes\n"
            "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        )
        yield


def forward(machines: Machines, machine: str, words: str) -> None:
    """Begin an ssh that goes on by itself once it forwards."""
    called = words.replace("ssh ", f"ssh -F {machines.folder}/keys/config ", 1).replace("me@", "")
    begun = machines.begin(machine, called, f"log-ssh-{machine}")
    assert begun.wait(TIMEOUT_S) == 0, machines.said(f"log-ssh-{machine}")


@pytest.mark.usefixtures("host")
def test_two_regions_behind_nat_train_through_ports_that_ssh_forwards(machines: Machines) -> None:
    """An ssh that ends takes its region out of the run. Once it runs again, the region comes back by itself."""
    serve, from_host, first = shown(PAGE, "first machine")
    to_host, second = shown(PAGE, "second machine")
    machines.begin("first", serve, "log-coordinator")
    wait_until(lambda: "listening" in machines.said("log-coordinator"))
    forward(machines, "first", from_host)
    forward(machines, "second", to_host)
    commands = {"first": first, "second": second}
    regions = {
        machine: machines.begin(machine, words, f"log-{machine}") for machine, words in commands.items()
    }
    homes = [machines.folder / machine / "out" / f"region-{place}" for place, machine in enumerate(regions)]

    def events(place: int, kind: str) -> list[Any]:
        path = homes[place] / "cocodc" / "journal.jsonl"
        return [each for each in (read(path) if path.is_file() else []) if each["kind"] == kind]

    wait_until(lambda: len(events(1, "land")) > 3)
    machines.kill("second", "ssh")
    wait_until(lambda: [each["members"] for each in events(0, "epoch")][-1:] == [[0]])
    forward(machines, "second", to_host)
    for machine, region in regions.items():
        assert region.wait(TIMEOUT_S) == 0, machines.said(f"log-{machine}")[-4000:]
    assert [each["members"] for each in events(0, "epoch")] == [[0, 1], [0], [0, 1]]
    for place in (0, 1):
        ways = [each["ways"] for each in events(place, "ways") if each["ways"]]
        assert ways and all(each == {str(1 - place): "reversed"} for each in ways), "the second machine calls"
    models = [load_file(home / "model.safetensors") for home in homes]
    assert all(each.equal(models[1][name]) for name, each in models[0].items())
