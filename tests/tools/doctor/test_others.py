"""Doctors of several regions compare at a coordinator what they find, and call each other."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import MeetingError
from hf_cocodc.net.keys import Keys
from hf_cocodc.settings import RegionConfig
from hf_cocodc.tools.doctor import coordinator as doctors_coordinator
from hf_cocodc.tools.doctor import others
from hf_cocodc.tools.doctor.facts import OK, WARN, WRONG, Finding
from tests.net.swallowing import Swallowing
from tests.secret import secret

KEYS = Keys.from_secret(secret("a secret for the tests of a doctor"))
MINE: dict[str, Any] = {
    "versions": {"hf-cocodc": "0.1.0", "torch": "2.13.0+cpu", "datasets": "5.2.0"},
    "settings": {"outer.sync_interval": 30, "regions.timeout_s": 120.0, "regions.may_differ": ""},
    "facts": {"data.path": "/data", "data.block_size": 1024},
    "data": "690 documents, fingerprint 12ab",
}
LONG_AGO = {
    "host": "far away",
    "calls": "127.0.0.1:9",
    "token": "t",
    "beats": 1,
    "reached": [],
    "missed": [],
    **MINE,
}


class Shelf:
    """A coordinator in this process, as the doctor of one region sees it."""

    coordinator = "10.0.0.1:29650"

    def __init__(self, region: int = 0, told: dict[int, Any] | None = None) -> None:
        self.region, self.told = region, told if told is not None else {}

    def tell(self, told: Mapping[str, Any]) -> dict[int, Any]:
        self.told[self.region] = json.loads(json.dumps(told))
        return self.told

    def relay(self) -> str | None:
        return None


class Living(Shelf):
    """A coordinator at which region 1's doctor is alive: its words change whenever they are read."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self._theirs, self._beats = {**LONG_AGO, **changes}, 0

    def tell(self, told: Mapping[str, Any]) -> dict[int, Any]:
        self._beats += 1
        return {1: {**self._theirs, "beats": self._beats}}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only goes on where the doctor waits, however busy this machine is."""
    now = SimpleNamespace(s=0.0)

    def wait(seconds: float) -> None:
        now.s += seconds

    def read() -> float:
        return now.s

    fake = SimpleNamespace(monotonic=read, perf_counter=read, time=read, sleep=wait)
    monkeypatch.setattr(others, "time", fake)
    return now


def compared(board: Any, wait_s: float = 0.0, **changes: Any) -> list[Finding]:
    found: Mapping[str, Any] = {**MINE, **changes}
    return list(others.compare(board, 2, found, "127.0.0.1", wait_s, lambda words: None, RegionConfig()))


def settings(**changes: Any) -> dict[str, Any]:
    return MINE["settings"] | changes


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, OK, "same versions of this package and torch, settings and data"),
        ({"data": "691 documents, fingerprint 12ab"}, WRONG, "other data: 690 documents, fing"),
        (
            {"settings": settings(**{"outer.sync_interval": 60})},
            WRONG,
            "another recipe: outer.sync_interval is 30 there, 60 here.",
        ),
        (
            {"facts": MINE["facts"] | {"data.path": "/elsewhere"}},
            WRONG,
            "another recipe: data.path is '/data' there, '/elsewhere' here.",
        ),
        ({"versions": MINE["versions"] | {"torch": "2.12.0"}}, WRONG, "has torch 2.13.0, this machine 2.12.0"),
        ({"versions": MINE["versions"] | {"torch": "2.13.0"}}, OK, "same versions"),
        ({"versions": MINE["versions"] | {"datasets": "5.1.0"}}, WARN, "has datasets 5.2.0, this machine 5.1.0"),
    ],
)  # fmt: skip
def test_what_others_have_told_is_compared(changes: dict[str, Any], level: str, words: str) -> None:
    """The first doctor finds nothing; the second compares with what the first has left there."""
    board = Shelf(0)
    [first] = compared(board)
    assert (first.level, first.topic) == (WARN, "region 1") and "nothing was compared" in first.words
    found = compared(Shelf(1, board.told), **changes)
    assert level in [each.level for each in found if words in each.words], found
    assert (WRONG in [each.level for each in found]) == (level == WRONG)
    assert all(each.command for each in found if each.level == WRONG)


@pytest.mark.parametrize(
    ("allowed", "changes", "level", "words"),
    [
        (["path"], {"facts": MINE["facts"] | {"data.path": "/x"}}, WARN, "data.path is '/data' there, '/x' here"),
        (["torch"], {"versions": MINE["versions"] | {"torch": "2.12.0"}}, WARN, "has torch 2.13.0"),
        (["path"], {"facts": MINE["facts"] | {"data.path": "/x"}, "data": "9 documents"}, WARN, "other data: 690"),
        (["path"], {"facts": MINE["facts"] | {"data.block_size": 8}}, WRONG, "data.block_size is 1024 there, 8"),
        (["path"], {"data": "9 documents"}, WRONG, "other data: 690"),
        ([], {"settings": {"regions.may_differ": "seed"}}, WRONG, "regions.may_differ is '' there, 'seed' here"),
        (["sync_interval"], {"settings": {"outer.sync_interval": 60}}, WRONG, "outer.sync_interval is 30 there"),
    ],
)  # fmt: skip
def test_what_may_differ(allowed: list[str], changes: dict[str, Any], level: str, words: str) -> None:
    """What the regions of the run will let pass, named by regions.may_differ, is no fault; the key is named all the same."""
    board = Shelf(0)
    theirs = settings(**{"regions.may_differ": ",".join(allowed)})
    compared(board, settings=theirs)
    ours = changes | {"settings": {**theirs, **changes.get("settings", {})}}
    found = compared(Shelf(1, board.told), **ours)
    assert level in [each.level for each in found if words in each.words], found
    assert (WRONG in [each.level for each in found]) == (level == WRONG)


def test_doctors_that_wait_call_each_other() -> None:
    """Over a real coordinator with a secret: each reaches the other, and says how long it took."""
    served = serve_in_thread(secrets=[KEYS])
    found: dict[int, list[Finding]] = {}

    def doctor(region: int) -> None:
        found[region] = compared(others.Board(served.address, KEYS, "a run", region), wait_s=60.0)

    threads = [threading.Thread(target=doctor, args=(region,), name=f"doctor-{region}") for region in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    for lines in found.values():
        assert [each.level for each in lines] == [OK, OK], lines
        assert re.search(r"answers at 127.0.0.1:\d+ in [\d.e-]+ ms$", lines[1].words)
    served.close()


def test_one_that_does_not_answer_is_wrong(clock: SimpleNamespace) -> None:
    """Its words at the coordinator change, so it is there; but its address answers nobody."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    found = compared(Living(calls=address), wait_s=1.0)
    [line] = [each for each in found if each.level == WRONG]
    assert f"does not answer at {address} (Connection refused), and does not reach this machine" in line.words
    assert "regions.announce=HOST:29700" in str(line.command)


