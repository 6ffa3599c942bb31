"""What a run says of itself at the store while it trains."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from hf_cocodc.errors import MeetingError
from hf_cocodc.meeting import live
from hf_cocodc.meeting.board import TICKETS, newest_ticket
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.meeting.store import SteadyStore, StoreAwayError, serve_store
from tests.meeting import records
from tests.meeting.records import process
from tests.meeting.waiting import eventually

RECORD = replace(records.RECORD, name="a/run")
WRITTEN = asdict(RECORD)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT_S", 0.05)


@pytest.fixture
def store() -> Iterator[SteadyStore]:
    server = serve_store()
    yield SteadyStore(f"127.0.0.1:{server.port}")
    del server


def test_a_run_is_alive_while_its_record_changes(store: SteadyStore) -> None:
    """And not because it lies there. After a good end it does not."""
    assert live.read(store, "a/run") is None
    assert live.read_alive(store, "a/run") is None
    publisher = live.Publisher(store, "a/run", process(0), lambda: RECORD)
    eventually(lambda: live.read(store, "a/run") is not None)
    found = live.read_alive(store, "a/run")
    assert found is not None
    assert replace(found, beat=0) == RECORD
    assert found.regions == (0, 1, 2)
    assert live.names(store) == ["a/run"]
    publisher.close()  # as if its process had been killed
    assert live.read(store, "a/run") is not None
    assert live.read_alive(store, "a/run", within_s=0.3) is None
    publisher = live.Publisher(store, "a/run", process(0), lambda: None)
    publisher.close(ended=True)
    assert live.read(store, "a/run") is None
    assert (live.names(store), live.ended(store)) == ([], ["a/run"])


def test_several_runs_are_watched_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have died, nobody waits longer than for one."""
    now, beats = [0.0], [0]

    class Store:
        def peek(self, key: str) -> bytes:
            lives = key.endswith("lives")
            beats[0] += lives
            return json.dumps(asdict(replace(RECORD, beat=beats[0] if lives else 1))).encode()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    found = live.read_all_alive(Store(), ["died", "lives", "dead", "gone"])  # type: ignore[arg-type]
    assert [record.beat for record in found] == [2]
    assert live.ALIVE_S <= now[0] < 1.1 * live.ALIVE_S


def test_one_member_writes_and_each_hears(store: SteadyStore) -> None:
    """A request to leave reaches its region once, and no other."""
    heard: list[tuple[int, str]] = []

    def publisher(region: int) -> live.Publisher:
        return live.Publisher(
            store,
            "a/run",
            process(region),
            lambda: RECORD if region == 0 else None,
            lambda why: heard.append((region, why)),
        )

    publishers = [publisher(region) for region in (0, 2)]
    eventually(lambda: live.read(store, "a/run") is not None)
    request = live.Request(store, RECORD, 2)
    request.write("the lease ends")
    eventually(lambda: request.is_heard and bool(heard))
    absent = live.Request(store, RECORD, 1)
    absent.write("not there")
    assert not absent.is_heard
    absent.take_back()
    assert absent.is_heard
    for each in publishers:
        each.close()
    assert heard == [(2, "the lease ends")]


