"""Members that show each other that they are alive: over real sockets, with real processes where one dies or freezes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hf_cocodc.errors import MeetingError, RegionLostError
from hf_cocodc.meeting.channel import MAX_LINE, Channel
from hf_cocodc.meeting.handshake import PROTOCOL
from hf_cocodc.meeting.presence import Member, Presence
from hf_cocodc.meeting.signs import Peer
from tests.meeting.test_stopping import Way
from tests.meeting.waiting import eventually
from tests.processes.launching import ROOT

PATIENCE_S = 30.0


class Circle:
    """Members that have met, and what each has heard and lost."""

    def __init__(self, *members: Member, **settings: Any) -> None:
        self.settings = {"timeout_s": PATIENCE_S, **settings}
        self.all: dict[Member, Presence] = {}
        self.heard: dict[Member, list[tuple[Member, dict[str, Any]]]] = {}
        self.lost: dict[Member, list[tuple[Member, str]]] = {}
        for member in members:
            self.add(member)
        self.meet()

    def add(self, member: Member) -> Presence:
        found = self.all[member] = Presence("run-7", member, "127.0.0.1", **self.settings)
        heard, lost = self.heard.setdefault(member, []), self.lost.setdefault(member, [])
        found.on("news", lambda who, content: heard.append((who, content)))
        found.on_lost(lambda who, why: lost.append((who, why)))
        return found

    def meet(self) -> None:
        addresses = {member: each.address for member, each in self.all.items()}
        with ThreadPoolExecutor(16) as pool:
            list(
                pool.map(
                    lambda each: each.connect(addresses, time.monotonic() + PATIENCE_S), self.all.values()
                )
            )

    def close(self) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(Presence.close, self.all.values()))


@contextlib.contextmanager
def circle(*members: Member, **settings: Any) -> Iterator[Circle]:
    found = Circle(*members, **settings)
    try:
        yield found
    finally:
        found.close()


A, B, C, D = (Member(region, ticket) for region, ticket in ((0, 9), (1, 3), (2, 5), (3, 12)))


def test_members_hear_each_other() -> None:
    """Whoever calls whom: each knows all others, hears what it is told in order, and where they are."""
    with circle(A, B, C, D) as found:
        assert all(set(each.members) == {A, B, C, D} - {me} for me, each in found.all.items())
        for number in range(50):
            found.all[A].tell_all("news", number=number)
        found.all[B].tell(C, "news", only="for you")
        found.all[D].inner_step, found.all[D].done, found.all[D].doing = 17, 4, "sends its base"
        found.all[D].wait_for(1, "a mean")
        eventually(lambda: len(found.heard[B]) == len(found.heard[D]) == 50 and len(found.heard[C]) == 51)
        assert found.heard[B] == found.heard[D] == [(A, {"number": number}) for number in range(50)]
        assert (B, {"only": "for you"}) in found.heard[C]
        eventually(
            lambda: (
                (seen := found.all[A].seen(3)) and seen[1] == 17 and seen[3:7] == (4, 1, "", "sends its base")
            )
        )
        assert found.all[A].seen(7) is None
    assert not any(found.lost.values()), "who leaves in good order is not lost"


def test_one_thread_serves_any_number_of_members() -> None:
    """Threads do not grow with the number of regions."""
    before = threading.active_count()
    with circle(*(Member(region, region) for region in range(8))):
        assert threading.active_count() == before + 8


def test_a_region_that_leaves_says_why_and_one_that_ends_well_is_not_lost() -> None:
    """The reason is known to all others, for as long as they want to quote it."""
    with circle(A, B, C, D) as found:
        found.all[B].leave_note("the disk is full")
        found.all[C].close("KeyboardInterrupt at step 7")
        found.all[D].close()
        assert eventually(lambda: found.lost[A]) == [(C, "it has left: KeyboardInterrupt at step 7")]
        eventually(lambda: found.all[A].members == (B,))
        assert found.all[A].note_of(2) == "KeyboardInterrupt at step 7"
        assert found.all[A].note_of(3) is None
        assert eventually(lambda: found.all[A].note_of(1)) == "the disk is full" == found.all[B].note_of(1)


def test_a_silent_member_is_lost_at_both_ends() -> None:
    """A partition: connections live, nothing arrives. Only those that do not hear each other miss each other."""
    called = Member(3, 1)  # all others call it
    with circle(timeout_s=1.0) as found:
        way = Way(int(found.add(called).address.rpartition(":")[2]))
        found.all[called].address = f"127.0.0.1:{way.port}"
        for member in (B, C):
            found.add(member)
        found.meet()
        way.open.clear()
        eventually(lambda: len(found.lost[called]) == 2 and found.lost[B] and found.lost[C])
        assert "no sign of life for 1 s (regions.timeout_s=1)" in found.lost[B][0][1]
        assert [who for who, _ in found.lost[B] + found.lost[C]] == [called, called]
        way.open.set()


def test_a_late_member_is_waited_for_and_a_stuck_one_is_not() -> None:
    """Signs of life do not help a member that makes no step; steps do, unless there is a limit (grace)."""
    with circle(A, B, C, timeout_s=0.4, stuck_timeout_s=1.0) as found:
        found.all[A].wait_for(1, "a mean")
        for step in range(15):
            found.all[B].inner_step = step + 1
            time.sleep(0.1)
        assert not found.lost[A]
        assert found.all[A].waited_s() > 1.0
        found.all[A].arrived()
        assert found.all[A].awaits is None
        found.all[A].wait_for(2, "a mean")
        assert eventually(lambda: found.lost[A])[0][0] == C
        assert "it is alive, but has been stuck at step 0" in found.lost[A][0][1]
        assert found.all[A].seen(2).lost == "stuck"
        assert C in found.all[A].members, "it may still have something to say"
        found.all[A].grace = lambda: 0.2
        found.all[A].wait_for(1, "a mean")
        assert eventually(lambda: found.lost[A][1:]) == [
            (B, "it is late by more than 0.2 s (regions.grace_s)")
        ]


def test_a_patient_member_misses_only_whom_it_waits_for() -> None:
    """In a run whose regions are fixed, what dies unnoticed costs nothing until it is needed."""
    with circle(A, B, C, patient=True) as found:
        found.all[B].close("no more")
        eventually(lambda: found.all[A].members == (C,))
        found.all[A].wait_for(2, "a mean")
        time.sleep(1.0)
        assert not found.lost[A]
        found.all[A].wait_for(1, "a mean")
        assert eventually(lambda: found.lost[A]) == [(B, "it has left: no more")]


def test_strangers_and_garbage_end_nothing() -> None:
    """Callers that say nothing, nonsense, or too much; of another run; members that send what no member sends."""
    with circle(A, B) as found:
        host, _, port = found.all[A].address.rpartition(":")
        greeting = {
            "hf_cocodc": PROTOCOL,
            "run": "run-8",
            "from": [1, 44],
            "to": [0, 9],
            "address": "",
            "hello": {},
        }
        with contextlib.ExitStack() as kept:
            for says in (
                *(b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4 * MAX_LINE, b"[" * MAX_LINE + b"\n", b"{}\n"),
                *(b'{"from": 3, "hf_cocodc": 9}\n', json.dumps(greeting).encode() + b"\n"),
            ):
                stranger = kept.enter_context(socket.create_connection((host, int(port))))
                with contextlib.suppress(OSError):
                    stranger.sendall(says)
            assert b"another run" in stranger.recv(4096)
            peer = next(iter(found.all[B]._peers.values()))
            for mad in (
                b"\xff\xfe\n",
                b"[]\n",
                b'{"kind": 3}\n',
                b"x" * (2 * MAX_LINE) + b"\n",
                b"[" * 9999 + b"\n",
            ):
                found.all[B]._orders.give(lambda mad=mad: peer.channel.write(mad))
            found.all[B].tell(A, "alive", step="far", done=[], awaits={})
            found.all[B].tell(A, "news", number=1)
            assert eventually(lambda: found.heard[A]) == [(B, {"number": 1})]
            assert not found.lost[A]


def test_a_handler_that_fails_silences_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so; later messages arrive."""
    with circle(A, B) as found:
        found.all[A].on("bad", lambda who, content: 1 / 0)
        found.all[B].tell(A, "bad", number=5)
        found.all[B].tell(A, "news", number=1)
        eventually(lambda: found.heard[A])
    assert "failed for (Member(region=1, ticket=3), {'number': 5})" in caplog.text


