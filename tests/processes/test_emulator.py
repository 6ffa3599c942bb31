"""The emulated WAN: round trip, rate, losses, use without root, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.emulation.privileges import obstacle
from tests.benchmarks.emulation.wan import Wan
from tests.link.memory import wait_until
from tests.processes.launching import ROOT

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

TIMEOUT_S = 60.0
COMMAND = [sys.executable, "-m", "hf_cocodc"]
SERVER = """
import hashlib, socket, sys, time
listening = socket.create_server((sys.argv[1], 5001))
print("ready", flush=True)
while True:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connection.recv(1) == b"p":
        while byte := connection.recv(1):
            connection.sendall(byte)
    else:
        sha = hashlib.sha256()
        while data := connection.recv(1 << 20):
            sha.update(data)
        print(sha.hexdigest(), time.monotonic(), flush=True)
"""
CLIENT = """
import json, random, socket, sys, time
connection = socket.create_connection((sys.argv[1], 5001))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
connection.sendall(b"p")
for _ in range(8):
    start = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    times.append(time.perf_counter() - start)
connection.close()
connection = socket.create_connection((sys.argv[1], 5001))
control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode()
data = random.Random(0).randbytes(int(sys.argv[2]))
start = time.monotonic()
connection.sendall(b"d" + data)
print(json.dumps({"rtt_s": min(times), "control": control, "start": start}))
"""
OWNER = """
import subprocess, time
from tests.benchmarks.emulation.wan import Wan
with Wan(2) as wan:
    process = wan.popen(0, ["sh", "-c", "echo inside; sleep 600 & sleep 600"], stdout=subprocess.PIPE)
    process.stdout.readline()
    print(process.pid, flush=True)
    time.sleep(600)
"""
PLAIN = """
import json, os, subprocess, sys
from tests.benchmarks.emulation.privileges import may_administer, obstacle
from tests.benchmarks.emulation.wan import Wan
from tests.processes.test_emulator import talk
assert not may_administer()
missing = obstacle()
if missing:
    print(json.dumps({"missing": missing}))
    sys.exit()
with Wan(2, rtt_s=0.05, congestion=sys.argv[1]) as wan:
    with wan.popen(0, ["readlink", "/proc/self/ns/user"], stdout=subprocess.PIPE, text=True) as inside:
        namespaces = [os.readlink("/proc/self/ns/user"), inside.communicate()[0].strip()]
    found = talk(wan, 1_000_000)
    counters = wan.counters()[1, 0]
print(json.dumps({"namespaces": namespaces, "bytes": counters.bytes, **found}))
"""
"""A WAN made by a process without capabilities."""


def talk(wan: Wan, num_bytes: int) -> dict[str, Any]:
    """Ping region 0 and send bytes to it, from region 1; return the figures. The bytes must arrive unchanged."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with wan.popen(0, [sys.executable, "-c", SERVER, wan.address(0)], **options) as server:
        assert server.stdout is not None
        server.stdout.readline()
        command = [sys.executable, "-c", CLIENT, wan.address(0), str(num_bytes)]
        with wan.popen(1, command, **options) as client:
            found = json.loads(client.communicate(timeout=TIMEOUT_S)[0])
        said, end = server.stdout.readline().split()
        server.kill()
    assert said == hashlib.sha256(random.Random(0).randbytes(num_bytes)).hexdigest()
    return {**found, "rate": num_bytes * 8 / (float(end) - found["start"])}


