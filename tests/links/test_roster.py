"""Who comes in and who leaves, by what all members say."""

from __future__ import annotations

from hf_cocodc.links.roster import Change, Roster
from hf_cocodc.links.trailer import Ending, Trailer
from hf_cocodc.meeting.presence import Member

FIRST = (Member(0, 1), Member(1, 2))
LATE, LATER = Member(2, 5), Member(3, 6)


def with_newcomers(limit: int | None = None) -> Roster:
    roster = Roster(FIRST, limit=limit)
    for member in (*FIRST, LATE, LATER):
        roster.came(member)
    return roster


def say(roster: Roster, admits: tuple[int, int], changes: int | None = None) -> list[Change]:
    trailers = [Trailer(admits=each) for each in admits]
    roster.landed((0, 1), trailers, roster.changes if changes is None else changes)
    return roster.apply(())


def test_a_newcomer_is_admitted_once_it_is_connected_and_ready() -> None:
    roster = with_newcomers()
    assert roster.admits(()) == 0
    roster.ready(LATE)
    assert roster.admits(()) == 0
    for member in (LATE, LATER):
        roster.paired(member)
        roster.ready(member)
    assert roster.admits(()) == LATE.ticket
    roster.gone(LATE)
    assert roster.admits(()) == LATER.ticket


def test_a_newcomer_comes_in_only_if_all_admit_it() -> None:
    roster = with_newcomers()
    assert say(roster, (5, 0)) == say(roster, (5, 6)) == say(roster, (0, 0)) == []
    assert say(roster, (5, 5)) == [Change("join", LATE)]
    assert roster.members == (*FIRST, LATE) and roster.changes == 1


def test_a_transfer_that_was_sent_before_a_change_admits_nobody() -> None:
    """The member that has come in since has had no say in it."""
    roster = with_newcomers()
    assert say(roster, (5, 5))
    assert say(roster, (6, 6), changes=0) == say(roster, (5, 5), changes=0) == []
    assert say(roster, (6, 6), changes=-1) == []  # loaded, or from a log


def test_a_newcomer_that_dies_on_its_way_in_comes_in_everywhere() -> None:
    """Members that have noticed do as those that have not: then it is lost by all."""
    roster = with_newcomers()
    roster.gone(LATE)
    assert say(roster, (5, 5)) == [Change("join", LATE)]


def test_a_region_leaves_after_a_landing() -> None:
    roster = with_newcomers()
    said = (0, 1), (Trailer(ending=Ending.LEAVING), Trailer())
    roster.landed(*said, -1)  # not all members have had a say
    assert not roster.is_leaving(0)
    roster.landed(*said, 0)
    assert roster.members == FIRST
    assert roster.is_leaving(0) and not roster.is_leaving(1)
    assert roster.apply(()) == [Change("left", FIRST[0])]
    assert roster.members == FIRST[1:]


def test_who_is_refused() -> None:
    """An id that takes part or waits already, and more regions than the limit; lost members count no more."""
    roster = Roster(FIRST, limit=3)
    assert "region 1 takes part already" in (roster.refuses(1, ()) or "")
    assert roster.refuses(1, (2,)) is None
    assert roster.refuses(2, ()) is None
    roster.came(LATE)
    assert "regions.max=3" in (roster.refuses(3, ()) or "")
    assert "region 2 takes part already" in (roster.refuses(2, ()) or "")
    roster.gone(LATE)
    assert roster.refuses(2, ()) is None
    full = with_newcomers(limit=2)
    full.paired(LATE)
    full.ready(LATE)
    assert full.admits(()) == 0
    assert full.admits((2,)) == LATE.ticket
