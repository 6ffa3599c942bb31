"""What a member knows of newcomers, over real presence."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.errors import LinkError
from hf_cocodc.links.elastic import ElasticLink
from hf_cocodc.links.ops import Ops
from hf_cocodc.links.terms import Reach, Terms
from hf_cocodc.links.wire import Wire
from hf_cocodc.meeting.presence import Member, Presence
from tests.links.memory import Regions, wait_until

SOON_S = 20.0


@pytest.mark.parametrize("reason", [None, "another member could not be reached"])
def test_a_newcomer_that_gives_up_leaves_its_number_to_the_next(reason: str | None) -> None:
    """It was connected to this member, and ended in good order, or with a reason, before it came in."""
    me = Member(0, 1)
    presence = Presence("run", me, "127.0.0.1", SOON_S)
    presence.connect({}, time.monotonic() + SOON_S)  # from then on it hears newcomers
    agreement: Any = SimpleNamespace(close=lambda: None)
    wire = Wire(0, connections=1, timeout_s=SOON_S)
    reach = Reach(me, wire, presence, lambda freeze, decided: agreement, (me,))
    link = ElasticLink(reach, Terms(lambda: agreement, "run"), timeout_s=SOON_S)
    try:
        for ticket in (2, 3):
            newcomer = Presence("run", Member(1, ticket), "127.0.0.1", SOON_S)
            connect(newcomer, {me: presence.address})
            newcomer.close(reason)
    finally:
        link.close()


def test_who_is_connected_is_not_connected_again() -> None:
    """A member that asks for the connections for transfers keeps those that it has: else it would be lost."""
    regions = Regions(2)
    life, other = regions.links[0]._life, regions.first[1]
    before = life.wire._pairs[1]
    for _ in range(3):
        life._pairing._answer(other)
    assert not life._pairing._asking
    assert life.wire._pairs[1] is before
    regions.hub.end()


def test_a_newcomer_that_asks_often_is_answered_once() -> None:
    """Every answer is a thread that waits for it."""
    regions = Regions(1)
    life = regions.links[0]._life
    newcomer, answers = regions.hub.member(1), threading.active_count()
    for _ in range(50):
        life._pairing._answer(newcomer)
    assert threading.active_count() <= answers + 1
    regions.hub.kill(newcomer)
    wait_until(lambda: not life._pairing._asking)
    regions.hub.end()


def test_words_of_a_member_take_no_memory() -> None:
    """Results that it says it holds, of calls that nobody will make for long: the nearest are remembered."""
    presence: Any = SimpleNamespace(on=lambda kind, handler: None)
    wire: Any = None
    ops = Ops(Member(0, 1), wire, presence, lambda member, why: None, lambda op: None)
    for op in (*range(5000, 2000, -1), 1):
        ops._hear(Member(1, 2), {"op": op, "losses": 0})
    assert len(ops._haves) == 1000 and ops._haves[1, 0] == {2}
    for odd in (-1, 2**53, 1.0, True, "1", None, [1]):
        for name in ("op", "losses"):
            with pytest.raises(ValueError, match="is no whole number"):
                ops._hear(Member(1, 2), {"op": 1, "losses": 0, name: odd})


def test_a_lost_process_is_refused() -> None:
    """It has to come back with a new ticket, also where it was never connected."""
    life = Regions(2).links[0]._life
    life.ops.lost |= {9}
    for ticket in (0, 9):
        assert f"ticket {ticket} is of no process" in (life._refusal({"region": 5, "ticket": ticket}) or "")
    assert life._refusal({"region": 5, "ticket": 10}) is None
    life.presence._hub.end()


def connect(newcomer: Presence, members: dict[Member, str]) -> None:
    """Until the members accept it: they need a moment to hear that the one before has gone."""
    deadline = time.monotonic() + SOON_S / 4
    while True:
        try:
            newcomer.connect(members, time.monotonic() + SOON_S, {})
            return
        except LinkError:
            if time.monotonic() > deadline:
                newcomer.close()
                raise
            time.sleep(0.05)
