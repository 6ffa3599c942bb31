"""A region dies at any point of a run over elastic links: the others train on, lose nothing, and stay equal."""

from __future__ import annotations

import pytest

from tests.links.memory import Fault
from tests.links.training import METHODS, check, train_all


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
