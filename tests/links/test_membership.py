"""What a member knows of newcomers, over real presence."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.errors import LinkError
from hf_cocodc.links.elastic import ElasticLink
from hf_cocodc.links.terms import Reach, Terms
from hf_cocodc.links.wire import Wire
from hf_cocodc.meeting.presence import Member, Presence

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
