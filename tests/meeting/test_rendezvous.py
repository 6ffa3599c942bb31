"""How regions find each other at a store that outlives runs and serves several at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from hf_cocodc.errors import HandshakeError, MeetingError, RegionLostError
from hf_cocodc.meeting import board, rendezvous
from hf_cocodc.meeting.board import Board
from hf_cocodc.meeting.rendezvous import Roster
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.meeting.store import connect_store, serve_store


@pytest.fixture
def address() -> Any:
    """The address of a store that lives as long as the test."""
    store = serve_store("127.0.0.1")
    yield f"127.0.0.1:{store.port}"
    del store


def come(
    address: str, region: int, run: str = "run", num_regions: int = 2, timeout_s: float = 20.0, **hello: Any
) -> Roster:
    """One region meets the others of its run."""
    store: dist.Store = connect_store(address, 20.0)
    return rendezvous.rendezvous(store, run, region, num_regions, {"region": "any", **hello}, timeout_s)


def side_by_side(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Make all calls at once; what came of each."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def dies_while_it_waits(address: str, region: int, run: str = "run", **hello: Any) -> Board:
    """A process that holds a region's place, and no longer exists."""
    store: dist.Store = connect_store(address, 20.0)
    dead = Board(store, run, region, 2, {"region": "any", **hello})
    dist.PrefixStore(f"hf_cocodc/run/{run}", store).set(f"place/{region}", str(dead.ticket))
    return dead


def test_a_run_that_met_leaves_nothing_to_wait_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run on the same store meets without waiting for signs, whoever of it comes first, and is another run."""
    monkeypatch.setattr(board, "STALE_S", 1e6)
    runs = []
    for late in (0, 1, 0):

        def lately(region: int, late: int = late) -> Roster:
            time.sleep(0.2 if region == late else 0.0)
            return come(address, region)

        first, second = (each.result() for each in side_by_side(lambda: lately(0), lambda: lately(1)))
        assert first == second
        assert first.hellos == [{"region": "any"}] * 2
        runs.append(first.run)
    assert len(set(runs)) == 3


def test_two_runs_on_one_store_do_not_mix(address: str) -> None:
    """Run a's region 0 and run b's region 1 are there first; each waits for its own run, whatever the order."""
    found = side_by_side(
        lambda: come(address, 0, "a"),
        lambda: come(address, 1, "b"),
        lambda: time.sleep(0.5) or come(address, 1, "a"),  # type: ignore[func-returns-value]
        lambda: time.sleep(0.5) or come(address, 0, "b"),  # type: ignore[func-returns-value]
    )
    a0, b1, a1, b0 = (each.result().run for each in found)
    assert a0 == a1 != b0 == b1


def test_regions_of_two_names_hear_of_each_other(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log at once, and the error after the time-out, say what waits beside a region, and what it has otherwise."""
    with caplog.at_level(logging.WARNING):
        found = side_by_side(
            lambda: come(address, 0, "a", timeout_s=1.5, sync_interval=20),
            lambda: come(address, 1, "b", timeout_s=1.5, sync_interval=30),
        )
    said = "Region 1 of 2 of run 'b' waits at this store too"
    assert any(said in record.getMessage() for record in caplog.records)
    with pytest.raises(
        RegionLostError, match="Region 0 of 2 of run 'a' wait(s|ed until a moment ago) at this store"
    ):
        found[1].result()
    with pytest.raises(RegionLostError, match="region 1 did not arrive within 1.5 s") as caught:
        found[0].result()
    assert "differs in sync_interval (20 here, 30 there)" in str(caught.value)
    assert "set regions.run" in str(caught.value)


@pytest.mark.parametrize("odd", [{"num_regions": 3}, {"sync_interval": 30}], ids=["count", "setting"])
def test_a_mismatch_is_found_before_all_have_come(address: str, odd: dict[str, Any]) -> None:
    """Two of three regions that differ end at once: they do not wait for the third."""
    usual: dict[str, Any] = {"num_regions": 4, "sync_interval": 20}
    found = side_by_side(
        lambda: come(address, 0, **usual, timeout_s=60.0),
        lambda: come(address, 1, **{**usual, **odd}, timeout_s=60.0),
    )
    for each in found:
        with pytest.raises(HandshakeError, match="region 0 and region 1 disagree on") as caught:
            each.result()
        assert {"num_regions": "regions.count: region 0 has 4, region 1 has 3"}.get(
            next(iter(odd)), "30"
        ) in str(caught.value)


