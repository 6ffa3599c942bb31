"""Doctors of several regions compare at a store what they find, and call each other."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from hf_cocodc.doctor import others
from hf_cocodc.doctor.findings import OK, WARN, WRONG, Finding
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.meeting.store import connect_store, serve_store
from hf_cocodc.settings import RegionConfig

KEYS = Keys.from_secret("a secret for the tests of a doctor")
MINE: dict[str, Any] = {
    "versions": {"hf-cocodc": "0.1.0", "torch": "2.13.0+cpu", "datasets": "5.2.0"},
    "settings": "abcd",
    "data": "690 documents, fingerprint 12ab",
}


def compared(store: dist.Store, region: int, wait_s: float = 0.0, **changes: Any) -> list[Finding]:
    found: Mapping[str, Any] = {**MINE, **changes}
    return others.compare(store, "a run", region, 2, found, "127.0.0.1", wait_s, lambda words: None)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, OK, "same versions of this package and torch, settings and data"),
        ({"data": "691 documents, fingerprint 12ab"}, WRONG, "other data: 690 documents, fing"),
        ({"settings": "abce"}, WRONG, "another recipe"),
        ({"versions": MINE["versions"] | {"torch": "2.12.0"}}, WRONG, "has torch 2.13.0, this machine 2.12.0"),
        ({"versions": MINE["versions"] | {"torch": "2.13.0"}}, OK, "same versions"),
        ({"versions": MINE["versions"] | {"datasets": "5.1.0"}}, WARN, "has datasets 5.2.0, this machine 5.1.0"),
    ],
)  # fmt: skip
def test_what_lies_at_the_store_is_compared(changes: dict[str, Any], level: str, words: str) -> None:
    """The first doctor finds nothing; the second compares with what the first has left there."""
    store = dist.HashStore()
    [first] = compared(store, 0)
    assert (first.level, first.topic) == (WARN, "region 1") and "nothing was compared" in first.words
    found = compared(store, 1, **changes)
    assert level in [each.level for each in found if words in each.words], found
    assert (WRONG in [each.level for each in found]) == (level == WRONG)


def test_doctors_that_wait_call_each_other() -> None:
    """Over a real store with a secret: each reaches the other, and says how long it took."""
    server = serve_store()
    found: dict[int, list[Finding]] = {}

    def doctor(region: int) -> None:
        store = connect_store(f"127.0.0.1:{server.port}", 10.0, KEYS)
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


def test_one_that_does_not_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words at the store change, so it is there; but its address answers nobody."""
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    is_over = threading.Event()

    def unreachable() -> None:
        beats = 0
        while not is_over.wait(0.05):
            beats += 1
            told = others.Told("far away", address, "token", beats, **MINE)
            store.set("hf_cocodc/doctor/a%20run/1", json.dumps(told.__dict__))

    thread = threading.Thread(target=unreachable, name="unreachable")
    thread.start()
    try:
        monkeypatch.setattr(others, "_AGAIN_S", 0.1)
        found = compared(store, 0, wait_s=1.0)
    finally:
        is_over.set()
        thread.join()
    assert WRONG in [each.level for each in found]
    assert any(f"does not answer at {address} (Connection refused)" in each.words for each in found)


@pytest.mark.parametrize("told", [b"", b"{}", b"[1]", b"\xff", b'{"host": 1}', b"[" * 99 + b"]" * 99])
def test_what_no_doctor_writes_is_said(told: bytes) -> None:
    """What others put there is never believed, and breaks nothing."""
    store = dist.HashStore()
    store.set("hf_cocodc/doctor/a%20run/1", told)
    [line] = compared(store, 0)
    assert line.level == (WRONG if told else WARN)
    assert line.topic == "region 1"


def test_the_store_and_the_secret() -> None:
    """No store, another secret, no secret far away, and a good one."""
    server = serve_store()
    address = f"127.0.0.1:{server.port}"
    regions = RegionConfig(store=address)
    lines, store = others.reach(address, regions, KEYS)
    assert [each.level for each in lines] == [OK, OK] and store is not None
    lines, store = others.reach(address, regions, None)
    assert [each.level for each in lines] == [OK, WRONG] and store is None
    assert "was begun with a secret, and this process has none" in lines[1].words
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    lines, _ = others.reach(nobody, regions, KEYS, timeout_s=0.1)
    assert lines[1].level == WRONG and "no store answers" in lines[1].words
    assert others.secret("10.0.0.1:29650", regions, None).level == WARN
    assert others.secret("10.0.0.1:29650", RegionConfig(encrypt=True), None).level == WRONG
