"""Doctors of several regions compare at a store what they find, and call each other."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.doctor import others
from hf_cocodc.doctor import store as doctors_store
from hf_cocodc.doctor.findings import OK, WARN, WRONG, Finding
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.meeting.store import SteadyStore, StoreAwayError, serve_store
from hf_cocodc.settings import RegionConfig

KEYS = Keys.from_secret("a secret for the tests of a doctor")
KEY = "hf_cocodc/doctor/a%20run/1"
MINE: dict[str, Any] = {
    "versions": {"hf-cocodc": "0.1.0", "torch": "2.13.0+cpu", "datasets": "5.2.0"},
    "settings": {"outer.sync_interval": 30, "regions.timeout_s": 120.0, "regions.may_differ": ""},
    "facts": {"data.path": "/data", "data.block_size": 1024},
    "data": "690 documents, fingerprint 12ab",
}
LONG_AGO = {"host": "far away", "calls": "127.0.0.1:9", "token": "t", "beats": 1, "reached": [], **MINE}


class Shelf:
    """A store in this process; reading a key may do something first."""

    def __init__(self, **told: bytes) -> None:
        self.kept: dict[str, Any] = dict(told)
        self.address = "10.0.0.1:29650"

    def set(self, key: str, value: str | bytes) -> None:
        self.kept[key] = value.encode() if isinstance(value, str) else value

    def peek(self, key: str) -> bytes:
        return self.kept.get(key, b"")


class Living(Shelf):
    """A store at which region 1's doctor is alive: its words change whenever they are read."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self._told, self._beats = {**LONG_AGO, **changes}, 0

    def peek(self, key: str) -> bytes:
        self._beats += 1
        return json.dumps({**self._told, "beats": self._beats}).encode()


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


def compared(store: Any, region: int, wait_s: float = 0.0, **changes: Any) -> list[Finding]:
    found: Mapping[str, Any] = {**MINE, **changes}
    return list(others.compare(store, "a run", region, 2, found, "127.0.0.1", wait_s, lambda words: None))


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
        ({"settings": settings(**{"regions.encrypt": True})}, WRONG, "regions.encrypt is None there, True here"),
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
def test_what_lies_at_the_store_is_compared(changes: dict[str, Any], level: str, words: str) -> None:
    """The first doctor finds nothing; the second compares with what the first has left there."""
    store = Shelf()
    [first] = compared(store, 0)
    assert (first.level, first.topic) == (WARN, "region 1") and "nothing was compared" in first.words
    found = compared(store, 1, **changes)
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
    store = Shelf()
    theirs = settings(**{"regions.may_differ": ",".join(allowed)})
    compared(store, 0, settings=theirs)
    ours = changes | {"settings": {**theirs, **changes.get("settings", {})}}
    found = compared(store, 1, **ours)
    assert level in [each.level for each in found if words in each.words], found
    assert (WRONG in [each.level for each in found]) == (level == WRONG)


