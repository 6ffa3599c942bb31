"""What processes that have died have left in a storage is removed, and nothing that a process may need."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from hf_cocodc.net import mailbox
from hf_cocodc.net.leftovers import Leftovers
from hf_cocodc.net.mailbox import Card
from hf_cocodc.net.storage import Storage
from tests.link.memory import wait_until

from .storages import folder_url
from .test_mailbox import Join, boxes, fixture_joined  # noqa: F401


def test_what_the_dead_have_left_is_removed_after_a_while(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "PERIOD_S", (0.1, 0.1))
    monkeypatch.setattr(mailbox, "LIFE_LOOK_S", (0.1, 0.1))
    url = folder_url(tmp_path)
    one, other = boxes(url)
    sock, end = joined(one, other)
    objects = Storage(url)
    left = ["lives/dead", "cards/call/1", "calls/dead/call", "calls/dead/knock", "said/dead/a-b-0/3"]
    for name in left:
        objects.put(name, msgspec.json.encode(Card("number", "dead")))
    clears = Leftovers(one)
    for number in range(4):
        assert all(objects.get(name) is not None for name in left) == (number < 3), "at first it is new"
        objects.put("lives/slow", str(number // 2).encode())
        time.sleep(0.3)
        clears.look()
    assert not any(objects.get(name) is not None for name in left)
    assert {"slow", one.process, other.process} == set(objects.names("lives")), "they live"
    sock.sendall(b"hello")
    assert end.recv(5) == b"hello"
    assert len(objects.names("cards/name")) == 2


def test_nothing_is_left_of_a_socket_that_is_over(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a request whose answer was lost has written an object anew that the other end had heard."""
    monkeypatch.setattr(mailbox, "PERIOD_S", (0.05, 0.05))
    monkeypatch.setattr(mailbox, "LIFE_LOOK_S", (0.05, 0.05))
    one, other = boxes(folder_url(tmp_path))
    sock, end = joined(one, other)
    sock.sendall(b"hello")
    assert end.recv(5) == b"hello"
    [way] = one._open_ways
    one.storage.put(f"{way._out}/0", b"again")
    sock.close()
    end.close()
    wait_until(lambda: not one._ways and not other._ways)
    wait_until(
        lambda: not [each for each in tmp_path.rglob("*") if each.is_file() and "lives" not in each.parts]
    )
