"""Regions, and the ranks of a region, agree through stores on the step at which all stop."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hf_cocodc.meeting import stopping
from hf_cocodc.meeting.region_store import RegionStore
from hf_cocodc.meeting.stopping import Circle, StopAgreement
from hf_cocodc.meeting.store import connect_store, serve_store

LAST = 10_000


class Way:
    """The way to a store. While it is not `open`, the store neither answers nor ends: connections live on."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._to = self._listener.getsockname()[1], port
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError):
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    self.open.wait()
                    (far if source is near else near).sendall(data)


class Place:
    """A store for the run, and the agreement of each of `sizes[r]` ranks in region r."""

    def __init__(self, *sizes: int) -> None:
        self.run = serve_store("127.0.0.1")
        self.way = Way(self.run.port)
        self.agreements = {}
        for region, size in enumerate(sizes):
            server = serve_store("127.0.0.1") if size > 1 else None
            for rank in range(size):
                leader = not rank and len(sizes) > 1
                regions = Circle(client(self.way), region, len(sizes)) if leader else None
                inside = None
                if server is not None:
                    address = f"127.0.0.1:{server.port}"
                    inside = RegionStore(address, rank, size, None if rank else server)
                self.agreements[region, rank] = StopAgreement(regions, inside)


def client(store: Way) -> dist.Store:
    return dist.PrefixStore("stop", connect_store(f"127.0.0.1:{store.port}", 10))


def train(agreement: StopAgreement, step_s: float, asks_at: int = 0, last: int = LAST) -> int:
    """Steps until the agreement ends them."""
    agreement.start(0)
    return train_on(agreement, step_s, asks_at, last)


def train_on(
    agreement: StopAgreement, step_s: float, asks_at: int = 0, last: int = LAST, done: int = 0
) -> int:
    for step in range(done + 1, last + 1):
        time.sleep(step_s)
        if step == asks_at:
            agreement.ask("SIGTERM")
        if not agreement.passes(step):
            return step
    return 0


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3), (3,)], ids=str)
def test_all_stop_at_one_step(sizes: tuple[int, ...]) -> None:
    """Whatever their speeds, and whichever ranks ask: at a step that is not far from the fastest one's."""
    moments, place = random.Random(sum(sizes)), Place(*sizes)
    asker = moments.choice(list(place.agreements))
    with ThreadPoolExecutor() as pool:
        runs = {
            who: pool.submit(train, agreement, moments.uniform(0.002, 0.01), 20 if who == asker else 0)
            for who, agreement in place.agreements.items()
        }
        [step] = {run.result(timeout=60) for run in runs.values()}
    assert 20 <= step < LAST
    for agreement in place.agreements.values():
        assert agreement.reasons == ["SIGTERM" if region == asker[0] else "" for region in range(len(sizes))]
        agreement.close()


