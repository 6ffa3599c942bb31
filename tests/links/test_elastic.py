"""A region dies at any point of a run over elastic links: the others train on, lose nothing, and stay equal."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_cocodc.errors import LinkError
from hf_cocodc.links.roster import RollCall
from hf_cocodc.meeting.store import serve_store
from tests.links.memory import Fault
from tests.links.test_wire import num_sockets
from tests.links.training import METHODS, check, train_all
from tests.processes.elastic_worker import connect


@pytest.mark.parametrize("name", METHODS)
def test_a_region_dies_within_a_transfer(name: str) -> None:
    """At every message that it sends or awaits in a transfer in the middle of the run, and between the "have"s."""
    number = list(METHODS).index(name)
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
        waiting = threads.submit(links[1].gather, RollCall(0), "a call that the other does not make")
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
