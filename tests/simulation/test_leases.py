"""Whatever a storage does to those who stand by: of all coordinators the decisions of one count."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial

import pytest

from hf_cocodc.coordinator import standby, state
from hf_cocodc.coordinator.state import StateInStorage

from .leases import Leases, forks
from .stores import Faults

SEEDS, MORE, FEW = 60, 160, 5
"""`FEW`: decisions that a coordinator can make within the seconds after which it looks whether it still is the one."""
KEEPS = Faults(fails=0.05, torn=0.02, old=0.05, lists=0.3, late=0.1)
"""What a storage may do that keeps its promise: it creates an object only if there is none of its name."""
WINNERS, LOSES = Faults(fails=0.05, torn=0.02, lists=0.3, winners=0.9), replace(KEEPS, lost=0.1)
"""Storages that break it: creations have two winners; or what was acknowledged is gone."""


@pytest.fixture(autouse=True)
def prunes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old states are deleted as soon as no list is so old that it does not show a later one."""
    monkeypatch.setattr(state, "_KEPT_STATES", 3)
    monkeypatch.setattr(state, "_KEPT_S", KEEPS.old_s + 2.0)
    monkeypatch.setattr(standby.logger, "disabled", True)


def check(seeds: range) -> None:
    """No decision is lost, or made twice."""
    servings, decisions = 0, 0
    for seed in seeds:
        world = Leases(seed, KEEPS)
        world.run()
        assert not forks(world.announced), f"seed {seed}: {forks(world.announced)[0]}"
        states = [name for name in world.store.there() if name.startswith("state/")]
        assert len(states) < 40, f"seed {seed}: {len(states)} states are kept"
        servings, decisions = servings + world.servings, decisions + len(world.announced)
    assert servings > 4 * len(seeds), "hardly anybody takes over"
    assert decisions > 15 * len(seeds), "hardly anybody decides"


def test_of_all_that_stand_by_one_decides() -> None:
    check(range(SEEDS))


@pytest.mark.slow
def test_of_all_that_stand_by_one_decides_in_more_worlds() -> None:
    check(range(SEEDS, MORE))


def check_broken(seeds: range, faults: Faults, most: int) -> None:
    """Of two coordinators that do not know of each other's decisions, one makes `most` of them; their generations differ."""
    num_forks = 0
    for seed in seeds:
        world = Leases(seed, faults)
        world.run()
        for one, other in forks(world.announced):
            common = sum(mine == theirs for mine, theirs in zip(one.log, other.log, strict=False))
            beyond = [longest(world, each.log[: common + 1]) - common for each in (one, other)]
            assert one.generation != other.generation, f"seed {seed}: {one} and {other}"
            assert min(beyond) <= most, f"seed {seed}: {one} and {other}, {beyond}"
            num_forks += 1
    assert num_forks > len(seeds) // 2, "hardly anything breaks"


def longest(world: Leases, begin: tuple[str, ...]) -> int:
    """The most decisions that were announced after these."""
    return max(len(each.log) for each in world.announced if each.log[: len(begin)] == begin)