def test_two_processes_that_say_region_0_hear_so(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """The second one ends with an error; the first is told, goes on waiting, and meets region 1."""
    second_has_ended = threading.Event()

    def second() -> None:
        time.sleep(0.3)
        try:
            come(address, 0)
        finally:
            second_has_ended.set()

    def other_region() -> Roster:
        second_has_ended.wait(20.0)
        time.sleep(2 * board.SIGN_S)
        return come(address, 1)

    with caplog.at_level(logging.WARNING):
        met, failed, also_met = side_by_side(lambda: come(address, 0), second, other_region)
    with pytest.raises(HandshakeError, match="another process is region 0 of run 'run' too"):
        failed.result()
    assert met.result() == also_met.result()
    assert "says that it is region 0 of run 'run' too" in caplog.text


def test_a_place_of_a_dead_process_is_free(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process that was killed has left holds nobody up, whatever its settings were, and nothing of it is compared."""
    monkeypatch.setattr(board, "STALE_S", 1.0)
    for region in (0, 1):
        dies_while_it_waits(address, region, sync_interval=99)
    first, second = side_by_side(
        lambda: come(address, 0, sync_interval=20), lambda: come(address, 1, sync_interval=20)
    )
    assert first.result() == second.result()
    assert first.result().hellos == [{"region": "any", "sync_interval": 20}] * 2


def test_the_hello_of_a_region_that_was_started_again_counts(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Region 1 is killed and started again at any moment of the meeting, also after region 0 has called the dead one."""
    monkeypatch.setattr(board, "STALE_S", 1.0)
    dies_while_it_waits(address, 1, attempt=1)
    called = threading.Event()
    write = rendezvous._Meeting._call

    def call(meeting: Any) -> Any:
        roster = write(meeting)
        if meeting._called:
            called.set()
        return roster

    monkeypatch.setattr(rendezvous._Meeting, "_call", call)
    first, second = side_by_side(
        lambda: come(address, 0, attempt=2),
        lambda: called.wait(20.0) and come(address, 1, attempt=2),
    )
    assert first.result() == second.result()
    assert first.result().hellos == [{"region": "any", "attempt": 2}] * 2


KEYS = ("run/run/place/0", "run/run/place/1", "run/run/roster", "waiting/1", "hello/1", "tickets")
VALUES = (
    "not json",
    "[1, 2",
    "{}",
    "7",
    "999999999999",
    "\udc80",
    "[" * 100_000,
    '{"run":"r","tickets":[1,2],"hellos":[1,2]}',
)


@pytest.mark.slow
def test_values_that_are_not_ours_are_an_error_in_words() -> None:
    """Whatever another program has written under our names, regions meet or say so; they never raise anything else."""

    def meet(key: str, value: str) -> list[BaseException | None]:
        store = serve_store("127.0.0.1")
        address = f"127.0.0.1:{store.port}"
        if not key.startswith("run"):
            dies_while_it_waits(address, 1)
        store.set(f"hf_cocodc/{key}", value.encode("utf-8", "surrogateescape"))
        # region 0 could write its roster before region 1 looks
        comes = (1,) if key.endswith("roster") else (0, 1)
        regions = side_by_side(*(partial(come, address, region, timeout_s=2.0) for region in comes))
        return [each.exception() for each in regions]

    cases = [(key, value) for key in KEYS for value in VALUES]
    with ThreadPoolExecutor(16) as pool:
        for (key, value), errors in zip(cases, pool.map(lambda case: meet(*case), cases), strict=True):
            said = [str(error) for error in errors if isinstance(error, MeetingError)]
            others = [error for error in errors if error is not None and not isinstance(error, MeetingError)]
            assert all(isinstance(error, RegionLostError) for error in others), (key, value, errors)
            assert all("no region of this version of hf_cocodc writes" in each for each in said)
            may_be_ours = value in ("7", "999999999999", "{}") or (key, value) == ("hello/1", VALUES[-1])
            assert said or may_be_ours, (key, value, errors)


def test_a_count_that_somebody_has_raised_takes_no_memory(address: str) -> None:
    """A process looks at the newest tickets only, and still sees a process that has come after it."""
    store: dist.Store = connect_store(address, 20.0)
    first = Board(store, "run", 0, 2, {})
    store.set(board.TICKETS, str(10**6))
    second = Board(store, "run", 1, 2, {})
    assert [each.ticket for each in first.look_around(20.0)] == [second.ticket]
    assert next(first.look_around(0.0)).ticket == second.ticket
    assert len(first._to_look_at) <= board._MOST_TICKETS


@pytest.mark.parametrize("keys", [None, Keys.from_secret("the secret of a run")], ids=["open", "sealed"])
def test_a_store_that_has_lost_its_count(keys: Keys | None) -> None:
    """Two regions with the same ticket would overwrite each other's hello, and compare one of them twice."""
    server = serve_store("127.0.0.1")
    store = connect_store(f"127.0.0.1:{server.port}", 20.0, keys)
    first = rendezvous._Meeting(store, "run", 0, 2, {})
    store.delete_key(board.TICKETS)
    second = rendezvous._Meeting(store, "run", 1, 2, {})
    assert second.proceed() is None
    with pytest.raises(
        MeetingError, match="have got the same ticket at the store 127.0.0.1:.* lost its count"
    ):
        first.proceed()


def test_a_store_that_dies_during_the_meeting() -> None:
    """One paragraph that names the store, and exit code 2."""
    store = serve_store("127.0.0.1")
    stores, address = [store], f"127.0.0.1:{store.port}"
    del store

    def kill() -> None:
        time.sleep(0.5)
        stores.clear()

    waiting, _ = side_by_side(lambda: come(address, 0), kill)
    with pytest.raises(
        MeetingError, match=f"the store at {address} failed while region 0 of run 'run'"
    ) as caught:
        waiting.result()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
