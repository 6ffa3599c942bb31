"""Regions, and the ranks of a region, agree through stores on the step at which all stop."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hf_cocodc.meeting import stopping
from hf_cocodc.meeting.region_store import RegionStore
from hf_cocodc.meeting.stopping import Circle, StopAgreement
from hf_cocodc.meeting.store import connect_store, serve_store

LAST = 10_000


class Place:
    """A store for the run, and the agreement of each of `sizes[r]` ranks in region r."""

    def __init__(self, *sizes: int) -> None:
        self.run = serve_store("127.0.0.1")
        self.agreements = {}
        for region, size in enumerate(sizes):
            server = serve_store("127.0.0.1") if size > 1 else None
            for rank in range(size):
                leader = not rank and len(sizes) > 1
                regions = Circle(client(self.run), region, len(sizes)) if leader else None
                inside = None
                if server is not None:
                    address = f"127.0.0.1:{server.port}"
                    inside = RegionStore(address, rank, size, None if rank else server)
                self.agreements[region, rank] = StopAgreement(regions, inside)


def client(store: dist.TCPStore) -> dist.Store:
    return dist.PrefixStore("stop", connect_store(f"127.0.0.1:{store.port}", 10))


def train(agreement: StopAgreement, step_s: float, asks_at: int = 0, last: int = LAST) -> int:
    """Steps until the agreement ends them."""
    agreement.start(0)
    for step in range(1, last + 1):
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
    first.start(7)  # stands at the end of step 8
    assert train(second, 0.01, asks_at=5) == 8
    for agreement in (first, second):
        agreement.close()


def test_without_a_store_training_goes_on() -> None:
    """A store that has ended, before a request or after a promise, keeps nobody waiting."""
    place = Place(1, 1)
    first, second = place.agreements.values()
    ends = threading.Timer(0.5, lambda: delattr(place, "run"))
    ends.start()
    assert train(first, 0.01, asks_at=5, last=100) == 0
    ends.join()
    assert train(second, 0.01, asks_at=5, last=100) == 0
    for agreement in (first, second):
        agreement.close()