def test_who_begins_to_listen_late_misses_nothing() -> None:
    """Messages wait for the first handler of their kind, and losses for the first that hears of them."""
    found = Circle(B)
    me = Presence("run-7", A, "127.0.0.1", timeout_s=PATIENCE_S)
    found.all[A] = me
    found.meet()
    found.all[B].tell(A, "early", number=1)
    found.all[B].tell(A, "early", number=2)
    found.all[B].close("no more")
    eventually(lambda: not me.members)
    heard: list[Any] = []
    me.on("early", lambda who, content: heard.append(content["number"]))
    me.on_lost(lambda who, why: heard.append(why))
    eventually(lambda: len(heard) == 3)
    assert [each for each in heard if each != "it has left: no more"] == [1, 2]
    found.close()


def test_a_newcomer_is_judged_by_every_member() -> None:
    """Members refuse newcomers, or judge them by their hello; what was dropped comes back only with another ticket."""
    with circle(A, B) as found:
        addresses = {member: each.address for member, each in found.all.items()}
        new = found.add(D)
        with pytest.raises(MeetingError, match=r"region [01] refuses region 3: regions cannot join this run"):
            new.connect(addresses, time.monotonic() + PATIENCE_S)
        hellos = []
        for member in (A, B):
            found.all[member].accept = lambda hello: (
                hellos.append(hello) or ("region 3 is alive" if hello["age"] else None)
            )
        with pytest.raises(MeetingError, match="region 3 is alive"):
            new.connect(addresses, time.monotonic() + PATIENCE_S, {"age": 1})
        told: list[dict[str, Any]] = []
        found.all[A].on("connected", lambda who, hello: told.append(hello))
        new.connect(addresses, time.monotonic() + PATIENCE_S, {"age": 0})
        assert hellos[-1] == {"age": 0, "region": 3, "ticket": 12, "address": new.address}
        eventually(lambda: told == [hellos[-1]] and all(D in found.all[m].members for m in (A, B)))
        found.all[A].tell(D, "news", last="word")
        found.all[A].drop(D)
        eventually(lambda: found.lost[D] and found.heard[D])
        assert (A, {"last": "word"}) in found.heard[D]
        assert found.all[A].members == (B,)
        assert not found.lost[A]
        assert found.all[A]._knows(D), "it does not come back by itself"


