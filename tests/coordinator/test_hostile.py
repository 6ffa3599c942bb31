import contextlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hf_cocodc.coordinator import entrance
from hf_cocodc.coordinator.caller import CoordinatorConnection
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.entrance import HERE, key_id, versions
from hf_cocodc.coordinator.messages import Beat, Post, Posted
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import MeetingError
from hf_cocodc.net.channel import line_of
from hf_cocodc.net.keys import Identity, Keys, identity
from tests.secret import secret

from .regions import OTHER, OURS, SECRET, THEIRS, Region, hello, meet, part, wait_until
from .test_server import process

GARBAGE: tuple[bytes, ...] = (
    b"\n" * (64 << 10),
    b"GET / HTTP/1.1\r\n\r\n",
    random.Random(0).randbytes(4096) + b"\n",
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
    path = os.path.join(tmp_path, "secret")
    with open(path, "w") as file:
        file.write(secret("a secret of the run"))
    os.chmod(path, 0o600)
    with process("--secret-file", path) as (started, address):
        threads = [threading.Thread(target=lambda: close(strangers(address, 500))) for _ in range(2)]
        first = strangers(address, 1000)
        before = psutil.Process(started.pid)
        for thread in threads:
            thread.start()
        a, b = meet(address, hello(0), hello(1), keys=SECRET)
        until = time.monotonic() + 2.0
        while time.monotonic() < until or any(thread.is_alive() for thread in threads):
            seen = len(b.heard)
            a.client.send(Post(to=b.client.me, topic="t", content={}))
            wait_until(lambda seen=seen: len(b.heard) > seen)  # type: ignore[misc]
            time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert a.client.is_connected and b.client.is_connected
        [run] = status(address, SECRET)
        assert all(member["heard_s"] < 5.0 for member in run["members"])
        used = before.cpu_times()
        assert (used.user + used.system) / 2000 < 0.005, "a stranger costs less than 5 ms"
        assert before.memory_info().rss < 200 << 20
        part(a, b)
        close(first)


def test_a_stranger_is_closed_in_time_and_the_number_of_strangers_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrance, "PROOF_S", 2.0)
    monkeypatch.setattr(entrance, "MOST_CALLERS", 50)
    served = serve_in_thread(secrets=[SECRET])
    found = strangers_that_say(served.address, b"", entrance.MOST_CALLERS + 20)
    for early in found[:20]:  # others came, and there was no room for all
        assert early.recv(1) == b""
    found[-1].setblocking(False)
    with pytest.raises(BlockingIOError):  # it is still open
        found[-1].recv(1)
    found[-1].settimeout(10.0)
    assert status(served.address, SECRET) == []
    for late in found[20:]:
        assert late.recv(1) == b""
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


@pytest.mark.parametrize("said", GARBAGE[:-1], ids=range(len(GARBAGE) - 1))
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
    assert time.monotonic() < begun + 0.8 * entrance.PROOF_S
    served.close()


FIRST = line_of({**versions(), "key": key_id(SECRET)})
"""The first line of a caller that has the secret, or has heard another one say it: the id of a secret is none."""


def test_a_stranger_that_has_said_a_valid_first_line_is_closed_after_those_that_have_not() -> None:
    served = serve_in_thread(secrets=[SECRET])
    [honest] = strangers_that_say(served.address, FIRST, 1)
    assert json.loads(honest.recv(4096)) == versions()
    crowd = strangers_that_say(served.address, b"", entrance.MOST_CALLERS + 100)
    honest.setblocking(False)
    with pytest.raises(BlockingIOError):  # it is still open
        honest.recv(1)
    close([honest, *crowd])
    served.close()


