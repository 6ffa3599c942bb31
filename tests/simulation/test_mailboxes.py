"""Whatever a storage does to a socket through it: what is heard is what was said, in order; all of it, or the socket breaks."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from hf_cocodc.net import mailbox
from hf_cocodc.net.mailbox import Mailbox, _Way

from .mailboxes import Talks
from .stores import Faults

SEEDS, MORE = 20, 70
KEEPS = Faults(fails=0.05, torn=0.03, old=0.05, late=0.1)
WORLDS = {
    "keeps what it promises": KEEPS,
    "fails often": replace(KEEPS, fails=0.35),
    "loses what was written": replace(KEEPS, lost=0.03),
}
HARD = {**WORLDS, "loses a lot": replace(KEEPS, lost=0.2)}
"""Also one in which hardly anything comes through whole."""


def check(seeds: range, faults: Faults) -> None:
    whole = broken = died = 0
    for seed in seeds:
        world = Talks(seed, faults)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        whole += sum(talk.how == "whole" for talk in world.talks)
        broken += sum("Reset" in talk.how for talk in world.talks)
        died += len(world.ended_by_death)
    assert whole > 5 * len(seeds), "hardly anything is said"
    assert broken > len(seeds) // 4, "hardly anything breaks"
    assert died or faults is not KEEPS, "no end hears that the other one has died"


@pytest.mark.parametrize("name", WORLDS)
def test_all_is_heard_or_the_socket_breaks(name: str) -> None:
    check(range(SEEDS), WORLDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_all_is_heard_or_the_socket_breaks_in_more_worlds(name: str) -> None:
    check(range(SEEDS, MORE), WORLDS[name])


@pytest.mark.parametrize(
    ("where", "old", "new", "world"),
    [
        (_Way, "self._missed > self._box.misses", "False", "loses a lot"),
        (Mailbox, 'other.seen in ("", number)', "True", "keeps what it promises"),
        (Mailbox, "if seen.looks >= _LOOKS and not may_stop:", "if False:", "keeps what it promises"),
    ],
    ids=[
        "what is lost is waited for",
        "any card will do",
        "a process that has stopped is waited for",
    ],
)
def test_a_rule_that_is_missing_is_found(
    where: Any, old: str, new: str, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(where)
    assert source.count(old) == 1
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), "mutated", "exec"), vars(mailbox), made)
    monkeypatch.setattr(mailbox, where.__name__, made[where.__name__])
    for seed in range(SEEDS):
        try:
            Talks(seed, HARD[world]).run()
        except AssertionError:
            return
    pytest.fail("no world finds it")


def test_a_seed_replays() -> None:
    worlds = [Talks(3, KEEPS) for _ in range(2)]
    for world in worlds:
        world.run()
    talks = [[(talk.records, talk.said, talk.heard, talk.how) for talk in world.talks] for world in worlds]
    assert talks[0] == talks[1] and len(talks[0]) > 3
