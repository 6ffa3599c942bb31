"""A region dies at any point of a run over elastic links: the others train on, lose nothing, and stay equal."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hf_cocodc.errors import LinkError
from hf_cocodc.links.base import Handle, Parcel
from hf_cocodc.links.elastic import ElasticLink
from hf_cocodc.links.roster import RollCall
from hf_cocodc.meeting.store import serve_store
from tests.links.memory import Died, Fault, Regions
from tests.links.test_wire import num_sockets
from tests.links.training import METHODS, NEWER, STEPS, Trained, check, method_of, train_all
from tests.processes.elastic_worker import connect


@pytest.mark.parametrize("name", [*METHODS, *NEWER])
def test_a_region_dies_within_a_transfer(name: str) -> None:
    """At every message that it sends or awaits in a transfer in the middle of the run, and between the "have"s."""
    number = [*METHODS, *NEWER].index(name)
    regions, found = train_all(name, [])
    check(name, found)
    assert len(found) == 3
    middle = regions.hub.points[number % 3] // 2
    for at in range(middle, middle + 10):
        _check_death(name, Fault(number % 3, at))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_region_dies_anywhere(name: str) -> None:
    """At every message of the run, every region, also while the run begins and ends."""
    regions, _ = train_all(name, [], steps=5)
    for region, points in regions.hub.points.items():
        for at in range(1, points + 1):
            _check_death(name, Fault(region, at), steps=5)


def _check_death(name: str, fault: Fault, steps: int = 7) -> None:
    _, found = train_all(name, [fault], steps)
    survivors = set(range(3)) - {fault.region}
    try:
        assert survivors <= found.keys()
        check(name, found)
    except AssertionError as error:
        raise AssertionError(f"{name}, {fault}: {error}") from error


def test_a_region_that_comes_back_leaves_no_connections_behind() -> None:
    """Not even where a thread of it waits: that one wakes up when the others have dropped the region."""
    store, before = serve_store("127.0.0.1"), num_sockets()
    with ThreadPoolExecutor(3) as threads:
        address = f"127.0.0.1:{store.port}"
        links = list(threads.map(lambda region: connect(region, 2, address), range(2)))
        waiting = threads.submit(links[1].gather, RollCall(0, False), "a call that the other does not make")
        wait_until(lambda: links[1].awaits == 0)
        links[1].part()
        with pytest.raises(LinkError, match="the link is closed"):
            waiting.result()
        wait_until(lambda: links[0].members == (0,))
        links[0].close()
    links.clear()
    del waiting
    wait_until(lambda: gc.collect() >= 0 and num_sockets() <= before)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_others_go_on_without_a_region_whose_numbers_are_wrong() -> None:
    """It ends with the reason; all others lose it at the same transfer, and make that again without it."""
    regions = Regions(3)
    said: list[str] = []

    def body(region: int, link: ElasticLink) -> tuple[Trained, int]:
        mean = link.mean

        def wrong(parcel: Parcel) -> Handle:
            bad = parcel.trailer()._replace(sync_time_s=-5.0)
            return mean(replace(parcel, trailer=lambda: bad) if bad.inner_step == 4 else parcel)

        if region == 2:
            link.mean = wrong  # type: ignore[method-assign]
        trained = Trained(link, method_of("diloco"))
        try:
            for _ in range(STEPS):
                trained.train(region)
            return trained, trained.finish()
        except LinkError as error:
            said.append(str(error))
            link.close(str(error))
            raise Died from error

    found = regions.run(body)
    assert found.keys() == {0, 1}
    check("diloco", found)
    lost = found[0][0].sent["fragment 0 sent at step 4"].arrival
    assert lost is not None
    assert lost.members == (0, 1)
    assert said
    assert all("region 2 sent sync_time_s=-5" in text or "gone on without" in text for text in said)