def client_hello(keys: Keys) -> bytes:
    """The first bytes of a handshake."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        identity(keys).contexts[False].wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"x" * 70_000,
        b'{"run": "run", "for": "status"}\n',
    ],
    ids=["no TLS", "a hello that is too long", "no handshake"],
)
def test_who_knows_the_name_of_a_secret_alone_gets_nowhere(said: bytes) -> None:
    """Whatever it says instead of a handshake, the connection ends; others are served meanwhile."""
    served = serve_in_thread(secrets=[SECRET])
    [stranger] = strangers_that_say(served.address, FIRST, 1)
    assert json.loads(stranger.recv(4096)) == versions()
    with contextlib.suppress(OSError):
        stranger.sendall(said)
    heard = b""
    with contextlib.suppress(ConnectionError):
        while chunk := stranger.recv(4096):
            heard += chunk
    assert b"runs" not in heard and len(heard) < 100
    assert status(served.address, SECRET) == []
    close([stranger])
    served.close()


def test_a_handshake_that_stops_half_way_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "PROOF_S", 0.5)
    served = serve_in_thread(secrets=[SECRET])
    hello = client_hello(SECRET)
    for said in (hello[:100], hello):  # the coordinator's own part comes, and the caller's proof never
        [stranger] = strangers_that_say(served.address, FIRST, 1)
        stranger.recv(4096)
        stranger.sendall(said)
        begun = time.monotonic()
        while stranger.recv(4096):
            pass
        assert time.monotonic() < begun + 3.0
        close([stranger])
    served.close()


def talk(address: str, keys: Keys) -> tuple[str, ssl.SSLObject]:
    """Say the first line of a caller with SECRET, and go on with the identity of other keys; what comes of it."""
    [caller] = strangers_that_say(address, FIRST, 1)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller.recv(4096)
    tls = identity(keys).contexts[False].wrap_bio(incoming, outgoing)
    heard = ""
    with caller:
        for _ in range(20):
            try:
                heard = tls.read().decode()
                break
            except ssl.SSLWantReadError:
                caller.sendall(outgoing.read())
                chunk = caller.recv(4096)
                if not chunk:
                    return "refused: closed", tls
                incoming.write(chunk)
            except ssl.SSLError as error:
                return f"refused: {error.reason}", tls
    return heard, tls


class Anyone:
    """The identity of a thief, which takes any certificate of the other end."""

    def __init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.contexts = {False: context}


def test_another_identity_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends refuse it: the caller another coordinator, the coordinator another caller, or one without an identity."""
    served = serve_in_thread(secrets=[SECRET])
    heard, tls = talk(served.address, SECRET)
    assert json.loads(heard) == HERE and tls.version() == "TLSv1.3"
    assert tls.getpeercert(True) == identity(SECRET).certificate == Identity(SECRET).certificate
    assert talk(served.address, OTHER)[0] == "refused: CERTIFICATE_VERIFY_FAILED"
    monkeypatch.setattr("tests.coordinator.test_hostile.identity", lambda keys: Anyone())
    assert talk(served.address, OTHER)[0].startswith("refused: ")
    served.close()