def test_who_calls_early_waits_and_who_never_comes_is_named() -> None:
    """A member may call another before that one knows whom to expect."""
    found = Circle()
    first, second = found.add(B), found.add(A)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(
            second.connect, {B: first.address, A: second.address}, time.monotonic() + PATIENCE_S
        )
        time.sleep(0.3)
        assert not early.done()
        first.connect({A: second.address}, time.monotonic() + PATIENCE_S)
        early.result()
    with pytest.raises(
        RegionLostError, match="region 1 could not connect to region 3 at 127.0.0.1:1 from its own"
    ):
        first.connect({D: "127.0.0.1:1"}, time.monotonic() + 0.5)
    with pytest.raises(
        RegionLostError, match="region 0 could not connect to region 2 at 127.0.0.1:1 from its own"
    ):
        second.connect({C: "127.0.0.1:1"}, time.monotonic() + 0.5)
    found.close()


ALONE = """
import multiprocessing, sys, time
from hf_cocodc.meeting.handshake import PROTOCOL
from hf_cocodc.meeting.presence import Member, Presence
me = Presence("run-7", Member(1, 3), "127.0.0.1", timeout_s={timeout_s})
print(me.address, flush=True)
me.connect({{Member(0, 9): ""}}, time.monotonic() + 30)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
child.start()
print(child.pid, flush=True)
for step in range(10 ** 9):
    me.inner_step = step
    time.sleep(0.01)
"""


@contextlib.contextmanager
def with_a_process(timeout_s: float) -> Iterator[tuple[Circle, subprocess.Popen, int]]:
    """Member A here, member B in a process of its own, which has a forked child."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE.format(timeout_s=timeout_s)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    found = Circle(timeout_s=timeout_s)
    child = 0
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        me = found.add(A)
        me.connect({B: address}, time.monotonic() + PATIENCE_S)
        child = int(process.stdout.readline())
        yield found, process, child
    finally:
        process.kill()
        process.wait()
        if child:
            os.kill(child, signal.SIGKILL)
        process.stdout.close()
        found.close()


def test_a_killed_process_is_lost_at_once_though_its_children_live() -> None:
    """A DataLoader's workers have copies of all sockets; they must not keep the dead alive."""
    with with_a_process(timeout_s=60.0) as (found, process, child):
        process.kill()
        assert eventually(lambda: found.lost[A]) == [
            (B, "its process has died: it has closed its connection")
        ]
        os.kill(child, 0)  # it lives


def test_a_frozen_process_is_lost_after_the_timeout_and_blocks_nobody() -> None:
    """What it is told waits for it. On waking it does not take its own pause for a silence of the others."""
    with with_a_process(timeout_s=1.0) as (found, process, _):
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(200):
            found.all[A].tell(B, "news", text="x" * 100_000)
        assert time.monotonic() - began < PATIENCE_S
        assert eventually(lambda: found.lost[A])[0][0] == B
        assert found.all[A].seen(1).lost in ("silent", "closed"), "too much waited for it, or too long"


def test_how_far_a_member_is_behind_is_said_only_where_it_is_certain() -> None:
    """A sign is under way for a while, in which regions make steps."""
    channel = Channel(socket.socket())
    peer, found = Peer(B, channel, heard_at=0.0, moved_at=0.0), []
    for step, own_step in ((0, 100), (40, 130), (55, 155), (60, 155), (130, 160), (131, 160), (140, 140)):
        peer.hear("alive", {"step": step, "done": 0, "awaits": None}, 1.0, own_step)
        found.append(peer.seen(1.0).behind)
    channel.close()
    assert found == [0, 90, 100, 95, 0, 29, 0]
