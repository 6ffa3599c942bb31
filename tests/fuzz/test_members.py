"""Whatever a region, a newcomer or a command says: it is refused in words, or all stay what they are."""

from __future__ import annotations

import contextlib
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hf_cocodc.coordinator import messages, rules
from hf_cocodc.coordinator.messages import (
    NO_GENERATION,
    Decided,
    Decision,
    Generation,
    Hello,
    Posted,
    Terms,
    from_line,
)
from hf_cocodc.coordinator.rules import Came, Ended, Run, SendTo, Tick
from hf_cocodc.errors import DonorLost, LinkError, RegionLostError
from hf_cocodc.link import rules as links
from hf_cocodc.link.part import Call, Part, Standing
from hf_cocodc.net.channel import line_of
from hf_cocodc.net.members import Member, Whereabouts
from hf_cocodc.net.wire import _count_in
from hf_cocodc.snapshot import receive
from hf_cocodc.snapshot.receive import Donors
from hf_cocodc.validation import MOST
from tests.fuzz.test_messages import NAMES, PLAIN
from tests.link.memory import Regions
from tests.listening import lanes

ME, OTHER, NEW = Member(0, 1), Member(1, 2), Member(2, 3)
TERMS = Terms(count=2, most=3, wait_s=3600.0)


class _Few:
    """A number of regions."""


