import json
import os
import socket
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from hf_cocodc.coordinator.channel import line_of
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.connection import Connection
from hf_cocodc.coordinator.entrance import ABOUT, Limits, key_id, versions
from hf_cocodc.coordinator.messages import Beat, Post, Posted, to_plain
from hf_cocodc.coordinator.proof import Proof
from hf_cocodc.coordinator.server import serve_in_thread

from .regions import OTHER, SECRET, Region, hello, meet, part, wait_until
from .test_server import process

GARBAGE: tuple[bytes, ...] = (
    b"\n" * (64 << 10),
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(4096) + b"\n",
    b"x" * (64 << 10),
    b"{" * 4000 + b"\n",
    b'{"hf_cocodc": 14}\n' * 100,
    b'{"hf_cocodc": 14, "key": "00"}\n',
    b"[1]\n",
    b"",
)


def strangers(address: str, number: int) -> list[socket.socket]:
    """Connections that say garbage or nothing, and stay open."""
    host, port = address.split(":")
    found = []
    for place in range(number):
        connection = socket.socket()
        connection.settimeout(5.0)
        try:
            connection.connect((host, int(port)))
            connection.send(GARBAGE[place % len(GARBAGE)])
        except OSError:  # it was closed already, which is as well
            pass
        found.append(connection)
    return found


def close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def gaps(times: list[float]) -> float:
    """The longest time between two of them."""
    return max((later - earlier for earlier, later in zip(times, times[1:], strict=False)), default=0.0)


def test_2000_strangers_keep_no_region_from_meeting_and_delay_no_sign_of_life(
    tmp_path: "os.PathLike[str]",
) -> None:
    secret = os.path.join(tmp_path, "secret")
    with open(secret, "w") as file:
        file.write("a secret of the run")
    os.chmod(secret, 0o600)
    with process("--secret-file", secret) as (started, address):
        threads = [threading.Thread(target=lambda: close(strangers(address, 500))) for _ in range(2)]
        first = strangers(address, 1000)
        before = psutil.Process(started.pid)
        for thread in threads:
            thread.start()
        a, b = meet(address, hello(0), hello(1), keys=SECRET)
        answered: list[float] = []
        until = time.monotonic() + 2.0
        while time.monotonic() < until or any(thread.is_alive() for thread in threads):
            sent, seen = time.monotonic(), len(b.heard)
            a.client.send(Post(to=b.client.me, topic="t", content={}))
            wait_until(lambda seen=seen: len(b.heard) > seen)  # type: ignore[misc]
            answered.append(time.monotonic() - sent)
            time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert max(answered) < 1.0
        assert a.client.is_connected and b.client.is_connected
        [run] = status(address, SECRET)
        assert all(member["heard_s"] < 1.0 for member in run["members"])
        used = before.cpu_times()
        assert (used.user + used.system) / 2000 < 0.005, "a stranger costs less than 5 ms"
        assert before.memory_info().rss < 200 << 20
        part(a, b)
        close(first)


def test_a_stranger_is_closed_in_time_and_the_number_of_strangers_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(proof_s=1.0, callers=50)
    monkeypatch.setattr("hf_cocodc.coordinator.connections.Limits", lambda: limits)
    served = serve_in_thread(secrets=[SECRET])
    found = strangers_that_say(served.address, b"", limits.callers + 20)
    begun = time.monotonic()
    for early in found[:20]:  # others came, and there was no room for all
        assert early.recv(1) == b""
    assert time.monotonic() < begun + 0.5
    assert status(served.address, SECRET) == []
    for late in found[20:]:
        assert late.recv(1) == b""
    assert begun + 0.5 < time.monotonic() < begun + limits.proof_s + 1.0
    close(found)
    served.close()


def strangers_that_say(address: str, said: bytes, number: int) -> list[socket.socket]:
    host, port = address.split(":")
    found = []
    for _ in range(number):
        connection = socket.create_connection((host, int(port)))
        connection.settimeout(10.0)
        connection.sendall(said)
        found.append(connection)
    return found


@pytest.mark.parametrize("said", GARBAGE[:-1])
def test_garbage_ends_a_connection_at_once(said: bytes) -> None:
    served = serve_in_thread(secrets=[SECRET])
    host, port = served.address.split(":")
    begun = time.monotonic()
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(10.0)
        try:
            connection.sendall(said)
            while connection.recv(4096):
                pass
        except OSError:
            pass
    assert time.monotonic() < begun + 1.5
    served.close()


