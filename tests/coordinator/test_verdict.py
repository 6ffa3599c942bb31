"""The verdict on a loss: every crash point of a transfer, and invariants of any reports."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hf_cocodc.coordinator.messages import Decided, Decision, Generation, Report, from_line
from hf_cocodc.coordinator.verdict import settle
from hf_cocodc.errors import LinkError
from hf_cocodc.net.channel import line_of
from hf_cocodc.net.members import Member


def moments(num_regions: int) -> Iterator[tuple[list[bool], list[bool]]]:
    """All states that members can be in while operation 5 is under way: who holds its result, who has completed it.

    Whoever has completed it has heard from all that they hold it.
    """
    for has in itertools.product([False, True], repeat=num_regions):
        for done in itertools.product([False, True], repeat=num_regions):
            if not any(done) or all(has):
                yield list(has), list(done)


@pytest.mark.parametrize("num_regions", [2, 3, 4])
def test_every_crash_point_of_a_transfer(num_regions: int) -> None:
    """Whoever dies, whenever: the operation stands if anyone (also a dead one) completed it or all survivors hold it.

    Else it is void, and nobody lands it.
    """
    members = tuple(Member(region, 10 - region) for region in range(num_regions))
    count = 0
    for has, done in moments(num_regions):
        for number in range(1, num_regions):
            for dead in itertools.combinations(range(num_regions), number):
                alive = [region for region in range(num_regions) if region not in dead]
                reports = [
                    Report(
                        number=3,
                        member=members[region],
                        first=1,
                        done=5 if done[region] else 4,
                        has=has[region] and not done[region],
                        lost=tuple(members[each] for each in dead),
                        members=members,
                    )
                    for region in alive
                ]
                found = settle(reports)
                assert found.members == tuple(members[region] for region in alive)
                assert found.lost == tuple(members[region] for region in dead)
                assert found.number == 3
                holds = all(has[region] for region in alive)
                assert (found.done == 5) == (any(done) or holds)
                assert found.done >= max(report.done for report in reports)
                count += 1
    assert count > 2 ** (2 * num_regions - 1) / 2


A, B, C, D = (Member(region, region) for region in range(4))


def report(member: Member, *lost: Member, done: int = 4, has: bool = False, **more: Any) -> Report:
    facts: dict[str, Any] = {"number": 0, "first": 1, "members": (A, B, C), **more}
    return Report(member=member, done=done, has=has, lost=lost, **facts)


def test_of_two_halves_the_larger_goes_on() -> None:
    """Who is missed by most is dropped; of two that miss each other, the higher region, unless a third takes sides."""
    assert settle([report(A, B, C), report(B, A), report(C, A)]).members == (B, C)
    assert settle([report(A, B), report(B, A), report(C)]).members == (A, C)
    assert settle([report(A, B), report(B, A), report(C, A)]).members == (B, C)
    assert settle([report(A, B), report(B)]).members == (A,)
    assert settle([report(A), report(B, A)]).members == (B,)
    assert settle([report(B, A, C)]) == Decision(number=0, members=(B,), lost=(A, C), done=4)


def test_a_newcomer_is_heard_once_it_takes_part() -> None:
    """Operations before its first one are no business of its; one that follows is a member only if others say so."""
    inside = {"members": (A, B, D)}
    early = report(D, C, first=6, done=5, **inside)
    assert settle([report(A, C, has=True, **inside), report(B, C, has=True, **inside), early]).done == 5
    assert settle([report(A, C, has=True, **inside), report(B, C, **inside), early]).done == 4
    begins = report(D, C, first=5, done=4, has=True, **inside)
    assert settle([report(A, C, has=True, **inside), begins]).done == 5
    assert settle([report(A, C, has=True, **inside), structs.replace(begins, has=False)]).done == 4
    assert settle([report(A, C, has=True, **inside), structs.replace(begins, done=0)]).done == 5
    follows = report(D, C, first=0, done=0, members=())
    assert settle([report(A, C), follows]) == Decision(number=0, members=(A,), lost=(B, C), done=4)
    assert settle([report(A, C, **inside), follows]).members == (A, D)
    with pytest.raises(ValueError):
        settle([follows])


def test_who_is_about_to_leave_is_not_asked_for_what_comes_after() -> None:
    """Others may have completed, without it, what it does not hold."""
    leaves = report(C, B, done=3, has=True, last=4)
    assert settle([report(A, B, has=True), leaves]).done == 5
    assert settle([report(A, B, done=3, has=True), structs.replace(leaves, has=False)]).done == 3


members_of = st.integers(0, 4).map(lambda region: Member(region, region % 3))


@st.composite
def some_reports(draw: Any) -> list[Report]:
    everyone = sorted(draw(st.sets(members_of, min_size=1)))
    found = []
    for member in everyone:
        first = draw(st.sampled_from([0, 1, 4, 5, 6]))
        view = draw(st.sets(st.sampled_from(everyone))) | {member} if first else set()
        lost = draw(st.sets(members_of)) - {member}
        found.append(
            Report(
                number=2,
                member=member,
                first=first,
                last=draw(st.sampled_from([None, 4, 5])),
                done=draw(st.integers(0, 6)),
                has=draw(st.booleans()),
                lost=tuple(sorted(lost)),
                members=tuple(sorted(view)),
            )
        )
    return found


@given(some_reports(), st.randoms())
@settings(max_examples=200)
def test_invariants(reports: list[Report], chance: random.Random) -> None:
    """One decision, whatever the order; what anyone completed stands; no member misses another; each is in or out."""
    known = {member for each in reports for member in each.members}
    if not known:
        return
    found = settle(reports)
    mixed = list(reports)
    chance.shuffle(mixed)
    assert settle(mixed) == found
    for each in (*reports, Decided(generation=Generation(1, ""), decision=found)):
        assert from_line(line_of(each)) == each
    kept = {each.member: each for each in reports if each.member in found.members}
    assert kept.keys() == set(found.members) and kept
    assert not any(set(each.lost) & kept.keys() for each in kept.values())
    missed = {member for each in reports for member in each.lost}
    assert set(found.members) | set(found.lost) == known | missed
    assert not set(found.members) & set(found.lost)
    for each in reports:
        if each.member in known and 0 < each.first <= each.done:
            assert found.done >= each.done


def test_what_is_no_report_is_refused() -> None:
    """A caller that is none of ours, or of another version, does not end in a traceback of ours."""
    for said in (
        None,
        [],
        {},
        {"kind": "Report", "number": 1},
        {**json.loads(line_of(report(A))), "lost": [[1]]},
        {**json.loads(line_of(report(A))), "new": 1},
        {**json.loads(line_of(report(A))), "kind": "Word"},
    ):
        with pytest.raises(LinkError, match="is no message of a region of this version"):
            from_line(line_of(said))