def can_be_sent(plain: Any) -> bool:
    """Not half of a character, nor a number that JSON does not have."""
    try:
        return bool(json.loads(line_of(plain)) == plain)
    except UnicodeEncodeError:
        return False


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type that a message has: few members and small numbers, so that they have to do with each other."""
    if get_origin(kind) is dict and get_args(kind)[1] is not Any:
        return st.dictionaries(st.sampled_from(NAMES), values(get_args(kind)[1]), max_size=2).filter(
            can_be_sent
        )
    if kind is Any or kind is dict or get_origin(kind) is dict:
        return st.dictionaries(st.sampled_from(NAMES), PLAIN, max_size=2).filter(can_be_sent)
    if kind is Member:
        tickets = st.sampled_from([0, 1, 2, 3, 7, MOST >> 1])
        regions = st.sampled_from([0, 1, 2, 3, 7, MOST])
        return st.sampled_from([ME, OTHER, NEW]) | st.builds(Member, regions, tickets)
    if kind is _Few:
        return st.integers(1, 3)
    if kind is int:
        return st.sampled_from([0, 1, 1, 2, 2, 3, -1, 7, (1 << 53) - 1])
    if kind is float:
        return st.sampled_from([0.0, 1.0, -1.0, 1e9, 1e300])
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.sampled_from(["", "join", "leave", "silent", "late", "finished", "base", "x" * 300])
    if get_origin(kind) in (types.UnionType, typing.Union):
        return st.none() | values(next(each for each in get_args(kind) if each is not type(None)))
    if kind == tuple[Whereabouts, ...]:
        return st.sampled_from([lanes(), (*lanes("2001:db8::1"), *lanes())])
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    hints = get_type_hints(kind)
    if kind is Terms:
        hints |= dict.fromkeys(("count", "most"), _Few)
    if issubclass(kind, tuple):
        return st.builds(kind, *(values(each) for each in hints.values()))
    return st.builds(kind, **{name: values(each) for name, each in hints.items()})


def some(union: Any) -> st.SearchStrategy[Any]:
    """A message of one of these kinds."""
    return st.sampled_from(get_args(union)).flatmap(values)


MESSAGES = st.sampled_from(get_args(messages.AnyMessage)).flatmap(values)


def plain_of(message: Any) -> dict[str, Any]:
    return dict(json.loads(line_of(message)))


@given(MESSAGES)
def test_messages_cross_as_they_are(message: Any) -> None:
    """Every message whose numbers lie in their ranges."""
    assert from_line(line_of(message)) == message


@given(MESSAGES, st.dictionaries(st.sampled_from([*NAMES, "member", "terms", "members"]), PLAIN, max_size=3))
def test_changed_messages(message: Any, changed: dict[str, Any]) -> None:
    """A message that says what was said, or LinkError."""
    plain = {**plain_of(message), **changed}
    with contextlib.suppress(LinkError):
        found = from_line(json.dumps(plain).encode())
        assert plain_of(found).keys() >= plain.keys()
        assert from_line(line_of(found)) == found


@given(PLAIN | st.dictionaries(st.sampled_from(NAMES), PLAIN) | st.just([]))
def test_what_is_no_message(plain: Any) -> None:
    with contextlib.suppress(LinkError):
        from_line(json.dumps(plain).encode())
        raise AssertionError(f"{plain} is believed")


@pytest.mark.parametrize("number", [0, -1, 1025, (1 << 53) - 1])
@pytest.mark.parametrize("name", ["count", "most"])
def test_a_number_of_regions_that_no_run_has(name: str, number: int) -> None:
    """The coordinator goes through all of them: it would take its time, and its memory."""
    hello = plain_of(
        Hello(region=0, join=False, lanes=lanes(), machine="m", token="t", terms=TERMS, compared={})
    )
    with pytest.raises(LinkError, match="is no message"):
        from_line(line_of({**hello, "terms": {**hello["terms"], name: number}}))


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "Beat", "waited_s": NaN}',
        b'{"kind": "Beat", "waited_s": 1e400}',
        b'{"kind": "Beat", "step": 9007199254740992}',
        b'{"kind": "Beat", "step": true}',
        b'{"kind": "Beat", "members": [[-1, 0]]}',
        b'{"kind": "Beat", "members": [%s[0, 0]]}' % (b"[0, 0], " * 1024),
        b'{"kind": "Note", "text": "%s"}' % (b"x" * 100_001),
        b'{"kind": "Note", "text": "\\ud800"}',
        b'{"kind": "Note", "text": "\xff"}',
        b'{"kind": "StopAt", "number": 1, "step": 1, "whys": {"x": %s}}' % (b"[" * 100_000),
        b"[" * 100_000,
    ],
    ids=range(11),
)
def test_what_no_bound_allows(line: bytes) -> None:
    with pytest.raises(LinkError, match="is no message"):
        from_line(line)


# ---- the coordinator's rules


def begun(elastic: bool) -> Run:
    """A run of two regions that trains; connections 0 and 1 are theirs."""
    state = Run(name="run")
    terms = structs.replace(TERMS, wait_s=3600.0 * elastic)
    for region in range(2):
        hello = Hello(
            region=region,
            join=False,
            lanes=lanes(),
            machine="m",
            token=f"t{region}",
            terms=terms,
            compared={},
        )
        state, _ = rules.step(state, Came(region, hello), 0.0)
    assert state.members == (ME, OTHER)
    return state


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.integers(0, 3),
            some(messages.FromRegion) | some(messages.FromCommand) | st.sampled_from(["ends", "waits"]),
            st.sampled_from([0.0, 0.1, 3.0, 20.0]),
        ),
        max_size=12,
    ),
)
def test_what_the_coordinator_hears(elastic: bool, said: list[tuple[int, Any, float]]) -> None:
    """Whatever callers say, in any order: it goes on, says only what can be read, and what it has decided stays."""
    state, now = begun(elastic), 0.0
    for who, what, later in said:
        now += later
        event = Ended(who) if what == "ends" else Tick() if what == "waits" else Came(who, what)
        before = state
        state, effects = rules.step(state, event, now)
        for effect in effects:
            if isinstance(effect, SendTo):
                from_line(line_of(effect.message))
        assert not {seat.member.ticket for seat in state.seats.values()} & state.lost
        assert len({seat.member for seat in state.seats.values()}) == len(state.seats)
        numbers = [each.number for each in state.announced]
        assert numbers == sorted(set(numbers)) and all(each <= state.changes for each in numbers)
        if state.run == before.run:
            assert state.losses >= before.losses and state.changes >= before.changes
            assert state.lost >= before.lost and state.tickets >= before.tickets
        assert elastic or state.changes == 0, "nobody comes or goes in a fixed run"


# ---- the member's rules

LINK_EVENTS = (
    st.sampled_from(links.Event.__subclasses__())
    .flatmap(values)
    # who reads a marker takes no larger number: the next call has one more
    .map(lambda e: replace(e, submitted=min(e.submitted, MOST - 1)) if isinstance(e, links.Marked) else e)
)
DECIDED = st.builds(
    Decided,
    generation=st.just(NO_GENERATION),
    decision=st.builds(
        Decision,
        number=st.integers(0, 3),
        members=st.just((ME,)),
        lost=st.lists(st.sampled_from([ME, OTHER, NEW, NEW]), max_size=2).map(tuple),
        done=st.integers(0, 4),
    ),
    whys=st.just(()),
)


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.sampled_from([Standing.MEMBER, Standing.MEMBER, Standing.FOLLOWING]),
    st.lists(LINK_EVENTS | DECIDED.map(links.HeardFrom) | st.just(links.Made("a mean")), max_size=20),
)
def test_what_a_member_hears_and_does(elastic: bool, standing: Standing, events: list[Any]) -> None:
    """Whatever happens: calls complete in their order and once, with what this process holds; none after it is out."""
    roster = (ME, OTHER) if standing is Standing.MEMBER else ()
    part = Part(
        me=ME,
        terms=structs.replace(TERMS, wait_s=3600.0 * elastic),
        standing=standing,
        roster=roster,
        lanes=dict.fromkeys((ME, OTHER), lanes()),
    )
    completed, was_marked = [0], False
    for event in events:
        before = part
        part, effects = links.step(part, event)
        was_marked = was_marked or isinstance(event, links.Marked)
        calls: list[Call] = [each.call for each in effects if isinstance(each, links.Complete)]
        for call in calls:
            assert call.has
            assert was_marked or call.number == completed[-1] + 1
            completed.append(call.number)
        if before.standing is Standing.OUT:
            assert replace(part, notes={}) == replace(before, notes={}) and not effects
        if part.frozen:
            assert not any(isinstance(each, links.Begin) for each in effects)
        assert ME in part.members and not {each.ticket for each in part.members if each != ME} & part.lost
        assert part.knows >= part.changes and part.losses >= before.losses and part.lost >= before.lost
        numbers = [each.number for each in part.announced]
        assert numbers == sorted(set(numbers)) and all(each > part.changes for each in numbers)
        if standing is Standing.MEMBER and not was_marked:
            assert numbers == list(range(part.changes + 1, part.knows + 1))
        for each in effects:
            if isinstance(each, links.Tell):
                assert from_line(line_of(each.message)) == each.message


# ---- a real link


@pytest.fixture(scope="module")
def regions() -> Iterator[Regions]:
    made = Regions(2)
    yield made
    made.end()


@settings(deadline=None)
@given(
    said=st.lists(
        st.builds(
            Posted,
            sender=values(Member),
            topic=st.sampled_from(["wire", "base", "offer", "x"]),
            content=st.dictionaries(st.sampled_from(["key", "value", *NAMES]), PLAIN, max_size=3),
        )
        | values(messages.Noted)
        | values(messages.Suspect)
        | values(messages.Resumed).map(
            lambda heard: structs.replace(heard, generation=Generation(9, ""))
        )  # of no older one
        | values(messages.Alive),
        max_size=5,
    )
)
def test_what_a_link_hears(regions: Regions, said: list[Any]) -> None:
    """Whatever another process has sent through the coordinator: the region and its members stay what they are."""
    link = regions.links[0]
    for message in said:
        link._hear(message)
    assert link.members == (0, 1) and link.standing is Standing.MEMBER and not link._part.frozen
    assert link.wire.regions == [1]


@given(
    values(Member), st.sampled_from(["offer", "no_base", "x"]), st.dictionaries(st.sampled_from(NAMES), PLAIN)
)
def test_answers_to_a_newcomer(sender: Member, topic: str, content: dict[str, Any]) -> None:
    """Of the member that it has asked, and of others: an offer, or a reason in words why it gets no base there."""

    def post(to: Member, topic_asked: str) -> None:
        donors.hear(sender, topic, content)
        donors.hear(OTHER, "no_base", {"why": "none"})

    donors = Donors(0, post, lambda member: True, lambda member: "127.0.0.1")
    with (
        mock.patch.object(receive, "receive", return_value=None),
        contextlib.suppress(DonorLost),
    ):
        donors.base_of(OTHER, Path("nowhere"), stuck_timeout_s=5.0)
        assert sender == OTHER and topic == "offer"


@given(st.floats())
def test_numbers_of_connections(told: float) -> None:
    with contextlib.suppress(RegionLostError):
        assert _count_in(told, 1) == told and 1 <= told <= 64