@pytest.mark.parametrize("latency_s", [0.0, 0.6, 3.0])
def test_one_takes_over_from_one_that_has_died(latency_s: float) -> None:
    """Others that have seen it die at the same time find that one has: they do not take over from that one."""
    for seed in range(SEEDS // 4):
        world = Leases(seed, Faults(latency_s=latency_s), processes=6, stills=0)
        world.machines.at(70.0 + seed / 10, world.kill_serving)
        world.run()
        assert world.servings == 2, f"seed {seed}: {world.servings - 1} take over"


def test_nobody_takes_over_while_requests_take_long() -> None:
    """For a minute, each takes 5 s on average."""
    for seed in range(SEEDS // 4):
        world = Leases(seed, Faults(latency_s=0.6), stills=0)
        for at, latency_s in ((40.0, 10.0), (100.0, 0.6)):
            world.machines.at(at, partial(setattr, world.store, "faults", Faults(latency_s=latency_s)))
        world.run()
        assert world.servings == 1, f"seed {seed}: {world.servings - 1} take over"


@pytest.mark.parametrize("latency_s", [0.0, 0.6])
def test_one_serves_where_a_creation_takes_seconds(latency_s: float) -> None:
    """On the Hub: others took over from whoever had yet to hear that it has won, and so did that one from them, for minutes."""
    for seed in range(SEEDS // 4):
        world = Leases(seed, Faults(latency_s=latency_s), stills=0, two_may_create=True)
        world.run()
        assert world.servings == 1, f"seed {seed}: {world.servings - 1} take over"
        assert not forks(world.announced)


def test_of_two_winners_one_ends_at_once() -> None:
    """It makes two decisions at most. Whoever has heard of it tells both apart: see the plans with twins in `world`."""
    check_broken(range(SEEDS // 2), WINNERS, FEW)


def test_whoever_goes_on_without_what_was_lost_is_told_apart() -> None:
    """Members that know more than a coordinator do not heed it: see the plans with old files in `world`."""
    check_broken(range(SEEDS // 2), LOSES, 1000)


@pytest.mark.slow
def test_more_worlds_that_break_promises() -> None:
    check_broken(range(SEEDS, MORE), WINNERS, FEW)
    check_broken(range(SEEDS, MORE), LOSES, 1000)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("not is_ours or max(listed, default=0) > number", "not is_ours"),
        ("not is_ours or max(listed, default=0) > number", "max(listed, default=0) > number"),
        ("if newest is None:", "if False:"),
    ],
    ids=[
        "higher numbers are not looked for",
        "it does not count who has created it",
        "what cannot be read is empty",
    ],
)
def test_a_rule_that_is_missing_is_found(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(StateInStorage)
    assert source.count(old) == 1
    space = dict(vars(state))
    exec(compile(source.replace(old, new), "mutated", "exec"), space)
    monkeypatch.setattr(standby, "StateInStorage", space["StateInStorage"])
    for seed in range(SEEDS):
        world = Leases(seed, KEEPS)
        world.state = space
        try:
            world.run()
        except AssertionError:
            return
        if forks(world.announced):
            return
    pytest.fail("no world finds it")


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ("if not self._is_gone(now):", "if now:", KEEPS),
        ("is_old = looks >= _LOOKS and", "is_old =", Faults(latency_s=3.0)),
    ],
    ids=[
        "one that is gone is waited for",
        "nobody waits for one that has just begun",
    ],
)
def test_a_rule_of_who_serves_that_is_missing_is_found(
    old: str, new: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(standby.Standby)
    assert source.count(old) == 1
    made: dict[str, type[standby.Standby]] = {}
    exec(compile(source.replace(old, new), "mutated", "exec"), vars(standby), made)
    monkeypatch.setattr(standby, "Standby", made["Standby"])
    for seed in range(SEEDS):
        world = Leases(seed, faults, processes=6, stills=12 * (faults is KEEPS))
        if faults is not KEEPS:
            world.machines.at(70.0, world.kill_serving)
        try:
            world.run()
            assert faults is KEEPS or world.servings == 2
        except AssertionError:
            return
    pytest.fail("no world finds it")


def test_lists_must_not_be_later_than_old_states_are_kept() -> None:
    """What the rules suppose of a storage, and cannot do without."""
    worlds = (Leases(seed, replace(KEEPS, old_s=100.0, lists=0.5)) for seed in range(SEEDS))
    assert any(world.run() or forks(world.announced) for world in worlds)


def test_a_seed_replays() -> None:
    worlds = [Leases(3, KEEPS) for _ in range(2)]
    for world in worlds:
        world.run()
    logs = [[(each.who, each.log) for each in world.announced] for world in worlds]
    assert logs[0] == logs[1] and len(logs[0]) > 3
