"""Whatever a newcomer or a member says, in JSON: it is refused in words, or both stay what they are."""

from __future__ import annotations

import contextlib
import json
import math
import selectors
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.links.wire import _count_in
from hf_cocodc.meeting.caller import Caller, Member
from hf_cocodc.meeting.callers import Callers
from hf_cocodc.meeting.changes import Changes
from hf_cocodc.meeting.channel import Channel, line_of
from hf_cocodc.meeting.handshake import PROTOCOL
from hf_cocodc.meeting.heard import whole
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.meeting.store import SteadyStore
from hf_cocodc.meeting.verdict import Decision, Report, to_plain
from tests.fuzz.test_messages import ADDRESS, KEYS, NAMES, PLAIN, ends
from tests.links.memory import Regions

PLAIN_DICTS = st.dictionaries(st.sampled_from(NAMES), PLAIN, max_size=4)
ME, OTHER = Member(0, 3), Member(1, 7)
GREETING = {
    "hf_cocodc": PROTOCOL,
    "run": "run-7",
    "from": [1, 7],
    "to": [0, 3],
    "address": ADDRESS,
    "hello": {},
    "refused": None,
}
REPORT = to_plain(Report(number=0, member=OTHER, first=1, done=4, has=True, lost=(ME,), members=(ME, OTHER)))
DECISION = to_plain(Decision(number=0, members=(ME,), lost=(OTHER,), done=4))
"""What members say, as JSON has it."""


def changed(sound: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A sound message of which some values are others, or no message at all."""
    some = st.dictionaries(st.sampled_from([*sound, "proof", "nonce"]), PLAIN, max_size=3)
    return some.map(lambda more: {**sound, **more}) | st.dictionaries(st.sampled_from(NAMES), PLAIN)


@given(changed(GREETING), st.sampled_from(["came", "asks", "welcomed"]), st.sampled_from([None, KEYS]))
def test_greetings_of_members(said: dict[str, Any], stage: str, keys: Keys | None) -> None:
    """At each stage of a call: the caller is closed, refused, or a member that others can name. With a secret it never is one."""
    adopted: list[tuple[Caller, dict[str, Any]]] = []
    with ends() as (_, other), selectors.DefaultSelector() as selector:
        callers = Callers(
            *("run-7", ME, "127.0.0.1", selector, lambda member: False, lambda hello: None),
            lambda caller, hello, messages: adopted.append((caller, hello)),
            keys,
        )
        callers.expect({}, {}, {})
        caller = Caller(Channel(other), None, stage, math.inf, is_theirs=stage != "asks")
        if stage == "asks":
            caller.member, caller.proof = OTHER, callers._proof(ME, OTHER)
            caller.proof.say({})
        elif stage == "welcomed":
            caller.member, caller.proof = OTHER, callers._proof(OTHER, ME)
            caller.proof.hear(callers._proof(OTHER, ME).say({}))
            caller.proof.say({})
        callers._all.append(caller)
        selector.register(other, selectors.EVENT_READ, caller)
        callers._hear(caller, json.loads(json.dumps(said)))
        callers.close()
    for who, hello in adopted:
        assert keys is None and who.member is not None
        line_of({"from": who.member, "hello": hello})
        assert whole(hello["region"]) == who.member.region and whole(hello["ticket"]) == who.member.ticket


@given(changed(REPORT), changed(DECISION))
def test_reports_and_decisions(report: dict[str, Any], decision: dict[str, Any]) -> None:
    """One that is believed, or LinkError; no other member is waited for or asked for more than there is."""
    presence: Any = SimpleNamespace(
        on=lambda kind, handler: None, members=(OTHER,), tell=lambda *given, **content: None
    )
    presence.tell_all = presence.tell
    freeze: Any = lambda: None  # noqa: E731  its thread asks for nothing
    changes = Changes(SteadyStore("127.0.0.1:1"), "run-7", ME, presence, freeze, lambda decision: None)
    changes.close()
    changes._thread.join()
    for said in ({"report": report}, report):
        with contextlib.suppress(LinkError):
            changes._hear(OTHER, said)
    for said in ({"decision": decision}, decision):
        with contextlib.suppress(LinkError):
            changes._learn(said)
    assert set(changes._reports) <= {OTHER} and changes.number <= 1
    line_of({"report": [to_plain(each) for each in changes._reports.values()]})


@given(st.lists(st.tuples(st.sampled_from(["connected", "pair", "ready", "closed", "have"]), PLAIN_DICTS)))
def test_what_a_member_hears(told: list[tuple[str, dict[str, Any]]]) -> None:
    """Whatever a newcomer says, and a member: both stay what they are, and a wrong number is refused in words."""
    regions = Regions(2)
    life, newcomer = regions.links[0]._life, regions.hub.member(2)
    regions.hub.dead.add(newcomer.ticket)  # so nobody waits for it
    for kind, content in told:
        for member in (regions.first[1], newcomer):
            for handler in regions.hub.presences[life.me]._handlers[kind]:
                with contextlib.suppress(ValueError):
                    handler(member, content)
    assert life.members == tuple(regions.first) and 1 in life.wire.regions
    assert all(0 < op < 1 << 53 and losses >= 0 for op, losses in life.ops._haves)
    regions.hub.end()


@given(st.floats())
def test_numbers_of_connections(told: float) -> None:
    with contextlib.suppress(RegionLostError):
        assert _count_in(told, 1) == told and 1 <= told <= 64
