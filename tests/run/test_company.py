"""What a member of an elastic run says of itself and of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.errors import LeftBehind, LinkError, MeetingError, RegionLostError
from hf_cocodc.meeting import live
from hf_cocodc.meeting.presence import Member
from hf_cocodc.meeting.signs import Seen
from hf_cocodc.run.company import Company

ME, OTHER = Member(0, 1), Member(2, 5)


def test_what_each_member_does_is_known_to_the_one_that_writes_the_record() -> None:
    """Its own doing goes out with its signs of life, the others' comes with theirs."""
    seen = {2: Seen(0.2, 40, 0.7, 9, 0, "", "sends a base to region 3", 12)}
    presence = SimpleNamespace(me=ME, doing="", inner_step=52, awaits=2, seen=seen.get)
    company: Any = SimpleNamespace(
        presence=presence,
        leaves="",
        _gifts={Member(3, 8): None, Member(4, 9): None},
        _addresses={ME: "a:1", OTHER: "b:1"},
        _moved=(52, 0.0),
    )
    Company._say_doing(company)
    assert presence.doing == "sends a base to region 3, region 4"
    own, other = (Company._standing(company, member) for member in (ME, OTHER))
    assert (own.step, own.awaits, own.doing, own.behind) == (52, 2, presence.doing, 0)
    assert own.moved_s > 1, "its own standing still is seen, too"
    assert (other.step, other.behind, other.awaits, other.doing) == (40, 12, 0, "sends a base to region 3")
    company.leaves = "hf-cocodc leave"
    Company._say_doing(company)
    assert presence.doing == "leaves"
    company.leaves, company._gifts = "", {}
    Company._say_doing(company)
    assert presence.doing == ""


@pytest.fixture
def record_with_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of the run names OTHER."""
    there = SimpleNamespace(region=OTHER.region, ticket=OTHER.ticket, address="b:1")
    monkeypatch.setattr(live, "read", lambda store, name: SimpleNamespace(members=[there]))


def meeting(link: Any, connect: Callable[..., None], timeout_s: float = 60.0) -> Any:
    """What `Company._meet` needs."""
    place = SimpleNamespace(
        regions=SimpleNamespace(timeout_s=timeout_s), steady_store=lambda: None, name="run"
    )
    presence = SimpleNamespace(members=(), connect=connect)
    return SimpleNamespace(place=place, presence=presence, link=link, _addresses={})


@pytest.mark.usefixtures("record_with_other")
def test_a_newcomer_does_not_wait_for_a_member_that_is_lost_before_they_meet() -> None:
    """The record may still name it. The newcomer hears of the loss from others."""
    link = SimpleNamespace(strangers=[OTHER], paired=None)
    link.pair_with = lambda members: setattr(link, "paired", members)

    def connect(wanted: dict[Member, str], deadline: float, hello: dict[str, Any]) -> None:
        link.strangers = []
        raise RegionLostError(OTHER.region, "it was not reached")

    Company._meet(meeting(link, connect))
    assert link.paired == []


def test_a_newcomer_that_has_lost_all_members_looks_for_the_run_again(tmp_path: Path) -> None:
    """It stood still, and they missed it: the run trains on."""
    regions = SimpleNamespace(start_timeout_s=60.0)
    company: Any = SimpleNamespace(
        place=SimpleNamespace(region=3, regions=regions),
        presence=SimpleNamespace(members=()),
        _failures=Counter(),
        _from=None,
        _addresses={},
        _asking=SimpleNamespace(base_of=lambda member, address, folder: SimpleNamespace(received=address)),
        _pair=lambda members: None,
    )

    def reach_again() -> dict[Member, str]:
        company.presence.members, company._addresses = (OTHER,), {OTHER: "b:1"}
        return company._addresses

    company._reach_again = reach_again
    assert Company.get_base(company, tmp_path) == "b:1"


@pytest.mark.parametrize("has_time", [True, False])
def test_a_newcomer_begins_again_if_a_member_is_lost_while_they_connect(has_time: bool) -> None:
    """With those that are left; not for ever."""
    tried: list[Any] = []

    def pair_with(members: Any) -> None:
        tried.append(members)
        if len(tried) < 3:
            raise LinkError("region 2 has gone.")

    regions = SimpleNamespace(start_timeout_s=60.0 if has_time else -1.0)
    company: Any = SimpleNamespace(
        place=SimpleNamespace(region=3, regions=regions),
        link=SimpleNamespace(pair_with=pair_with),
        _reach_again=lambda: {ME: "a:1"},
    )
    if not has_time:
        with pytest.raises(LinkError, match="region 2 has gone"):
            Company._pair(company, {ME: "a:1", OTHER: "b:1"})
        return
    Company._pair(company, {ME: "a:1", OTHER: "b:1"})
    assert tried == [{ME: "a:1", OTHER: "b:1"}, {ME: "a:1"}, {ME: "a:1"}]


@pytest.mark.usefixtures("record_with_other")
def test_a_newcomer_waits_for_a_member_that_refuses_it() -> None:
    """That member was frozen, and does not know yet that the others have gone on without it."""
    link = SimpleNamespace(strangers=[OTHER], paired=None)
    link.pair_with = lambda members: setattr(link, "paired", members)
    refusals = 0

    def connect(wanted: dict[Member, str], deadline: float, hello: dict[str, Any]) -> None:
        nonlocal refusals
        refusals += 1
        if refusals == 2:
            link.strangers = []
        raise MeetingError("region 2 refuses region 0: region 2 is no member itself")

    Company._meet(meeting(link, connect))
    assert refusals == 2
    assert link.paired == []


@pytest.mark.usefixtures("record_with_other")
def test_a_newcomer_that_a_member_keeps_refusing_begins_again() -> None:
    """As another process of its region, with a ticket of its own, it may be let in."""

    def connect(wanted: dict[Member, str], deadline: float, hello: dict[str, Any]) -> None:
        raise MeetingError("region 2 refuses region 0: it has been connected before")

    link = SimpleNamespace(strangers=[OTHER])
    with pytest.raises(LeftBehind, match="region 2 refuses region 0: it has been connected before"):
        Company._meet(meeting(link, connect, timeout_s=0.3))
