"""Sockets through a storage carry every byte in order, whatever the storage does, and break when the other end has gone."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.net import mailbox, storage
from hf_cocodc.net.mailbox import Mailbox
from hf_cocodc.net.reaching import Search
from hf_cocodc.net.storage import Storage, StorageError
from tests.link.memory import at_once, wait_until

from .fake_hub import BUCKET, fake_hub
from .storages import Faulty, buckets, folder_url

PATIENCE_S = 60.0
Join = Callable[[Mailbox, Mailbox], tuple[socket.socket, socket.socket]]


@pytest.fixture(name="joined")
def fixture_joined() -> Iterator[Join]:
    """Joins two processes' mailboxes under a name: the ends of a socket between them, which are closed after the test."""
    with contextlib.ExitStack() as at_end:

        def join(one: Mailbox, other: Mailbox) -> tuple[socket.socket, socket.socket]:
            boxes = ((one, True), (other, False))
            ends = at_once(*(partial(box.meet, "name", first, PATIENCE_S) for box, first in boxes))
            for end in ends:
                at_end.enter_context(end)
            return ends[0], ends[1]

        yield join


def boxes(url: str) -> tuple[Mailbox, Mailbox]:
    both = Mailbox(url), Mailbox(url)
    for box in both:
        box.begin()
    return both


def said(sock: socket.socket) -> bytes:
    """All that comes until the other end says no more."""
    sock.settimeout(PATIENCE_S)
    heard = bytearray()
    while chunk := sock.recv(1 << 20):
        heard += chunk
    return bytes(heard)


