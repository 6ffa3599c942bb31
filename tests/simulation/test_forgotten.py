"""A coordinator without its memory hears of decisions and losses in any order. Members must not disagree afterwards."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from hf_cocodc.coordinator import rules as coordinator
from hf_cocodc.coordinator.messages import (
    Ask,
    Back,
    Change,
    Decided,
    Decision,
    Hello,
    Place,
    Refuse,
    Report,
    Terms,
)
from hf_cocodc.coordinator.rules import Came, Run, SendTo
from hf_cocodc.net.letters import Member

FIRST, SECOND, THIRD, NEWCOMER = (Member(region, region + 1) for region in range(4))
MEMBERS = FIRST, SECOND, THIRD


def _back(me: Member, is_member: bool, losses: int) -> Back:
    places = tuple(Place(each, "") for each in MEMBERS)
    kept: dict[str, Any] = {
        "host": "",
        "generation": 1,
        "changes": 0,
        "announced": (),
        "terms": Terms(count=3, elastic=True),
    }
    return Back(run="1", member=me, is_member=is_member, losses=losses, members=places, compared={}, **kept)


def test_coordinator_refuses_a_newcomer_that_knows_a_loss_that_no_member_knows() -> None:
    state = Run(name="run")
    said: list[Any] = []
    for number, (me, losses) in enumerate(((NEWCOMER, 1), *((each, 0) for each in MEMBERS))):
        state, effects = coordinator.step(state, Came(number, _back(me, me != NEWCOMER, losses)), 0.0)
        said += [each for each in effects if isinstance(each, SendTo) and isinstance(each.message, Refuse)]
    assert not state.recovers and state.losses == 0 and NEWCOMER not in state.newcomers
    assert [(each.to, each.message.error) for each in said] == [(0, "LeftBehind")]


def test_a_report_of_a_loss_that_was_decided_says_nothing_of_the_next_one() -> None:
    """The third has not heard that it was lost, and reports before another one tells the coordinator so."""
    state = Run(name="run")
    report = Report(number=0, member=THIRD, first=1, done=3, has=True, lost=(FIRST,), members=MEMBERS)
    said: list[Any] = []
    backs = [_back(THIRD, True, 0), _back(FIRST, True, 1), _back(SECOND, True, 1)]
    for who, message in ((0, backs[0]), (0, report), (1, backs[1]), (2, backs[2])):
        state, effects = coordinator.step(state, Came(who, message), 0.0)
        said += [each.message for each in effects if isinstance(each, SendTo)]
    assert not state.recovers and state.losses == 1
    assert not state.reports and state.asked_at is None and not any(isinstance(each, Ask) for each in said)


def test_a_newcomer_that_the_members_count_already_is_not_announced_again() -> None:
    """It has yet to make the step at which it comes in, and calls as a newcomer."""
    state = Run(name="run")
    places = tuple(Place(each, "") for each in (*MEMBERS, NEWCOMER))
    backs = [structs.replace(_back(each, True, 0), changes=1, members=places) for each in MEMBERS]
    for who, back in enumerate((_back(NEWCOMER, False, 0), *backs)):
        state, _ = coordinator.step(state, Came(who, back), 0.0)
    assert not state.recovers and state.changes == 1
    assert NEWCOMER in state.members and not state.newcomers


@pytest.mark.parametrize("tells", [NEWCOMER, FIRST])
def test_a_coordinator_waits_for_nobody_that_has_come_and_left(tells: Member) -> None:
    """A newcomer tells what was announced before it came; or a member does that has yet to count it."""
    gone = Member(4, 9)
    announced = Change(number=1, kind="join", member=gone), Change(number=2, kind="leave", member=gone)
    state = Run(name="run")
    backs = [structs.replace(_back(each, True, 0), changes=2) for each in MEMBERS if each != tells]
    for who, back in enumerate(
        (structs.replace(_back(tells, tells != NEWCOMER, 0), changes=0, announced=announced), *backs)
    ):
        state, _ = coordinator.step(state, Came(who, back), 0.0)
    assert not state.recovers and state.members == MEMBERS and state.changes == 2 and not state.announced


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_coordinator_waits_for_no_member_whose_loss_one_of_the_others_knows(order: tuple[int, ...]) -> None:
    decided = Decided(
        generation=1, decision=Decision(number=0, members=(FIRST, SECOND), lost=(THIRD,), done=1)
    )
    backs = [
        _back(FIRST, True, 0),
        structs.replace(_back(SECOND, True, 1), decisions=(decided,)),
        _back(NEWCOMER, False, 0),
    ]
    state = Run(name="run")
    for who in order:
        state, _ = coordinator.step(state, Came(who, backs[who]), 0.0)
    assert not state.recovers and state.losses == 1 and state.members == (FIRST, SECOND)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_leave_that_only_a_newcomer_counts_already(order: tuple[int, ...]) -> None:
    leave = Change(number=1, kind="leave", member=THIRD)
    backs = [structs.replace(_back(each, True, 0), announced=(leave,)) for each in (FIRST, SECOND)]
    rest = tuple(Place(each, "") for each in (FIRST, SECOND))
    backs.append(structs.replace(_back(NEWCOMER, False, 0), changes=1, members=rest))
    state = Run(name="run")
    for who in order:
        state, _ = coordinator.step(state, Came(who, backs[who]), 0.0)
    assert not state.recovers and state.members == (FIRST, SECOND)
    assert state.applied == 1 and not state.announced


def test_a_coordinator_whose_file_is_older_than_the_run_sends_its_newcomers_away() -> None:
    """It has given out tickets that others may have: a lost one would be refused for ever."""
    state = replace(Run(name="run"), run="1", generation=1, terms=Terms(count=3, elastic=True, most=4))
    state = replace(state, members=(FIRST,), tickets=1)
    state, _ = coordinator.step(state, Came(0, _back(FIRST, True, 0)), 0.0)
    hello = Hello(region=3, join=True, host="", machine="", token="t", terms=state.terms, compared={})
    state, _ = coordinator.step(state, Came(1, hello), 0.0)
    assert state.newcomers
    state, effects = coordinator.step(
        state, Came(2, structs.replace(_back(SECOND, True, 0), generation=2)), 0.0
    )
    assert state.recovers and not state.newcomers
    refused = [each for each in effects if isinstance(each, SendTo) and isinstance(each.message, Refuse)]
    assert [(each.to, each.message.error) for each in refused] == [(1, "LeftBehind")]