def test_another_member_writes_while_the_lowest_does_not(
    store: SteadyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest may be frozen, or not reach the store. Once it writes again, the other one stops."""
    calls: list[int] = []
    now = [0.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def publisher(region: int) -> live.Publisher:
        return live.Publisher(store, "a/run", process(region), lambda: replace(RECORD, losses=region))

    def writer() -> int | None:
        found = live.read(store, "a/run")
        return None if found is None else found.losses

    lowest = publisher(0)
    eventually(lambda: writer() == 0)
    second, third = publisher(1), publisher(2)
    for _ in range(20):
        calls.append(writer())  # type: ignore[arg-type]
        time.sleep(live.BEAT_S / 2)
    assert set(calls) == {0}
    lowest.close()
    last = store.peek(live._key("a/run"))
    eventually(lambda: second._found == third._found == last)
    # the second one writes after two beats without a change, the third after three
    now[0] += 2.5 * live.BEAT_S
    eventually(lambda: writer() == 1)
    assert live.read_alive(store, "a/run") is not None
    lowest = publisher(0)
    eventually(lambda: writer() == 0)
    time.sleep(4 * live.BEAT_S)
    assert writer() == 0
    for each in (lowest, second, third):
        each.close()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_member_that_was_frozen_writes_nothing_old(store: SteadyStore, has_ended: bool) -> None:
    """The run has gone on without it, or has ended, and it does not know yet."""
    may_write = threading.Event()
    may_write.set()

    def content() -> live.Record:
        may_write.wait()
        return RECORD

    frozen = live.Publisher(store, "a/run", process(0), content)
    eventually(lambda: (found := live.read(store, "a/run")) is not None and found.beat > 1)
    may_write.clear()
    time.sleep(3 * live.BEAT_S)
    newer = replace(RECORD, epoch=RECORD.epoch + 1)
    others = live.Publisher(store, "a/run", process(1), lambda: newer)
    eventually(lambda: (found := live.read(store, "a/run")) is not None and found.epoch == newer.epoch)
    others.close(ended=has_ended)
    may_write.set()
    time.sleep(6 * live.BEAT_S)
    found = live.read(store, "a/run")
    assert found is None if has_ended else found is not None and found.epoch == newer.epoch
    frozen.close()


def test_a_member_that_was_frozen_from_the_start_writes_nothing_either(store: SteadyStore) -> None:
    """It has never seen the record of a run that has ended."""
    may_write = threading.Event()

    def content() -> live.Record:
        may_write.wait()
        return RECORD

    frozen = live.Publisher(store, "a/run", process(2), content)
    others = live.Publisher(store, "a/run", process(0), lambda: RECORD)
    eventually(lambda: live.read(store, "a/run") is not None)
    assert not live.has_ended(store, RECORD.run)
    time.sleep(4 * live.BEAT_S)
    others.close(ended=True)
    may_write.set()
    time.sleep(6 * live.BEAT_S)
    assert live.read(store, "a/run") is None
    assert live.has_ended(store, RECORD.run)
    frozen.close()


def test_a_member_that_was_frozen_while_it_wrote_takes_its_record_back(store: SteadyStore) -> None:
    """The run ends between its look at the store and its write."""
    ended = []

    class Store(SteadyStore):
        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            if not ended:
                ended.append(live.Publisher(store, "a/run", process(0), lambda: None))
                ended[0].close(ended=True)
            return super().compare_set(key, expected, desired)

        def delete_key(self, key: str) -> bool:
            deleted.append(key)
            return super().delete_key(key)

    deleted: list[str] = []
    frozen = live.Publisher(Store(store.address), "a/run", process(0), lambda: RECORD)
    eventually(lambda: deleted == [live._key("a/run")])
    frozen.close()
    assert live.read(store, "a/run") is None


def test_a_store_that_comes_back_empty_is_filled_again() -> None:
    """The record, the list of runs, and a count of tickets that gives none twice. Meanwhile nothing fails."""
    servers = [serve_store()]
    port = servers[0].port
    store = SteadyStore(f"127.0.0.1:{port}", timeout_s=0.5)
    publisher = live.Publisher(store, "a/run", process(0), lambda: RECORD)
    eventually(lambda: live.read(store, "a/run") is not None)
    servers.clear()

    def is_away() -> bool:
        try:
            live.read(store, "a/run")
        except StoreAwayError:
            return True
        return False

    eventually(is_away)
    servers.append(serve_store(port=port))
    eventually(lambda: not is_away() and live.names(store) == ["a/run"])
    eventually(lambda: store.add(TICKETS, 0) > 9)
    publisher.close()
    eventually(lambda: not any(thread.name == "hf_cocodc-live" for thread in threading.enumerate()))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"members": []}',
        '{"members": [{"region": "0", "ticket": 1, "address": "a"}]}',
        '{"members": 3}',
        *(
            json.dumps({**WRITTEN, "members": [{**WRITTEN["members"][0], name: value}]})
            for name, value in (("region", -7), ("ticket", -1), ("ticket", 2**60), ("ticket", True))
        ),
        json.dumps({**WRITTEN, "epoch": -1}),
    ],
)
def test_what_no_region_has_written_is_said_so(text: str, store: SteadyStore) -> None:
    """Another program at the same store must not look like a run."""
    store.set(live._key("x"), text)
    with pytest.raises(MeetingError, match="which no region of this version"):
        live.read(store, "x")


@pytest.mark.parametrize("value", [b"\xff", b"abc", b"{}"], ids=str)
def test_what_others_write_does_not_end_the_thread(
    value: bytes, store: SteadyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Under every name that a member uses: it goes on writing, counting tickets and hearing."""
    heard: list[str] = []
    for key in ("hf_cocodc/runs", TICKETS, "hf_cocodc/live/a%2Frun", "hf_cocodc/leave/run 7/3"):
        store.ask(lambda found, key=key: found.set(key, value))  # type: ignore[misc]
    publisher = live.Publisher(store, "a/run", process(0), lambda: RECORD, heard.append)
    newest = max(member.ticket for member in RECORD.members)

    def is_put_right() -> bool:
        with contextlib.suppress(MeetingError):
            return "a/run" in live.names(store) and newest_ticket(store) >= newest
        return False

    eventually(is_put_right)
    assert live.read_alive(store, "a/run") is not None
    request = live.Request(store, RECORD, 0)
    eventually(lambda: request.is_heard)
    request.write("really")
    eventually(lambda: "really" in heard)
    publisher.close()
    assert "which no region of this version" in caplog.text


def test_a_request_that_is_put_back_reaches_no_other_process() -> None:
    """A stranger at a sealed store can put back an old request: the region that has come back meanwhile stays."""
    server = serve_store()
    store = SteadyStore(f"127.0.0.1:{server.port}", keys=Keys.from_secret("the secret of a run"))
    live.Request(store, RECORD, 0).write("the lease ends")
    old = {key: server.get(key) for key in server.list_keys()}
    first: list[str] = []
    second: list[str] = []
    publisher = live.Publisher(store, "a/run", process(0), lambda: None, first.append)
    eventually(lambda: first)
    publisher.close()
    for key, value in old.items():
        server.set(key, value)
    publisher = live.Publisher(store, "a/run", lambda: (RECORD.run, 77), lambda: RECORD, second.append)
    eventually(lambda: live.read(store, "a/run") is not None)
    eventually(lambda: live.read_alive(store, "a/run") is not None)
    publisher.close()
    assert (first, second) == (["the lease ends"], [])