def test_a_region_that_does_not_answer_ends_the_attempt_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """They train on, and a late answer changes nothing: the decision is made once."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.5)
    place = Place(1, 2, 1)
    absent = place.agreements.pop((2, 0))
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(train, agreement, 0.01, 5 if who == (1, 1) else 0, 200)
            for who, agreement in place.agreements.items()
        ]
        assert [run.result(timeout=60) for run in runs] == [0, 0, 0]
    assert place.agreements[1, 0].asked == "SIGTERM", (
        "the leader has heard of it, and says it with the next transfer"
    )
    assert train(absent, 0.01, last=100) == 0
    for agreement in (absent, *place.agreements.values()):
        agreement.close()


def test_a_region_that_has_stopped_already_names_its_step() -> None:
    """It has heard of the request from a transfer, and no longer calls `passes`: the others come to its step."""
    place = Place(1, 1)
    first, second = place.agreements.values()
    first.start(99)  # stands at the end of step 100
    assert train(second, 0.01, asks_at=5) == 100
    for agreement in (first, second):
        agreement.close()


def test_without_a_store_training_goes_on() -> None:
    """A store that has ended keeps nobody waiting."""
    place = Place(1, 1)
    first, second = place.agreements.values()
    del place.run
    for agreement in (first, second):
        assert train(agreement, 0.01, asks_at=5, last=100) == 0
        agreement.close()


def test_a_store_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody promises before the store has answered. When it answers again, all agree through it."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 60.0)
    place = Place(1, 2)
    place.way.open.clear()
    with ThreadPoolExecutor() as pool:
        runs = {
            who: pool.submit(train, agreement, 0.01, 5 if who != (1, 0) else 0, 100)
            for who, agreement in place.agreements.items()
        }
        assert [run.result(timeout=30) for run in runs.values()] == [0, 0, 0]
        place.way.open.set()
        more = [pool.submit(train_on, agreement, 0.01, done=100) for agreement in place.agreements.values()]
        [step] = {run.result(timeout=30) for run in more}
    assert step > 100
    for agreement in place.agreements.values():
        agreement.close()


def test_a_promise_to_a_store_that_hangs_binds_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks of the region train on, past their promise. A decision to stop that comes later is ignored, and loud."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.5)
    place = Place(1, 2)
    other = place.agreements.pop((0, 0))
    region = client(place.way)
    for agreement in place.agreements.values():
        agreement.start(7)
    place.agreements[1, 1].ask("SIGTERM")
    region.wait(["promise/1"])  # they stand at the end of step 8
    place.way.open.clear()
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(train_on, each, 0.01, last=20, done=7) for each in place.agreements.values()]
        assert [run.result(timeout=30) for run in runs] == [0, 0]
    direct = dist.PrefixStore("stop", connect_store(f"127.0.0.1:{place.run.port}", 10))
    direct.compare_set("decision", "", '{"step": 8, "reasons": ["", "SIGTERM"]}')
    place.way.open.set()
    late = "heard of it too late"
    wait_until(lambda: late in caplog.text)
    assert all(each.passes(21) for each in place.agreements.values())
    for agreement in (other, *place.agreements.values()):
        agreement.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_request_reaches_the_leader_without_the_runs_store(hangs: bool) -> None:
    """It must say it with the next transfer: no store tells the other regions."""
    place = Place(1, 2)
    leader, other = place.agreements[1, 0], place.agreements[1, 1]
    leader.start(0)
    other.start(0)
    if hangs:
        place.way.open.clear()
    else:
        del place.run
    time.sleep(2 * stopping.POLL_S)  # the leader has met the fault
    other.ask("SIGTERM")
    wait_until(lambda: leader.asked == "SIGTERM")
    assert leader.passes(1)
    assert other.passes(1)
    for agreement in place.agreements.values():
        agreement.close()


@pytest.mark.parametrize("key", ["asked", "promise/0", "decision"])
def test_what_others_write_ends_no_thread(
    key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody stops for it: either all agree in spite of it, or all train on until a transfer tells them."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 1.0)
    place = Place(1, 1)
    store = connect_store(f"127.0.0.1:{place.run.port}", 10)
    for nonsense in (b"\xff", b'{"step": 1e999}', b"[" * 5000):
        store.set(f"stop/{key}", nonsense)  # type: ignore[arg-type]
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(train, agreement, 0.01, 40 if who == (1, 0) else 0, 150)
            for who, agreement in place.agreements.items()
        ]
        steps = [run.result(timeout=60) for run in runs]
    assert steps[0] == steps[1]
    assert steps[0] == 0 if key == "decision" else steps[0] >= 40
    assert "no region of this version" in caplog.text or key == "promise/0"
    for agreement in place.agreements.values():
        agreement.close()


def test_a_lone_region_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank was late with its promise: no transfer would stop its region."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.3)
    place = Place(3)
    late = place.agreements.pop((0, 2))
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(train, agreement, 0.01, 5 if rank else 0)
            for (_, rank), agreement in place.agreements.items()
        ]
        time.sleep(0.8)
        slow = pool.submit(train, late, 0.001)
        [step] = {run.result(timeout=30) for run in (*runs, slow)}
    assert 5 <= step < LAST
    for agreement in (late, *place.agreements.values()):
        agreement.close()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (3,)], ids=str)
def test_all_stop_once_more(sizes: tuple[int, ...]) -> None:
    """After a stop all go on from an earlier step in the same processes, and can be stopped again."""
    place = Place(*sizes)
    asker = list(place.agreements)[-1]

    def live(who: tuple[int, int], agreement: StopAgreement) -> tuple[int, int]:
        first = train(agreement, 0.005, 20 if who == asker else 0)
        agreement.forget(3)
        assert (agreement.asked, agreement.reasons) == ("", [])
        return first, train_on(agreement, 0.005, 150 if who == asker else 0, done=3)

    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(live, who, agreement) for who, agreement in place.agreements.items()]
        [(first, second)] = {run.result(timeout=60) for run in runs}
    assert first >= 20
    assert 150 <= second < LAST
    for agreement in place.agreements.values():
        agreement.close()


def test_a_request_that_was_not_decided_is_forgotten() -> None:
    """It was made before all loaded a checkpoint."""
    place = Place(1, 1)
    first, second = place.agreements.values()
    first.start(0)
    first.ask("SIGTERM")
    first.forget(0)
    assert first.asked == ""
    assert train_on(first, 0.01, last=60) == train(second, 0.01, last=60) == 0
    for agreement in (first, second):
        agreement.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