def test_a_coordinator_without_the_secret_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else listens at the address, and says that it has the secret."""
    served = serve_in_thread(secrets=[SECRET])
    monkeypatch.setattr("hf_cocodc.coordinator.entrance.identity", lambda keys: Identity(OTHER))
    with pytest.raises(MeetingError, match="does not prove that it has the secret of the run"):
        status(served.address, SECRET)
    served.close()


class Listener:
    """Passes on what a caller and the coordinator say, and keeps it; flips a bit of the nth chunk each way, if asked."""

    def __init__(self, address: str, flips: int | None = None) -> None:
        host, port = address.split(":")
        self._there, self._flips = (host, int(port)), flips
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.heard: list[bytes] = []
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller = self._server.accept()[0]
                there = socket.create_connection(self._there)
                self._open += [caller, there]
                self._start(self._pass_on, caller, there)
                self._start(self._pass_on, there, caller)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            number = 0
            while chunk := bytearray(one.recv(1 << 16)):
                if number == self._flips:
                    chunk[len(chunk) // 2] ^= 1
                number += 1
                self.heard.append(bytes(chunk))
                other.sendall(chunk)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join()
        close(self._open)


def test_who_listens_learns_nothing_and_whoever_alters_is_not_believed() -> None:
    """Not where regions listen, nor what they tell each other there."""
    served = serve_in_thread(secrets=[SECRET])
    between = Listener(served.address)
    a, b = meet(between.address, hello(0), hello(1), keys=SECRET)
    a.client.send(Post(to=b.client.me, topic="t", content={"share": "0123456789"}))
    b.wait_for(Posted)
    part(a, b)
    between.close()
    heard = b"".join(between.heard)
    assert key_id(SECRET).encode() in heard, "the first lines are plain"
    assert not any(each in heard for each in (b"share", b"0123456789", b"10.0.0.1", b"diloco"))
    for flips in (1, 2, 3):  # the handshake of each end, and what follows
        between = Listener(served.address, flips)
        with pytest.raises(MeetingError):
            status(between.address, SECRET, timeout_s=1.0)
        between.close()
    replayed = [chunk for chunk in between.heard if chunk]
    [thief] = strangers_that_say(served.address, FIRST, 1)
    thief.recv(4096)
    with contextlib.suppress(OSError):
        for chunk in replayed[2:]:
            thief.sendall(chunk)
        while chunk := thief.recv(4096):
            assert b"runs" not in chunk
    close([thief])
    served.close()


def flood(address: str, region: int) -> None:
    """Send messages of another run as fast as the coordinator takes them: sound ones, or nonsense."""
    connection = CoordinatorConnection(address, "flood", "region", OTHER)
    connection.send(hello(region))
    line = Beat(step=1) if region else {"kind": "Nonsense", "x": "y" * 100}
    while not ended(connection):
        connection.send(line)
        while connection.call.writer.transport.get_write_buffer_size():
            time.sleep(0.01)


@pytest.mark.slow
def test_a_flood_of_one_run_delays_no_other(tmp_path: Path) -> None:
    """Regions send messages as fast as they can; another run, with another secret, hears its own in time. All processes are real:
    in one, threads would wait for each other."""
    files = [tmp_path / name for name in ("ours", "theirs")]
    for file, name in zip(files, (OURS, THEIRS), strict=True):
        file.write_text(secret(name))
        file.chmod(0o600)
    options = [word for file in files for word in ("--secret-file", str(file))]
    with process(*options) as (_, address), contextlib.ExitStack() as kept:
        a, b = meet(address, hello(0), hello(1), keys=SECRET)
        for region in range(2):
            code = f"from tests.coordinator.test_hostile import flood; flood({address!r}, {region})"
            started = kept.enter_context(subprocess.Popen([sys.executable, "-c", code]))
            kept.callback(started.kill)
        wait_until(lambda: bool(status(address, OTHER, "flood")), 20.0)
        answered = []
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            seen, sent = len(b.heard), time.monotonic()
            a.client.send(Post(to=b.client.me, topic="t", content={}))
            wait_until(lambda seen=seen: len(b.heard) > seen)  # type: ignore[misc]
            answered.append(time.monotonic() - sent)
            time.sleep(0.02)
        assert isinstance(b.heard[-1], Posted)
        part(a, b)
    assert max(answered) < 1.0


def test_messages_that_are_none_are_ignored_and_many_end_the_connection() -> None:
    served = serve_in_thread()
    regions: list[Region] = meet(served.address, hello(0), hello(1))
    a, b = regions
    stray = CoordinatorConnection(served.address, "run", "region", None)
    for _ in range(50):
        stray.send({"kind": "Beat", "step": "many"})
    time.sleep(0.2)
    assert not ended(stray)
    for _ in range(100):
        stray.send({"kind": "Beat", "step": -5})
    wait_until(lambda: ended(stray))
    stray.drop()
    assert a.client.is_connected and b.client.is_connected
    part(a, b)
    served.close()


def ended(connection: CoordinatorConnection) -> bool:
    return connection.call.writer.transport.is_closing() or connection.call.reader.at_eof()
