"""Members that show each other that they are alive: over real sockets, with real processes where one dies or freezes."""

from __future__ import annotations

import base64
import contextlib
import json
import math
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
from hf_cocodc.meeting import callers
from hf_cocodc.meeting import handlers as handlers_module
from hf_cocodc.meeting.channel import MAX_LINE, Channel, line_of
from hf_cocodc.meeting.handlers import Handlers
from hf_cocodc.meeting.handshake import PROTOCOL
from hf_cocodc.meeting.presence import Member, Presence
from hf_cocodc.meeting.proof import Proof
from hf_cocodc.meeting.secret import Keys
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


def test_a_member_that_leaves_gives_no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """One other end has closed at once, and one is slow: meanwhile a sign of life would be due."""
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with circle(A, B, C) as found:
        may_go_on = threading.Event()
        found.all[C]._orders.give(lambda: may_go_on.wait(PATIENCE_S))
        found.all[A]._period_s = 0.02
        found.all[A].close()
        may_go_on.set()
    assert not failed


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


def test_a_note_is_waited_for() -> None:
    """It may arrive after the transfer that tells of its region's end."""
    with circle(A, B) as found:
        assert found.all[A].note_of(1, 0.05) is None
        threading.Timer(0.2, found.all[B].leave_note, ["the disk is full"]).start()
        assert found.all[A].note_of(1, 60.0) == "the disk is full"


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
        other_run = greeting(Member(1, 44), A, run="run-8")
        with contextlib.ExitStack() as kept:
            for says in (
                *(b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4 * MAX_LINE, b"[" * MAX_LINE + b"\n", b"{}\n"),
                *(b'{"from": 3, "hf_cocodc": 9}\n', line_of(other_run)),
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


def greeting(me: Member, to: Member, **changed: Any) -> dict[str, Any]:
    """What a member says first."""
    said = {"hf_cocodc": PROTOCOL, "run": "run-7", "from": list(me), "to": list(to)}
    return {**said, "address": "127.0.0.1:1", "hello": {}, **changed}


def test_callers_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is closed for each that comes, also of those that wait to be judged. Nothing here ends by itself."""
    monkeypatch.setattr(callers, "_GREET_S", math.inf)
    with circle(timeout_s=PATIENCE_S) as found, contextlib.ExitStack() as kept:
        me, other = found.add(B), found.add(A)  # A calls B
        host, _, port = me.address.rpartition(":")

        def stranger(says: bytes) -> socket.socket:
            one = kept.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            one.sendall(says)
            return one

        silent = [stranger(b"") for _ in range(callers._MOST + 10)]
        eventually(lambda: len(me._callers._all) == callers._MOST)
        assert silent[0].recv(1) == b"", "the oldest is closed"
        waits = [line_of(greeting(Member(5, 100 + i), B)) for i in range(callers._MOST + 10)]
        first, *_ = [stranger(line) for line in waits]
        with contextlib.suppress(ConnectionResetError):  # it may not have been heard before
            assert first.recv(1) == b""
        eventually(lambda: len(me._callers._all) <= callers._MOST)
        found.meet()
        assert other.members == (B,)


@pytest.mark.parametrize("keys", [None, Keys.from_secret("a long secret of ours")], ids=["open", "secret"])
def test_callers_that_say_nothing_end_no_conversation(keys: Keys | None) -> None:
    """However many come between two messages of it."""
    with circle(timeout_s=PATIENCE_S, keys=keys) as found, contextlib.ExitStack() as kept:
        me = found.add(B)
        host, _, port = me.address.rpartition(":")
        threading.Thread(target=lambda: me.connect({A: "127.0.0.1:1"}, time.monotonic() + PATIENCE_S)).start()
        proof = Proof(keys, {"for": "presence", "run": "run-7", "from": A, "to": B})

        def stranger() -> socket.socket:
            return kept.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))

        caller = stranger()
        caller.sendall(line_of(proof.say(greeting(A, B))))
        proof.hear(json.loads(caller.makefile().readline()))
        silent = [stranger() for _ in range(callers._MOST + 10)]
        assert silent[0].recv(1) == b"", "the oldest of those is closed"
        # a member goes on in the same breath, and may say much
        last, ciphers = line_of(proof.say({"kind": "here"})), proof.ciphers()
        news = [line_of({"kind": "news", "text": text}) for text in ("y" * 5000, "z")]
        if ciphers is not None:
            news = [base64.b64encode(ciphers[0].seal(line)) + b"\n" for line in news]
        caller.sendall(b"".join([last, *news]))
        assert eventually(lambda: found.heard[B][1:] and found.heard[B]) == [
            (A, {"text": "y" * 5000}),
            (A, {"text": "z"}),
        ]


def test_a_caller_that_was_closed_a_moment_ago_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    """It says something just when others come, for whom it makes room."""
    with circle(timeout_s=PATIENCE_S) as found, contextlib.ExitStack() as kept:
        me, go_on = found.add(B), threading.Event()
        host, _, port = me.address.rpartition(":")

        def strangers() -> list[socket.socket]:
            calls = [
                socket.create_connection((host, int(port)), timeout=PATIENCE_S) for _ in range(callers._MOST)
            ]
            return [kept.enter_context(each) for each in calls]

        silent = strangers()
        eventually(lambda: len(me._callers._all) == callers._MOST)
        me._orders.give(go_on.wait)
        strangers()
        for each in silent:
            each.sendall(b"x")
        go_on.set()
        with contextlib.suppress(ConnectionResetError):
            assert silent[-1].recv(1) == b""
        eventually(lambda: len(me._callers._all) == callers._MOST)
    assert "failed for" not in caplog.text


@pytest.mark.parametrize("keys", [None, Keys.from_secret("a long secret of ours")], ids=["open", "secret"])
def test_a_member_that_was_frozen_lets_a_newcomer_in_that_has_called_twice(keys: Keys | None) -> None:
    """When it goes on, it finds both calls. The newcomer has given up the first one."""
    with circle(A, B, keys=keys) as found:
        thaws = threading.Event()
        found.all[B].accept = lambda hello: None
        found.all[B]._orders.give(lambda: thaws.wait(PATIENCE_S))
        newcomer = found.add(D)
        addresses = {B: found.all[B].address}
        with pytest.raises(RegionLostError):
            newcomer.connect(addresses, time.monotonic() + 0.3)
        threading.Timer(0.5, thaws.set).start()
        newcomer.connect(addresses, time.monotonic() + PATIENCE_S)
        newcomer.tell(B, "news", text="hello")
        assert eventually(lambda: found.heard[B]) == [(D, {"text": "hello"})]


def test_strangers_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """However often they call; and what they say is never more than a part of one line."""
    with circle(A, B) as found:
        host, _, port = found.all[A].address.rpartition(":")
        for _ in range(50):
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
                stranger.sendall(line_of(greeting(D, A, hf_cocodc="9\nregion 1 has left" + "!" * 900)))
                assert b"refused" in stranger.recv(4096)
    said = [record.getMessage() for record in caplog.records if "refuses a caller" in record.getMessage()]
    assert 0 < len(said) < 25
    assert not any("\n" in each or len(each) > 500 for each in said)


def test_a_first_line_is_short() -> None:
    """Who has not greeted is heard for no more than a few kilobytes; a member may say more."""
    with circle(A, B) as found:
        host, _, port = found.all[A].address.rpartition(":")
        for says in (b"x" * (callers._FIRST_LINE + 1), line_of(greeting(D, A, hello={"x": "y" * 5000}))):
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
                stranger.sendall(says)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        found.all[B].tell(A, "news", text="y" * 5000)
        assert eventually(lambda: found.heard[A]) == [(B, {"text": "y" * 5000})]


KEYS = Keys.from_secret("a long secret of ours")


@pytest.mark.parametrize("encrypt", [False, True])
def test_members_with_a_secret_hear_each_other(encrypt: bool) -> None:
    """In order, also what is said at once; and one altered line ends the connection."""
    with circle(A, B, C, keys=KEYS, encrypt=encrypt) as found:
        for number in range(50):
            found.all[A].tell_all("news", number=number, text="y" * 5000)
        eventually(lambda: len(found.heard[B]) == len(found.heard[C]) == 50)
        assert [content["number"] for _, content in found.heard[B]] == list(range(50))
        channel = found.all[A]._peers[C].channel
        found.all[A]._orders.give(lambda: channel._unsent.extend(b"e30=\n") or channel.flush())
        eventually(lambda: found.lost[C])
        assert found.all[C].members == (B,)
        assert not found.lost[B]


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (KEYS, Keys.from_secret("a long secret of others"), "region 0 has another secret than region 1"),
        (KEYS, None, "region 0 has no secret, and region 1 has one"),
        (None, KEYS, "region 0 has a secret, and region 1 has none"),
    ],
)
def test_another_secret_is_refused_with_the_reason(ours: Keys, theirs: Keys, reason: str) -> None:
    with circle(keys=ours) as found:
        called = found.add(B)
        caller = Presence("run-7", A, "127.0.0.1", PATIENCE_S, keys=theirs)
        with pytest.raises(MeetingError, match=f"region 1 refuses region 0: {reason}"):
            caller.connect({B: called.address}, time.monotonic() + PATIENCE_S)
        caller.close()


class Recorder:
    """Carries one call to a member, and keeps what the caller says."""

    def __init__(self, address: str) -> None:
        self.target = address.rpartition(":")[::2]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.said: list[bytes] = []
        threading.Thread(target=self.carry, daemon=True).start()

    def carry(self) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self.listener.accept()
            callee = socket.create_connection((self.target[0], int(self.target[1])))
            threading.Thread(target=self.pump, args=(callee, caller, []), daemon=True).start()
            self.pump(caller, callee, self.said)

    def pump(self, source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                kept.append(chunk)
                sink.sendall(chunk)
        sink.close()


def test_a_replayed_hello_is_of_no_use() -> None:
    """Neither to come in for the one who said it, nor to keep that one out, nor once it was lost."""
    with circle(keys=KEYS) as found:
        called = found.add(B)
        recorder = Recorder(called.address)
        other = Presence("run-7", D, "127.0.0.1", PATIENCE_S, keys=KEYS)
        called.accept = lambda hello: None
        called.connect({}, time.monotonic())
        other.connect({B: recorder.address}, time.monotonic() + PATIENCE_S)
        eventually(lambda: b"".join(recorder.said).count(b"\n") >= 2)
        lines = b"".join(recorder.said).split(b"\n")
        assert b"proof" in lines[0] and b"here" in lines[1]

        def replay() -> bytes:
            host, _, port = called.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
                stranger.sendall(b"\n".join(lines[:2]) + b"\n")
                heard = b""
                while chunk := stranger.recv(1 << 16):
                    heard += chunk
                return heard

        assert b"connected before" in replay()
        called.drop(D)
        eventually(lambda: called.members == ())
        assert b"connected before" in replay(), "a lost member comes back with a new ticket only"
        other.close()
        recorder.listener.close()
        fresh = found.all[B] = Presence("run-7", B, "127.0.0.1", PATIENCE_S, keys=KEYS)
        called.close()
        called = fresh
        called.accept = lambda hello: None
        called.connect({}, time.monotonic())
        assert b"proof" in replay(), "it is welcome, but its next message answers another number"
        assert called.members == ()
        found.add(A)
        found.meet()
        assert called.members == (A,)


def test_an_address_without_a_port_is_none() -> None:
    """Who says that it listens there is refused; who is told to call there is told that nobody answers."""
    with circle(A) as found:
        found.all[A].accept = lambda hello: None
        host, _, port = found.all[A].address.rpartition(":")
        for address in ("127.0.0.1:0", "127.0.0.1:70000", "127.0.0.1", "example.org:80", ""):
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
                stranger.sendall(line_of(greeting(D, A, address=address)))
                assert b"no address" in stranger.recv(4096)
            with pytest.raises(RegionLostError, match="region 0 could not connect to region 1"):
                found.all[A].connect({B: address}, time.monotonic() + 0.1)
        assert not [each for each in found.all[A]._callers._all if not each.is_theirs], "no socket is left"


def test_what_nobody_listens_to_is_bounded() -> None:
    """In messages and in bytes: the newest wait."""
    heard: list[Any] = []
    handlers = Handlers()
    for number in range(handlers_module._MOST + 5):
        handlers.call("few", A, {"number": number})
    handlers.on("few", lambda who, content: heard.append(content["number"]))
    assert heard == list(range(5, handlers_module._MOST + 5))
    large = {"text": "x" * 200_000}
    for _ in range(50):
        handlers.call("large", A, large)
    heard.clear()
    handlers.on("large", lambda who, content: heard.append(content))
    assert heard == [large] * (handlers_module._MOST_BYTES // 200_000)


def test_a_sign_of_life_with_numbers_that_are_none_changes_nothing() -> None:
    """But it is a sign of life. A note is cut."""
    peer = Peer(B, Channel(socket.socket()), heard_at=0.0, moved_at=0.0)
    peer.hear("alive", {"step": 3, "done": 2, "awaits": 1}, 1.0, 0)
    for said in (2**60, -1, True, 1.5, [], "4", None):
        for name in ("step", "done", "awaits")[: 2 if said is None else 3]:
            peer.hear("alive", {"step": 4, "done": 4, "awaits": 4, name: said}, 2.0, 0)
            assert (peer.inner_step, peer.done, peer.awaits, peer.heard_at) == (3, 2, 1, 2.0)
    peer.hear("note", {"text": "x" * 99_999}, 3.0, 0)
    assert peer.note == "x" * 2000
    peer.channel.close()


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


def test_a_newcomer_calls_members_whatever_their_tickets() -> None:
    """A member with a larger ticket may have come in while the newcomer was on its way: it does not know whom to call."""
    with circle(A, B) as found:
        for member in found.all.values():
            member.accept = lambda hello: None
        newcomer = found.add(C)
        addresses = {member: found.all[member].address for member in (A, B)}
        newcomer.connect(addresses, time.monotonic() + PATIENCE_S, {})
        assert newcomer.members == (A, B)


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
        for _ in range(200):
            found.all[A].tell(B, "news", text="x" * 100_000)
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