def test_a_stranger_that_has_said_a_valid_first_line_is_closed_after_those_that_have_not() -> None:
    served = serve_in_thread(secrets=[SECRET])
    proof = Proof(SECRET, ABOUT)
    first = line_of(proof.say({**versions(), "key": key_id(SECRET)}))
    [honest] = strangers_that_say(served.address, first, 1)
    answer = honest.recv(4096)
    assert b"proof" in answer
    crowd = strangers_that_say(served.address, b"", Limits().callers + 100)
    honest.setblocking(False)
    with pytest.raises(BlockingIOError):  # it is still open
        honest.recv(1)
    close([honest, *crowd])
    served.close()


def test_a_replayed_conversation_proves_nothing() -> None:
    served = serve_in_thread(secrets=[SECRET])
    proof = Proof(SECRET, ABOUT)
    first = line_of(proof.say({**versions(), "key": key_id(SECRET)}))
    [caller] = strangers_that_say(served.address, first, 1)
    proof.hear(json.loads(caller.recv(4096)))
    last = line_of(proof.say({"kind": "here"}))
    caller.sendall(last)
    [thief] = strangers_that_say(served.address, first, 1)
    assert b"proof" in thief.recv(4096)
    thief.sendall(last)
    assert thief.recv(1) == b""
    close([caller, thief])
    served.close()


def test_a_flood_of_one_run_delays_no_other() -> None:
    """A region sends messages as fast as it can; another run, with another secret, hears its own in time."""
    served = serve_in_thread(secrets=[SECRET, OTHER])
    a, b = meet(served.address, hello(0), hello(1), keys=SECRET)
    floods = [Connection(served.address, "flood", "region", OTHER) for _ in range(2)]
    for region, flood in enumerate(floods):
        flood.send(hello(region))
    ends = threading.Event()
    kinds: tuple[Callable[[], dict], ...] = (
        lambda: to_plain(Beat(step=1)),
        lambda: {"kind": "Nonsense", "x": "y" * 100},
    )

    def send(flood: Connection, make: Callable[[], dict]) -> None:
        line = make()
        while not ends.is_set() and not flood.channel.ended:
            if flood.channel.unsent_since is None:
                flood.send_plain(line)
            else:
                flood.receive_plain(0.0)

    threads = [threading.Thread(target=send, args=each) for each in zip(floods, kinds, strict=True)]
    for thread in threads:
        thread.start()
    answered = []
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        seen, sent = len(b.heard), time.monotonic()
        a.client.send(Post(to=b.client.me, topic="t", content={}))
        wait_until(lambda seen=seen: len(b.heard) > seen)  # type: ignore[misc]
        answered.append(time.monotonic() - sent)
        time.sleep(0.02)
    ends.set()
    for thread in threads:
        thread.join()
    assert isinstance(b.heard[-1], Posted)
    assert max(answered) < 1.0
    part(a, b)
    for flood in floods:
        flood.channel.close()
    served.close()


def test_a_region_that_reads_nothing_ends_alone() -> None:
    served = serve_in_thread()
    a, b = meet(served.address, hello(0), hello(1))
    [c] = [Connection(served.address, "run", "region", None)]
    c.send(hello(0))
    for _ in range(20):
        a.client.send(Post(to=b.client.me, topic="t", content={"x": "y" * 100_000}))
    wait_until(lambda: sum(isinstance(each, Posted) for each in b.heard) == 20)
    part(a, b)
    c.close()
    served.close()


def test_messages_that_are_none_are_ignored_and_many_end_the_connection() -> None:
    served = serve_in_thread()
    regions: list[Region] = meet(served.address, hello(0), hello(1))
    a, b = regions
    stray = Connection(served.address, "run", "region", None)
    for _ in range(50):
        stray.send_plain({"kind": "Beat", "step": "many"})
    time.sleep(0.2)
    assert not ended(stray)
    for _ in range(100):
        stray.send_plain({"kind": "Beat", "step": -5})
    wait_until(lambda: ended(stray))
    stray.channel.close()
    assert a.client.is_connected and b.client.is_connected
    part(a, b)
    served.close()


def ended(connection: Connection) -> bool:
    connection.channel.receive()
    return connection.channel.ended