def test_one_way_is_enough(clock: SimpleNamespace) -> None:
    """A region behind NAT calls, and is not called; whichever of the two it is."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    board = Living(calls=address)
    tell = board.tell

    def reached(told: Mapping[str, Any]) -> dict[int, Any]:
        return {1: {**tell(told)[1], "reached": [told["token"]]}}

    board.tell = reached  # type: ignore[method-assign]
    found = compared(board, wait_s=1.0)
    assert [each.level for each in found] == [OK, OK]
    assert f"does not answer at {address} (Connection refused), but calls this machine" in found[1].words
    here = others.Answering("127.0.0.1", RegionConfig())
    board = Living(calls=f"{address},{here.address}")
    found = compared(board, wait_s=1.0)
    assert [each.level for each in found] == [OK, OK]
    assert "it does not reach this machine, and one way is enough" in found[1].words
    here.close()


def test_a_way_on_which_large_packets_vanish_is_wrong(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects, and hears the time there: without a large round trip, that was "ok" in 0.2 ms."""
    monkeypatch.setattr(others, "_REACH_S", 0.2)
    here = others.Answering("127.0.0.1", RegionConfig())
    way = Swallowing(here.address)
    found = compared(Living(calls=way.address), wait_s=1.0)
    [line] = [each for each in found if each.level == WRONG]
    assert line.words.startswith(f"answers at {way.address}, but small packets pass, and large ones vanish")
    assert "MTU" in line.words and "mtu 1400" in str(line.command)
    assert others.call(("127.0.0.1", int(here.address.rpartition(":")[2])))[0] < 5
    for each in (way, here):
        each.close()