def conversation(sock: socket.socket, other: socket.socket, seed: int, size: int) -> None:
    """Both say random bytes in random portions at the same time, and hear all that the other one says."""
    drawn = random.Random(seed)
    contents = [drawn.randbytes(size), drawn.randbytes(size // 2)]

    def say(end: socket.socket, content: bytes, draws: random.Random) -> None:
        at = 0
        while at < len(content):
            step = draws.choice((1, 100, 10_000, size))
            end.sendall(content[at : at + step])
            at += step
        end.shutdown(socket.SHUT_WR)

    *_, heard, theirs = at_once(
        partial(say, sock, contents[0], random.Random(seed + 1)),
        partial(say, other, contents[1], random.Random(seed + 2)),
        partial(said, other),
        partial(said, sock),
    )
    assert [heard, theirs] == contents


def test_both_ends_say_and_hear_all(joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PIECE", 64 << 10)
    one, other = boxes(folder_url(tmp_path))
    sock, end = joined(one, other)
    conversation(sock, end, 1, 1 << 20)
    sock.close()
    end.close()
    wait_until(lambda: not one._open_ways and not other._open_ways)
    assert not [path for path in (tmp_path / "said").rglob("*") if path.is_file()], (
        "what was heard is deleted"
    )


def test_a_large_payload_is_read_and_deleted_side_by_side(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions one by one took longer than all else where a request takes its time."""
    monkeypatch.setattr(mailbox, "PIECE", 4 << 10)
    one, other = boxes(folder_url(tmp_path))
    under_way, most, lock = Counter[str](), Counter[str](), threading.Lock()

    def slow(what: str, request: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def make(named: Any) -> Any:
            with lock:
                under_way[what] += 1
                most[what] = max(most[what], under_way[what])
            time.sleep(0.01)
            with lock:
                under_way[what] -= 1
            return request(named)

        return make

    sock, end = joined(one, other)
    for what in ("read", "delete"):
        monkeypatch.setattr(other.storage._backend, what, slow(what, getattr(other.storage._backend, what)))
    content = random.Random(0).randbytes(40 * mailbox.PIECE)
    _, heard = at_once(partial(sock.sendall, content), partial(heard_of, end, len(content)))
    assert heard == content
    assert most["delete"] > 1 and most["read"] > 1


def heard_of(sock: socket.socket, size: int) -> bytes:
    heard = bytearray()
    while len(heard) < size:
        heard += sock.recv(1 << 20)
    return bytes(heard)


def test_the_same_through_a_bucket(joined: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "FAR_S", (0.01, 0.1))
    with buckets() as url:
        sock, end = joined(*boxes(url))
        conversation(sock, end, 1, 1 << 18)


def test_the_same_through_a_bucket_of_a_fake_hub(joined: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "FAR_S", (0.01, 0.1))
    with fake_hub() as hub:
        sock, end = joined(*boxes(f"hf://buckets/{BUCKET}/meeting"))
        conversation(sock, end, 1, 1 << 18)
        assert hub.asked["batch"] and hub.asked["resolve"]


@pytest.mark.parametrize("seed", range(3))
def test_a_storage_that_fails_loses_nothing(
    joined: Join, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests fail before and after they are carried out, and reads find torn or no objects."""
    monkeypatch.setattr(mailbox, "PIECE", 4 << 10)
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(storage, "_TRIES", 30)
    one, other = boxes(folder_url(tmp_path))
    faulty = [Faulty(box.storage, seed + place) for place, box in enumerate((one, other))]
    sock, end = joined(one, other)
    conversation(sock, end, seed, 100_000)
    assert all(each.faults > 5 for each in faulty)


@pytest.mark.parametrize(("url", "costs"), [("s3://bucket/run", True), ("ssh://host/run", False)])
def test_the_log_says_how_many_requests_and_what_they_cost(
    url: str, costs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In half an hour, at the list price of the storage that it is; where none is known, of no other one."""
    box = Mailbox(folder_url(tmp_path))
    box.storage.url = url
    box.storage.requests.update(write=1000, read=10_000)
    box._told_at = time.monotonic() - 1800
    monkeypatch.setattr(mailbox, "_TELL_S", 0.0)
    with caplog.at_level("INFO", logger="hf_cocodc.net.mailbox"):
        box._tell()
    [line] = [each.getMessage() for each in caplog.records if url in each.getMessage()]
    assert re.search(
        r": requests an hour: (\d to list, )?200\d\d to read, 200\d to write; 0.0 MB an hour written", line
    )
    assert (
        line.endswith("the requests cost 0.018 dollars an hour (S3 Standard, list price of November 2026)")
        == costs
    )
    assert ("dollars" in line) == costs


def test_a_socket_to_a_card_of_an_earlier_life_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are of two lives, so regions do not meet one. The simulation goes on with the next socket."""
    monkeypatch.setattr(mailbox, "PERIOD_S", (0.05, 0.05))
    monkeypatch.setattr(mailbox, "LIFE_LOOK_S", (0.05, 0.05))
    monkeypatch.setattr(mailbox, "_MEET_S", 0.2)
    url = folder_url(tmp_path)
    with pytest.raises(TimeoutError):
        Mailbox(url).meet("name", True, 0.2)
    with Mailbox(url).meet("name", False, PATIENCE_S) as sock:
        sock.settimeout(PATIENCE_S)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_a_socket_breaks_when_the_other_process_has_stopped(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reset: nobody has closed it in good order."""
    monkeypatch.setattr(mailbox, "PERIOD_S", (0.05, 0.05))
    monkeypatch.setattr(mailbox, "LIFE_LOOK_S", (0.05, 0.05))
    monkeypatch.setattr(Mailbox, "_tell", lambda self: None)
    one, other = boxes(folder_url(tmp_path))
    sock, end = joined(one, other)
    end.sendall(b"last words")
    assert sock.recv(100) == b"last words"
    monkeypatch.setattr(other, "_show_life", lambda: None)
    sock.settimeout(PATIENCE_S)
    with pytest.raises(ConnectionResetError):
        sock.recv(1)


def test_a_process_that_begins_says_who_has_died_here(tmp_path: Path) -> None:
    """Others need not wait then until they have looked often enough."""
    objects = Storage(folder_url(tmp_path))
    died = subprocess.Popen(["true"])
    died.wait()
    here = mailbox._space()
    names = [f"{died.pid}-{here}-a", f"{os.getpid()}-{here}-b", f"{died.pid}-elsewhere-c", "d"]
    for name in names:
        objects.put(f"lives/{name}", b'{"count":1,"said":{}}')
    assert [mailbox.has_died(name) for name in names] == [True, False, False, False]
    box = Mailbox(folder_url(tmp_path))
    box.begin()
    wait_until(lambda: objects.get(f"lives/{names[0]}") == b'{"count":-1,"said":{}}')
    assert all(objects.get(f"lives/{name}") == b'{"count":1,"said":{}}' for name in names[1:])
    wait_until(lambda: has_ended(box, names[0]))
    assert not has_ended(box, names[2]), "its machine knows"


def test_a_machine_of_which_another_one_says_the_same_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sandboxes that emulate a system: a process of one would be dead in the other one, which has none of its number."""
    spaces = []
    for name in ("one", "one", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(mailbox.tempfile, "gettempdir", lambda name=name: str(tmp_path / name))
        spaces.append(mailbox._space.__wrapped__())
    assert spaces[0] == spaces[1] != spaces[2]
    assert len([*(tmp_path / "one").iterdir()]) == 1
    (tmp_path / "bare").mkdir()
    monkeypatch.setattr(mailbox.tempfile, "gettempdir", lambda: str(tmp_path / "bare"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *names: os.stat(tmp_path / "no hard links"))
        assert mailbox._space.__wrapped__() != mailbox._space.__wrapped__(), "nothing is known then"
    assert not [*(tmp_path / "bare").iterdir()]
    monkeypatch.setattr(mailbox.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    assert mailbox._space.__wrapped__() != mailbox._space.__wrapped__(), "nothing is known then"


def has_ended(box: Mailbox, process: str) -> bool:
    try:
        box.life(process)
    except mailbox.Died:
        return True
    return False


def test_a_socket_to_a_process_that_has_died_ends_as_its_system_would_end_it(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In good order, although this end has said something that nobody hears any more. Nor does anybody come under its name."""
    for pace in ("PERIOD_S", "LIFE_LOOK_S"):
        monkeypatch.setattr(mailbox, pace, (0.05, 0.05))
    one, other = boxes(folder_url(tmp_path))
    sock, end = joined(one, other)
    end.sendall(b"last words")
    assert sock.recv(100) == b"last words"
    monkeypatch.setattr(other, "_show_life", lambda: None)
    monkeypatch.setattr(other.storage, "get", lambda name: None)
    one.storage.put(f"lives/{other.process}", b'{"count":-1,"said":{}}')
    sock.settimeout(PATIENCE_S)
    sock.sendall(b"nobody hears this")
    assert sock.recv(1) == b""
    sock.close()
    with pytest.raises(mailbox.Died):
        one.meet("name", True, PATIENCE_S)


def test_a_socket_breaks_when_the_other_end_begins_again(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = boxes(folder_url(tmp_path))
    sock, end = joined(one, other)
    for earlier in (sock, end):
        earlier.sendall(b"1")
    assert sock.recv(1) == end.recv(1) == b"1"
    again, anew = joined(one, other)
    for earlier in (sock, end):
        earlier.settimeout(PATIENCE_S)
        with pytest.raises(ConnectionResetError):
            earlier.recv(1)
    again.sendall(b"hello")
    assert anew.recv(5) == b"hello"


def test_what_was_said_before_the_end_of_a_process_is_written(joined: Join, tmp_path: Path) -> None:
    one, other = boxes(folder_url(tmp_path))
    sock, end = joined(one, other)
    content = random.Random(0).randbytes(3 << 20)
    sock.sendall(content)
    sock.close()
    one.flush(PATIENCE_S)
    assert not one.says
    assert said(end) == content


def test_a_storage_that_is_away_for_a_while_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of two regions goes on after a request has failed for good."""
    url, calls, meet = folder_url(tmp_path), Counter[bool](), Mailbox.meet

    def fails_once(box: Mailbox, name: str, is_first: bool, *how: Any) -> socket.socket:
        calls[is_first] += 1
        if calls[is_first] == 1:
            raise StorageError("503 Slow Down")
        return meet(box, name, is_first, *how)

    monkeypatch.setattr(Mailbox, "meet", fails_once)
    searches = [Search(asks, PATIENCE_S, storage=url) for asks in (True, False)]
    found = at_once(*(partial(each.run, (), b"token", b"name") for each in searches))
    assert found[0].words == found[1].words and [each.address for each in found] == [(url, 0)] * 2
    for each in found:
        each.connection.close()
