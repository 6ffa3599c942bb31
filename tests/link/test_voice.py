"""What a region of several lanes tells the coordinator, and its ranks: one voice."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hf_cocodc.coordinator.messages import Ask, Beat, Bye, Decided, Decision, Note, Paired, Report
from hf_cocodc.link.voice import (
    AllHold,
    Effect,
    Holds,
    ToCoordinator,
    ToRank,
    Voice,
    beat_of_all_ranks,
    heard,
    of_all_ranks,
    said,
)
from hf_cocodc.net.members import Member

ME, OTHER, THIRD = Member(0, 1), Member(1, 2), Member(2, 3)


class Leader:
    """A leader of two ranks; `effects` are those of the last message."""

    def __init__(self) -> None:
        self.voice = Voice(num_ranks=2)

    def said(self, rank: int, message: Any) -> tuple[Effect, ...]:
        self.voice, effects = said(self.voice, rank, message)
        return effects

    def heard(self, message: Any) -> tuple[Effect, ...]:
        self.voice, effects = heard(self.voice, message)
        return effects


def report(done: int, has: bool = False, number: int = 0, **more: Any) -> Report:
    return Report(number=number, member=ME, first=1, done=done, has=has, **more)


def test_a_call_completes_once_all_ranks_hold_it() -> None:
    leader = Leader()
    assert leader.said(1, Holds(number=4, losses=0)) == ()
    assert leader.said(1, Holds(number=4, losses=0)) == ()
    assert leader.said(0, Holds(number=4, losses=0)) == (ToRank(None, AllHold(number=4, losses=0)),)
    assert leader.said(0, Holds(number=5, losses=0, alone=True)) == (
        ToRank(None, AllHold(number=5, losses=0)),
    )


@pytest.mark.parametrize("asks", ["the coordinator", "rank 1"])
def test_a_region_reports_once_all_its_ranks_have(asks: str) -> None:
    """And completes nothing from the first report on: the coordinator may void what a rank holds."""
    leader = Leader()
    leader.said(0, Holds(number=4, losses=0))
    if asks == "the coordinator":
        assert leader.heard(Ask(number=0)) == (ToRank(None, Ask(number=0)),)
    missing = report(3, lost=(OTHER,), whys=("cut",))
    assert leader.said(1, missing) == (ToRank(None, Ask(number=0)),)
    assert leader.said(1, Holds(number=4, losses=0)) == ()
    [told] = leader.said(0, report(3, has=True))
    assert told == ToCoordinator(report(3, lost=(OTHER,), whys=("cut (rank 1)",)))
    decided = Decided(generation=1, decision=Decision(number=0, members=(ME, THIRD), lost=(OTHER,), done=3))
    assert leader.heard(decided) == (ToRank(None, decided),)
    assert leader.said(1, missing) == (), "of the last decision"
    assert leader.said(0, Holds(number=4, losses=0)) == (), "of an attempt that is void"
    leader.said(0, Holds(number=4, losses=1))
    assert leader.said(1, Holds(number=4, losses=1)) == (ToRank(None, AllHold(number=4, losses=1)),)


def test_what_one_rank_has_completed_counts_for_its_region() -> None:
    """All hold it then. The next result is held only where all ranks do."""
    ahead, behind = report(4, has=True), report(3, has=True)
    assert of_all_ranks({0: ahead, 1: behind}) == report(4, has=False)
    assert of_all_ranks({0: behind, 1: behind}) == report(3, has=True)
    assert of_all_ranks({0: behind, 1: structs.replace(behind, has=False)}) == report(3, has=False)
    leaving = structs.replace(ahead, last=9)
    assert of_all_ranks({0: leaving, 1: behind}).last is None
    assert of_all_ranks({0: leaving, 1: leaving}).last == 9


def test_a_newcomer_is_connected_once_all_ranks_are() -> None:
    leader = Leader()
    assert leader.said(0, Paired(member=THIRD)) == ()
    assert leader.said(1, Paired(member=OTHER)) == ()
    assert leader.said(1, Paired(member=THIRD)) == (ToCoordinator(Paired(member=THIRD)),)
    assert leader.said(1, Paired(member=THIRD)) == (ToCoordinator(Paired(member=THIRD)),), "said again"


def test_only_the_leader_speaks_of_the_region() -> None:
    leader = Leader()
    assert leader.said(1, Bye(how="finished")) == ()
    assert leader.said(0, Bye(how="finished")) == (ToCoordinator(Bye(how="finished")),)
    assert leader.said(1, Note(text="why")) == (ToCoordinator(Note(text="why")),)


def test_the_rank_that_waits_longest_tells_for_whom() -> None:
    idle = Beat(step=7)
    waits = Beat(step=6, op=3, awaits=1, waited_s=4.0, idle_s=2.0, blocked_s=1.0)
    assert beat_of_all_ranks({0: idle, 1: waits}) == structs.replace(
        idle, op=3, awaits=1, waited_s=4.0, idle_s=2.0
    )
    assert beat_of_all_ranks({0: structs.replace(waits, waited_s=9.0), 1: waits}).waited_s == 9.0
    assert beat_of_all_ranks({0: idle}) == idle