def test_a_doctor_listens_where_the_run_will() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    regions = RegionConfig(port=port, announce=["a.example", "203.0.113.7:80"])
    answering = others.Answering("127.0.0.1", regions)
    assert answering.address == f"a.example:{port},203.0.113.7:80"
    assert others.call(("127.0.0.1", port))[0] < 5
    answering.close()


def test_a_call_takes_one_round_trip(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link with 100 ms, to a clock that is 5 s ahead: connecting takes one round trip, and so does the answer."""

    class Connection:
        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *error: Any) -> None: ...

        def settimeout(self, seconds: float) -> None: ...

        def recv(self, num_bytes: int) -> bytes:
            clock.s += 0.1
            return f"{5 + clock.s - 0.05:.6f}\n".encode()

    def connect(address: tuple[str, int], timeout: float) -> Connection:
        clock.s += 0.1
        return Connection()

    monkeypatch.setattr(others.socket, "create_connection", connect)
    monkeypatch.setattr(others, "prove", lambda connection: None)
    took, ahead = others.call(("10.0.0.2", 29700))
    assert took == pytest.approx(0.1)
    assert ahead == pytest.approx(5.0)


class Away(Living):
    """A coordinator that goes away after some calls."""

    def __init__(self, calls: int, **changes: Any) -> None:
        super().__init__(**changes)
        self._left = calls

    def tell(self, told: Mapping[str, Any]) -> dict[int, Any]:
        self._left -= 1
        if self._left < 0:
            raise MeetingError("the coordinator at 10.0.0.1:29650 has closed the connection.")
        return super().tell(told)


@pytest.mark.parametrize("calls", range(3))
def test_a_coordinator_that_goes_away(calls: int, clock: SimpleNamespace) -> None:
    """While a doctor tells or waits: a line, after which it says what it knows of the others."""
    found = compared(Away(calls), wait_s=100.0)
    assert [each.level for each in found if each.topic == "coordinator"] == [WRONG]
    assert "has closed the connection" in found[0].words
    assert str(found[0].command).startswith("hf-cocodc coordinator --host 10.0.0.1")
    assert ("region 1" in [each.topic for each in found]) == (calls >= 1)


def test_a_real_coordinator_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has ended."""
    monkeypatch.setattr(others, "told_by_doctors", partial(others.told_by_doctors, timeout_s=0.2))
    served = serve_in_thread()
    board = others.Board(served.address, None, "a run", 0)
    told = others.compare(board, 2, MINE, "127.0.0.1", 0.0, lambda words: None, RegionConfig())
    board.tell(LONG_AGO)
    served.close()
    assert [(each.topic, each.level) for each in told] == [("coordinator", WRONG)]


def test_an_interrupt_shows_what_is_known(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait, not what was compared."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(others.time, "sleep", interrupted)
    seen: list[Finding] = []

    def look(lines: Iterator[Finding]) -> None:
        for each in lines:
            seen.append(each)

    with pytest.raises(KeyboardInterrupt):
        look(others.compare(Living(), 2, MINE, "127.0.0.1", 100.0, lambda words: None, RegionConfig()))  # type: ignore[arg-type]
    assert "same versions" in seen[0].words and "it was not called" in seen[1].words


@pytest.mark.parametrize(
    "told", [{}, [1], None, {"host": 1}, {**LONG_AGO, "calls": "nowhere"}, {**LONG_AGO, "x": 1}]
)
def test_what_no_doctor_tells_is_said(told: Any) -> None:
    """What others tell is never believed, and breaks nothing."""
    [line] = compared(Shelf(0, {1: told}))
    assert line.level == WRONG and "is not what a doctor of this version tells" in line.words
    assert line.topic == "region 1" and line.command


def test_what_others_say_is_no_command() -> None:
    """A command is pasted into a shell: what another region says of itself stands in quotes there, or not at all."""
    evil = "x; touch /tmp/y"
    versions = {"hf-cocodc": evil, "torch": "$(touch /tmp/y)"}
    facts = {"data.path": evil, evil: 1}
    found = compared(Living(host=evil, versions=versions, facts=facts))
    commands = [str(each.command) for each in found if each.level == WRONG]
    assert commands[0] == "pip install 'hf-cocodc==x; touch /tmp/y'"
    assert commands[1] == "pip install 'torch==$(touch /tmp/y)'"
    assert commands[2].endswith(f"--set 'regions.may_differ=data.path,data.block_size,{evil}'")


def test_an_address_on_which_nobody_can_listen() -> None:
    found = list(others.compare(Shelf(), 2, MINE, "203.0.113.7", 1.0, lambda words: None, RegionConfig()))  # type: ignore[arg-type]
    assert [(each.topic, each.level) for each in found] == [("regions", WRONG)]
    assert "cannot listen on 203.0.113.7" in found[0].words and "regions.interface" in str(found[0].command)


def test_a_port_that_a_region_of_this_machine_has() -> None:
    """It listens while it waits for the others, too."""
    with socket.create_server(("127.0.0.1", 0)) as region:
        regions = RegionConfig(port=region.getsockname()[1])
        [found] = others.compare(Shelf(), 2, MINE, "127.0.0.1", 1.0, lambda words: None, regions)  # type: ignore[arg-type]
    assert "A region of this machine that waits or trains has its port already" in found.words


def test_a_relay_that_this_machine_reaches_is_a_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as relay:
        port = relay.getsockname()[1]
        served = serve_in_thread(secrets=[KEYS], relay=port)
        board = others.Board(served.address, KEYS, "run", 0)
        assert board.relay() == f"127.0.0.1:{port}"
    assert board.relay() is None, "it does not answer"
    served.close()


def test_a_slow_coordinator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors_coordinator, "SLOW_S", 0.0)
    served = serve_in_thread(secrets=[KEYS])
    lines, is_there = doctors_coordinator.reach(served.address, KEYS)
    assert lines[1].level == WARN and "but only after" in lines[1].words and is_there
    served.close()


def test_a_coordinator_behind_a_way_on_which_large_packets_vanish() -> None:
    served = serve_in_thread()
    way = Swallowing(served.address)
    assert doctors_coordinator.reach(served.address, None)[1]
    lines, is_there = doctors_coordinator.reach(way.address, None, timeout_s=0.5)
    assert lines[1].level == WRONG and not is_there
    assert lines[1].words.startswith(
        f"answers at {way.address}, but small packets pass, and large ones vanish"
    )
    for each in (way, served):
        each.close()


def test_the_coordinator_and_the_secret() -> None:
    """No coordinator, another secret, no secret far away, and a good one."""
    served = serve_in_thread(secrets=[KEYS])
    address, reach = served.address, doctors_coordinator.reach
    lines, is_there = reach(address, KEYS)
    assert [each.level for each in lines] == [OK, OK] and is_there
    lines, is_there = reach(address, None)
    assert [each.level for each in lines] == [OK, WRONG] and not is_there
    assert "the coordinator has a secret, and the caller has none" in lines[1].words
    assert str(lines[1].command).startswith("scp 127.0.0.1:secret secret")
    lines, is_there = reach(address, Keys.from_secret(secret("another secret of a doctor")))
    assert [each.level for each in lines] == [OK, WRONG] and "another secret" in lines[1].words
    assert str(lines[1].command).startswith(f"hf-cocodc coordinator --host 127.0.0.1 --port {served.port}")
    served.close()
    lines, _ = reach(address, KEYS, timeout_s=0.1)
    assert lines[1].level == WRONG and "no coordinator answers" in lines[1].words
    assert f"nc -vz 127.0.0.1 {served.port}" in str(lines[1].command)
    lines, _ = reach("no-such-machine.invalid:1", KEYS, timeout_s=0.5)
    assert (lines[1].level, lines[1].command) == (WRONG, "getent hosts no-such-machine.invalid")
    none = doctors_coordinator.secret("10.0.0.1:29650", None)
    assert none.level == WARN and none.command == doctors_coordinator.NEW_SECRET