def inhabitants(namespace: str) -> list[str]:
    """Processes in a network namespace."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns/net") == namespace:
                found.append(entry.name)
        except OSError:  # the process has just ended
            continue
    return found


def test_a_link_has_its_round_trip_and_its_rate() -> None:
    """TCP sees at least the round trip, and at most the rate."""
    with Wan(2, rtt_s=0.08, rate=40e6, congestion="cubic") as wan:
        found = talk(wan, 6_000_000)
        counters = wan.counters()[1, 0]
    assert found["rtt_s"] > 0.99 * 0.08
    assert found["control"] == wan.congestion == "cubic"
    assert found["rate"] < 40e6
    assert counters.bytes > 6_000_000 and counters.lost == 0


def test_losses_are_made_good_by_tcp() -> None:
    """Large bundles lose segments too, and the bytes still arrive unchanged."""
    with Wan(2, rtt_s=0.005, loss=0.01) as wan:
        talk(wan, 10_000_000)
        counters = wan.counters()[1, 0]
    assert counters.packets > 10_000_000 / 1460
    assert counters.lost / counters.packets == pytest.approx(0.01, rel=0.5)


@pytest.mark.slow
def test_a_region_that_sends_too_fast_names_the_rate_limit(tmp_path: Path) -> None:
    """Without a limit, the buffer before a slow link overflows. With one as the warning says, nothing is lost."""
    secret = tmp_path / "secret"
    subprocess.run([*COMMAND, "secret", "new", str(secret)], check=True, cwd=ROOT, capture_output=True)

    def measured(*options: str) -> tuple[str, float]:
        with Wan(2, rtt_s=0.1, rate=50e6) as wan:
            where = ["--host", wan.address(0), "--port", "5001"]
            with wan.popen(
                0, [*COMMAND, "coordinator", *where, "--secret-file", str(secret)], cwd=ROOT
            ) as coordinator:
                meeting = ["--coordinator", f"{wan.address(0)}:5001", "--secret-file", str(secret)]
                what = ["--megabytes", "12", "--repeat", "4", *options]
                ends = [
                    wan.popen(
                        region,
                        [*COMMAND, "bench", "link", *meeting, "--region", str(region), *what],
                        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT},
                    )
                    for region in range(2)
                ]
                said = [end.communicate(timeout=2 * TIMEOUT_S)[0] for end in ends]
                coordinator.kill()
            assert [end.returncode for end in ends] == [0, 0], said
            counted = wan.counters()[0, 1]
        return said[0], counted.dropped / counted.packets

    said, without = measured()
    assert without > 0.03 and "Set regions.rate_limit to nine tenths of the link's rate" in said
    said, within = measured("--rate-limit", "45")
    assert within < without / 3 and "lost on the way" not in said


def test_nothing_is_left_of_a_wan() -> None:
    """All processes inside, also in the background, end with the block; so does the namespace."""
    command = ["sh", "-c", "echo inside; sleep 600 & sleep 600"]
    with contextlib.suppress(ZeroDivisionError), Wan(2) as wan:
        process = wan.popen(1, command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        namespace = os.readlink(f"/proc/{process.pid}/ns/net")
        assert namespace != os.readlink("/proc/self/ns/net")
        assert str(process.pid) in inhabitants(namespace)
        raise ZeroDivisionError
    process.stdout.close()
    assert process.returncode == -signal.SIGTERM
    assert inhabitants(namespace) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_the_owner_is_killed(how: signal.Signals) -> None:
    """The hub notices that its parent has gone, kills the processes inside, and exits."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        inside = owner.stdout.readline().strip()
        namespace = os.readlink(f"/proc/{inside}/ns/net")
        assert inside in inhabitants(namespace)
        owner.send_signal(how)
        owner.wait(TIMEOUT_S)
    wait_until(lambda: inhabitants(namespace) == [])


@pytest.mark.slow
def test_a_wan_needs_no_root() -> None:
    """A process without capabilities gets the same WAN in a user namespace of its own, with any congestion control."""
    # Root keeps CAP_SETFCAP: without it the kernel does not map root into a new user namespace.
    dropped = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*dropped, sys.executable, "-c", PLAIN, "cubic"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "missing" in found:
        pytest.skip(found["missing"])
    outside, inside = found["namespaces"]
    assert outside != inside
    assert outside == os.readlink("/proc/self/ns/user")
    assert found["rtt_s"] > 0.99 * 0.05
    assert found["control"] == "cubic"
    assert found["bytes"] > 1_000_000
