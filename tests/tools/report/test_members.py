"""Who took part in a run, read from journals written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hf_cocodc.tools.report.members import MemberChange, changes, sentence, spans

ALL = (0, 1, 2, 3)


def event(kind: str, step: int, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "time_s": 0.0, "step": step, **facts}


def epoch(number: int, step: int, *members: int) -> dict[str, Any]:
    return event("epoch", step, epoch=number, members=list(members), why="")


def journal(region: int, *events: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a region that was there at the start."""
    return [event("start", 0, region=region, num_regions=4), epoch(0, 0, *ALL), *events]


def the_fourth_dies_and_comes_back() -> list[list[dict[str, Any]]]:
    """Region 3 is killed at step 308 and comes back at 480. Regions notice it at 310, 311 and 310."""
    others = [
        journal(
            region,
            epoch(1, 310 + region % 2, 0, 1, 2),
            event("join", 480, epoch=2, region=3),
            epoch(2, 480, *ALL),
        )
        for region in (0, 1, 2)
    ]
    last = journal(
        3,
        event("log", 308, loss=1.0),
        event("resume", 450, region=3),
        event("join", 480, epoch=2, region=3, donor=0, base=450),
        epoch(2, 480, *ALL),
    )
    return [*others, last]


def test_a_loss_and_a_return_are_read_from_all_journals() -> None:
    """Each change once, at the step of the region that noticed it first; a region that is back does not say it again."""
    runs = the_fourth_dies_and_comes_back()
    expected = [
        MemberChange(0, ALL),
        MemberChange(310, (0, 1, 2), "region 3 lost"),
        MemberChange(480, ALL, "region 3 back"),
    ]
    assert changes(runs) == expected
    assert changes(runs[::-1]) == expected
    assert changes(runs[:1]) == expected
    assert sentence(expected) == "4, 3 from step 310 to 480 (region 3 lost), 4 from step 480 (region 3 back)"


def test_a_region_alone_with_its_journal_knows_when_it_was_away() -> None:
    """Its last line before it ended, and the step of its return."""
    expected = [
        MemberChange(0, ALL),
        MemberChange(308, (0, 1, 2), "region 3 lost"),
        MemberChange(480, ALL, "region 3 back"),
    ]
    run = the_fourth_dies_and_comes_back()[3]
    assert changes([run]) == expected
    *before, join, back = run
    assert changes([[*before, back, join]]) == expected, "in whichever order the two are written"


def test_a_region_that_was_late_in_its_own_words() -> None:
    """Its process went on: there is no new start in its journal."""
    away = event("away", 100, held_s=30.0)
    run = journal(3, away, event("land", 140), event("join", 150, epoch=2, region=3), epoch(2, 150, *ALL))
    assert spans(changes([run]), 200)[3] == [(0, 100), (150, 200)]


def test_what_happened_is_named() -> None:
    """Late, left, lost, joined: also several in one change, and several changes that one region notices late."""
    first = journal(
        0,
        event("late", 50, epoch=1, region=2, why="31 s"),
        epoch(1, 50, 0, 1, 3),
        event("left", 60, epoch=2, region=1, why="asked to"),
        epoch(2, 60, 0, 3),
        epoch(3, 90, 0, 2, 4),
    )
    second = journal(2, epoch(1, 62, 0, 1, 3), epoch(3, 90, 0, 2, 4))
    assert [change.why for change in changes([first, second])] == [
        "",
        "region 2 late",
        "region 1 left",
        "region 3 lost, region 2 back, region 4 joined",
    ]


def test_the_strip_has_a_gap_where_a_region_was_away() -> None:
    """A region is there from the change that brought it to the change that took it, or to the end."""
    found = changes(the_fourth_dies_and_comes_back())
    assert spans(found, 800) == {0: [(0, 800)], 1: [(0, 800)], 2: [(0, 800)], 3: [(0, 310), (480, 800)]}


def test_a_run_that_is_resumed_counts_its_epochs_anew() -> None:
    """With other regions than before, too."""
    before = [epoch(1, 100, 0, 1, 2)]
    after = [
        event("resume", 200, region=0),
        event("note", 200, message="m"),
        event("ways", 200, ways={"1": "direct"}),
        event("link", 200, link="tcp", why=""),
        epoch(0, 200, 0, 1),
        epoch(1, 250, 0),
    ]
    found = changes([journal(0, *before, *after)])
    assert [(each.step, each.members) for each in found] == [
        (0, ALL),
        (100, (0, 1, 2)),
        (200, (0, 1)),
        (250, (0,)),
    ]


def test_a_run_that_ends_with_a_lost_region_has_no_changes() -> None:
    """Its journal has no epochs."""
    assert changes([[event("start", 0, region=0, num_regions=2), event("finish", 8)]]) == []


@pytest.mark.parametrize("count", [12, 13])
def test_a_sentence_of_many_changes_ends(count: int) -> None:
    """The last number of regions is always there."""
    found = [
        MemberChange(10 * n, ALL[: 4 - n % 2], "region 3 lost" if n % 2 else "region 3 back")
        for n in range(1 + count)
    ]
    said = sentence(found)
    assert said.count("step") == 12
    assert ("and 1 more" in said) == (count == 13)
    assert said.endswith(f"{len(found[-1].members)} at the end") or count == 12


def test_a_resumed_run_counts_its_changes_anew() -> None:
    """With other regions, or with those that were left: what happens after it is not taken for old news."""
    before = (epoch(1, 100, 0, 1, 2), epoch(2, 200, 0, 1))
    for members, change in (((0, 1), []), (ALL, [MemberChange(300, ALL, "region 2 back, region 3 back")])):
        after = (event("resume", 300, region=0), epoch(0, 300, *members), epoch(1, 400, 0))
        found = changes([journal(0, *before, *after)])
        assert found[3:-1] == change
        assert (found[-1].step, found[-1].members) == (400, (0,))


def test_a_run_that_a_loss_has_ended_goes_on_with_all() -> None:
    """From the step of the loss, whose line is not dropped: it is not behind that step."""
    after = (event("resume", 50, region=0), epoch(0, 50, *ALL), epoch(1, 70, 0, 1, 2))
    found = changes([journal(0, epoch(1, 50, 0, 1, 2), *after)])
    assert [(each.step, each.members) for each in found[1:]] == [(50, (0, 1, 2)), (50, ALL), (70, (0, 1, 2))]
    assert spans(found, 80)[3] == [(0, 70)]
