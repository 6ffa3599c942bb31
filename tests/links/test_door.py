"""Nobody reaches gloo's listening socket, except while connections are being made."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_cocodc.coordinator.messages import Member
from hf_cocodc.errors import LinkError
from hf_cocodc.links import door
from hf_cocodc.links import introduction as introduction_module
from hf_cocodc.links.door import Door, with_door
from hf_cocodc.links.introduction import Introduction, Letters
from hf_cocodc.links.wire import Wire
from tests.links.memory import Post, connect

HOST = "127.0.0.1"
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such filter")


def reaches(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=0.2).close()
    except TimeoutError:
        return False
    return True


@linux
def test_a_door_is_open_while_anybody_opens_it() -> None:
    """And connections that were made stay."""
    listener, found = with_door(lambda: socket.create_server((HOST, 0)))
    port = listener.getsockname()[1]
    assert not reaches(port)
    with found.opened():
        with found.opened():
            there = socket.create_connection((HOST, port), timeout=5)
        assert reaches(port)
    assert not reaches(port)
    here, _ = listener.accept()
    here.sendall(b"x")
    assert there.recv(1) == b"x"
    found.close()
    assert not reaches(port), "it stays shut"
    for each in (listener, here, there):
        each.close()


def test_a_door_without_a_socket_is_open() -> None:
    """Where the system has no such filter, or nobody can say which socket it is."""
    sockets = []

    def make() -> None:
        sockets.extend(socket.create_server((HOST, 0)) for _ in range(2))

    _, found = with_door(make)
    _, none = with_door(lambda: None)
    for each in (found, none, Door(None)):
        with each.opened():
            pass
        each.close()
    for one in sockets:
        assert reaches(one.getsockname()[1])
        one.close()


@linux
def test_the_search_for_a_socket_changes_none() -> None:
    """Also where a library has set a default time-out: other libraries rely on it that their sockets block."""
    others = [socket.create_server((HOST, 0)), *socket.socketpair()]
    socket.setdefaulttimeout(5)
    try:
        made, found = with_door(lambda: socket.create_server((HOST, 0)))
        with found.opened():
            pass
    finally:
        socket.setdefaulttimeout(None)
    found.close()
    is_shut, blocks = not reaches(made.getsockname()[1]), [os.get_blocking(each.fileno()) for each in others]
    for each in (made, *others):
        each.close()
    assert is_shut
    assert all(blocks)


@linux
def test_strangers_do_not_reach_a_wire_and_newcomers_do() -> None:
    """Garbage, small numbers, and nothing at all arrive nowhere; later pairs connect, and the first one works on."""
    before = set(door._listening())
    wires = [Wire(region, 1, timeout_s=20.0) for region in range(3)]
    ports = []
    for number in [number for inode, number in door._listening().items() if inode not in before]:
        with socket.socket(fileno=os.dup(number)) as listening:
            ports.append(listening.getsockname()[1])
    assert len(ports) == 3 and not any(map(reaches, ports))
    connect(*wires[:2], key="a")
    assert not any(map(reaches, ports))
    connect(*wires[1:], key="b")
    view = [wire.view([0, 1], 0) for wire in wires[:2]]
    with ThreadPoolExecutor(2) as pool:
        told = [torch.full((1,), float(region), dtype=torch.float64) for region in range(2)]
        calls = [pool.submit(one.swap, mine, "a number") for one, mine in zip(view, told, strict=True)]
        assert [[each.item() for each in call.result()] for call in calls] == [[0.0, 1.0]] * 2
    for wire in wires:
        wire.close(broken=False)


INTRODUCTION = bytes([2, *[0] * 7, *b"vm", 8, *[0] * 7, *b"\2\0\1\2\3\4\5\6", *[7, *[0] * 7], *[8, *[0] * 7]])
"""A host name of two bytes, an address of eight, two numbers of pairs."""
FOREIGN = {
    "nothing": b"x",
    "a name beyond the end": bytes([255] * 8) + INTRODUCTION[8:],
    "a name that wraps around": bytes([240, *[255] * 7]) + INTRODUCTION[8:],
    "an address beyond the end": INTRODUCTION[:10] + bytes([99, *[0] * 7]) + INTRODUCTION[18:],
    "a shorter address": INTRODUCTION[:10] + bytes([0] * 8) + INTRODUCTION[18:],
    "another family": INTRODUCTION[:18] + b"\3\0" + INTRODUCTION[20:],
    "a number more": INTRODUCTION + bytes(8),
    "half a number": INTRODUCTION[:-4],
    "a long name": bytes([0, 8, *[0] * 6]) + bytes(2048) + INTRODUCTION[10:],
}


class Way:
    """Brings this value to the other end."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def tell(self, key: str, value: bytes) -> None:
        pass

    def hear(self, key: str) -> bytes:
        return self.value


@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_introduction_never_reaches_gloo(value: bytes) -> None:
    """gloo copies as many bytes as it says."""
    introduction = Introduction(Way(value))
    introduction.set("0/0", INTRODUCTION)
    with pytest.raises(ValueError, match="is no introduction"):
        introduction.get("0/1")


def test_an_introduction_of_ours_is_believed() -> None:
    """Whatever its host is called."""
    named = bytes([5, *[0] * 7]) + b"other" + INTRODUCTION[10:]
    introduction = Introduction(Way(named))
    introduction.set("0/0", INTRODUCTION)
    assert introduction.get("0/1") == named and introduction.get("0/0") == INTRODUCTION


def test_a_foreign_letter_ends_a_connection_with_a_sentence() -> None:
    """Not the process."""
    post = Post()
    post.way(1, 0)("k").tell("0/1", b"evil")
    wire = Wire(0, 1, timeout_s=5.0)
    with pytest.raises(LinkError, match="no introduction"):
        wire.connect(1, "k", post.way(0, 1))
    wire.close(broken=True)


@pytest.mark.parametrize(
    "content", [{}, {"key": "k"}, {"key": 3, "value": "00"}, {"key": "k", "value": "no hex"}], ids=str
)
def test_what_is_no_letter_is_ignored(content: dict[str, object]) -> None:
    letters = Letters()
    letters.put(Member(1, 2), content)
    with pytest.raises(TimeoutError):
        letters.take(Member(1, 2), "k", 0.0)


def test_letters_take_no_more_memory_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest stay; each is taken once, from its sender alone."""
    monkeypatch.setattr(introduction_module, "_MOST_LETTERS", 2)
    letters, sender = Letters(), Member(1, 2)
    for number in range(3):
        letters.put(sender, {"key": str(number), "value": "ab"})
    assert letters.take(sender, "2", 0.0) == b"\xab"
    for who, key in ((sender, "0"), (sender, "2"), (Member(1, 3), "1")):
        with pytest.raises(TimeoutError):
            letters.take(who, key, 0.0)
    assert letters.take(sender, "1", 0.0) == b"\xab"