def test_doctors_that_wait_call_each_other() -> None:
    """Over a real store with a secret: each reaches the other, and says how long it took."""
    server = serve_store()
    found: dict[int, list[Finding]] = {}

    def doctor(region: int) -> None:
        store = SteadyStore(f"127.0.0.1:{server.port}", 30.0, KEYS)
        found[region] = compared(store, region, wait_s=60.0)

    threads = [threading.Thread(target=doctor, args=(region,), name=f"doctor-{region}") for region in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    for lines in found.values():
        assert [each.level for each in lines] == [OK, OK], lines
        assert "answers at 127.0.0.1 in" in lines[1].words


def test_one_that_does_not_answer_is_wrong(clock: SimpleNamespace) -> None:
    """Its words at the store change, so it is there; but its address answers nobody."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    found = compared(Living(calls=address), 0, wait_s=1.0)
    [line] = [each for each in found if each.level == WRONG]
    assert f"does not answer at {address} (Connection refused)" in line.words
    assert f"nc -vz {address.replace(':', ' ')}" in str(line.command)


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
    took, ahead = others.call("10.0.0.2:29700")
    assert took == pytest.approx(0.1)
    assert ahead == pytest.approx(5.0)


class Away(Living):
    """A store that goes away after some calls."""

    def __init__(self, calls: int, **changes: Any) -> None:
        super().__init__(**changes)
        self._left = calls

    def _answer(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreAwayError("the store at 10.0.0.1:29650 has gone (Connection was closed).")

    def set(self, key: str, value: str | bytes) -> None:
        self._answer()
        super().set(key, value)

    def peek(self, key: str) -> bytes:
        self._answer()
        return super().peek(key)


@pytest.mark.parametrize("calls", range(4))
def test_a_store_that_goes_away(calls: int, clock: SimpleNamespace) -> None:
    """While a doctor tells, hears or waits: a line, after which it says what it knows of the others."""
    found = compared(Away(calls), 0, wait_s=100.0)
    assert [each.level for each in found if each.topic == "store"] == [WRONG]
    assert "has gone" in found[0].words and str(found[0].command).startswith(
        "hf-cocodc store --host 10.0.0.1"
    )
    assert ("region 1" in [each.topic for each in found]) == (calls >= 2)


def test_a_real_store_that_goes_away() -> None:
    """Its process has ended; what torch then raises is said in words."""
    server = serve_store()
    store = SteadyStore(f"127.0.0.1:{server.port}", 10.0)
    told = others.compare(store, "a run", 0, 2, MINE, "127.0.0.1", 0.0, lambda words: None)
    store.set("x", "y")
    del server
    found = list(told)
    assert [(each.topic, each.level) for each in found] == [("store", WRONG)]


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
        look(others.compare(Living(), "a run", 0, 2, MINE, "127.0.0.1", 100.0, lambda words: None))  # type: ignore[arg-type]
    assert "same versions" in seen[0].words and "it was not called" in seen[1].words


@pytest.mark.parametrize("told", [b"", b"{}", b"[1]", b"\xff", b'{"host": 1}', b"[" * 99 + b"]" * 99])
def test_what_no_doctor_writes_is_said(told: bytes) -> None:
    """What others put there is never believed, and breaks nothing."""
    [line] = compared(Shelf(**{KEY: told}), 0)
    assert line.level == (WRONG if told else WARN)
    assert line.topic == "region 1" and line.command


def test_what_others_say_is_no_command() -> None:
    """A command is pasted into a shell: what another region says of itself stands in quotes there, or not at all."""
    evil = "x; touch /tmp/y"
    versions = {"hf-cocodc": evil, "torch": "$(touch /tmp/y)"}
    facts = {"data.path": evil, evil: 1}
    found = compared(Living(host=evil, versions=versions, facts=facts), 0)
    commands = [str(each.command) for each in found if each.level == WRONG]
    assert commands[0] == "pip install 'hf-cocodc==x; touch /tmp/y'"
    assert commands[1] == "pip install 'torch==$(touch /tmp/y)'"
    assert commands[2].endswith(f"--set 'regions.may_differ=data.path,data.block_size,{evil}'")


def test_an_address_on_which_nobody_can_listen() -> None:
    found = list(others.compare(Shelf(), "r", 0, 2, MINE, "203.0.113.7", 1.0, lambda words: None))  # type: ignore[arg-type]
    assert [(each.topic, each.level) for each in found] == [("regions", WRONG)]
    assert "cannot listen on 203.0.113.7" in found[0].words and "regions.interface" in str(found[0].command)


def test_a_slow_name_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks it at every connection to the store."""
    monkeypatch.setattr(doctors_store, "SLOW_S", 0.0)
    server = serve_store()
    lines, store = doctors_store.reach(f"127.0.0.1:{server.port}", RegionConfig(), KEYS)
    assert lines[1].level == WARN and "a connection takes" in lines[1].words and store is not None
    assert lines[1].command == "echo '::ffff:127.0.0.1 store' | sudo tee -a /etc/hosts"


def test_the_store_and_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store, another secret, no secret far away, and a good one."""
    monkeypatch.setattr(doctors_store, "SLOW_S", 60.0)
    server = serve_store()
    address = f"127.0.0.1:{server.port}"
    regions = RegionConfig(store=address)
    lines, store = doctors_store.reach(address, regions, KEYS)
    assert [each.level for each in lines] == [OK, OK] and store is not None
    lines, store = doctors_store.reach(address, regions, None)
    assert [each.level for each in lines] == [OK, WRONG] and store is None
    assert "was begun with a secret, and this process has none" in lines[1].words
    assert str(lines[1].command).startswith("scp 127.0.0.1:secret secret")
    lines, store = doctors_store.reach(address, regions, Keys.from_secret("another secret of a doctor"))
    assert [each.level for each in lines] == [OK, WRONG] and "with another secret" in lines[1].words
    assert str(lines[1].command).startswith(f"hf-cocodc store --host 127.0.0.1 --port {server.port}")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    lines, _ = doctors_store.reach(nobody, regions, KEYS, timeout_s=0.1)
    assert lines[1].level == WRONG and "no store answers" in lines[1].words
    assert f"nc -vz {nobody.replace(':', ' ')}" in str(lines[1].command)
    lines, _ = doctors_store.reach("no-such-machine.invalid:1", regions, KEYS)
    assert (lines[1].level, lines[1].command) == (WRONG, "getent hosts no-such-machine.invalid")
    assert doctors_store.secret("10.0.0.1:29650", regions, None).level == WARN
    wrong = doctors_store.secret("10.0.0.1:29650", RegionConfig(encrypt=True), None)
    assert wrong.level == WRONG and wrong.command == doctors_store.NEW_SECRET
