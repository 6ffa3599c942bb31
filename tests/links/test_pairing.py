"""Connections between members and newcomers, of which one or the other may begin again meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.errors import LinkError
from hf_cocodc.links.pairing import Pairing
from hf_cocodc.meeting.presence import Member

ME, OLD, NEW = Member(0, 1), Member(3, 10), Member(3, 11)


class Wire:
    """Connects at once, but for what happens just before the connection counts."""

    def __init__(self) -> None:
        self.regions: list[int] = []
        self.just_before: Any = lambda: None

    def drop(self, region: int) -> None:
        self.regions = [each for each in self.regions if each != region]

    def connect(self, region: int, key: str, store: Any, claim: Any) -> None:
        self.just_before()
        if not claim():
            raise LinkError(f"region {region} is not wanted")
        self.regions.append(region)


def pairing_of(wire: Wire, *connected: Member) -> tuple[Pairing, Any]:
    presence = SimpleNamespace(
        members=connected, on=lambda kind, handler: None, tell=lambda member, kind: None
    )
    reach: Any = SimpleNamespace(me=ME, wire=wire, presence=presence, members=None)
    terms: Any = SimpleNamespace(prefix="run", store=lambda: None)
    return Pairing(reach, terms, lambda member: None), presence


def test_only_the_newest_process_of_a_region_is_connected() -> None:
    """One that has begun again still has a thread that connects for its first try. It must not replace the second one."""
    wire = Wire()
    pairing, presence = pairing_of(wire, OLD)

    def begins_again() -> None:
        presence.members = (OLD, NEW)
        wire.just_before = lambda: None
        pairing.make([NEW])

    wire.just_before = begins_again
    with pytest.raises(LinkError, match="not wanted"):
        pairing.make([OLD])
    assert pairing.has(NEW)
    assert not pairing.has(OLD)
    assert wire.regions == [3]


def test_a_process_that_leaves_connects_no_more() -> None:
    wire = Wire()
    pairing, _ = pairing_of(wire, NEW)
    wire.just_before = pairing.end
    with pytest.raises(LinkError, match="not wanted"):
        pairing.make([NEW])
    assert not wire.regions


def test_nobody_waits_for_a_member_that_has_gone() -> None:
    wire = Wire()
    pairing, presence = pairing_of(wire, NEW)

    def goes() -> None:
        presence.members = ()

    wire.just_before = goes
    with pytest.raises(LinkError, match=r"region 3 (has gone|is not wanted)"):
        pairing.make([NEW])
