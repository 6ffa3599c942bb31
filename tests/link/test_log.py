"""The log that newcomers follow: what crosses the wire, what is skipped, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_cocodc.errors import LinkError
from hf_cocodc.link import following as following_module
from hf_cocodc.link.following import Following
from hf_cocodc.link.log import Entry, Item, Log, Marker, Sinks, from_plain, rows_of, to_plain
from hf_cocodc.link.records import Trailer
from hf_cocodc.net.members import Member
from tests.link.memory import PATIENCE_S, wait_until

ENTRY = Entry(
    op=7,
    kind="mean",
    what="fragment 0 sent at step 4",
    members=(0, 3),
    rows=rows_of([Trailer(loss=1.5), Trailer(weight=0.0, loss=2.0)]),
    values=torch.arange(6.0),
    state={"residual": [6], "codec": {"start": torch.ones(2, 3)}},
    seconds=0.25,
    square=55.0,
)
MARKER = Marker(4, 7, 2, 1, (Member(0, 1), Member(3, 9)), (2,), (9,), True)


NESTED: dict[str, Any] = {}
for _ in range(2000):
    NESTED = {"codec": NESTED}


def items_of(log: Log) -> Iterator[Item]:
    """The items of a log, until it ends."""
    return (item for item in log.items(PATIENCE_S) if item is not None)


def test_items_cross_as_plain_values() -> None:
    """Both kinds of items come back as they were."""
    there = from_plain(to_plain(ENTRY))
    assert isinstance(there, Entry)
    assert torch.equal(there.values, ENTRY.values) and torch.equal(there.rows, ENTRY.rows)
    assert replace(there, values=ENTRY.values, rows=ENTRY.rows, state=ENTRY.state) == ENTRY
    assert from_plain(json.loads(json.dumps(to_plain(MARKER)))) == MARKER


@pytest.mark.parametrize(
    "change",
    [
        {"rows": torch.zeros(1, 16).double()},
        {"values": torch.zeros(2, 3)},
        {"values": torch.zeros(6).double()},
        {"kind": "vote"},
        {"op": "7"},
        {"members": [0, -3]},
        {"state": []},
        {"op": -1},
        {"op": True},
        {"op": 1 << 60},
        {"what": "x" * 1001},
        {"members": [3, 0]},
        {"members": [0, 0]},
        {"members": list(range(2000))},
        {"members": 3},
        {"state": {"residual": [10**12], "codec": {}}},
        {"state": {"residual": torch.ones(6)}},
        {"state": {"codec": {"residual": [7]}}},
        {"state": {"codec": "x"}},
        {"state": {"codec": [["x"]]}},
        {"state": {3: 4}},
        {"state": NESTED},
    ],
)
def test_a_damaged_entry_is_refused(change: dict[str, Any]) -> None:
    plain = to_plain(ENTRY)
    with pytest.raises(LinkError, match="the log of another region"):
        from_plain({"entry": {**plain["entry"], **change}})


@pytest.mark.parametrize(
    "change",
    [
        {"members": [[0]]},
        {"members": [[3, 9], [0, 1]]},
        {"members": [["0", 1]]},
        {"lost": [-1]},
        {"held": 1},
        {"step": 1.5},
    ],
)
def test_a_damaged_marker_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LinkError, match="the log of another region"):
        from_plain({"marker": {**to_plain(MARKER)["marker"], **change}})


def test_a_log_that_outgrows_its_limit_ends() -> None:
    """It takes no more, forgets what it holds, and its reader ends; what fits is read in order."""
    log = Log(3 * ENTRY.num_bytes)
    assert log(MARKER) and log(ENTRY)
    reader = items_of(log)
    assert next(reader) == MARKER and next(reader) is ENTRY
    assert all(log(ENTRY) for _ in range(3)) and not log.overflowed
    assert not log(ENTRY)
    assert log.overflowed and not log(ENTRY) and list(reader) == []


def test_sinks_take_what_follows_their_beginning() -> None:
    """A sink gets a marker, and entries from its first call on; one that takes no more is dropped."""
    sinks, taken = Sinks(), []
    log, full = Log(1 << 20), Log(1)

    def take(item: Any) -> bool:
        taken.append(item)
        return True

    sinks.add(take, 7, MARKER)
    sinks.add(log, 8, MARKER)
    sinks.add(full, 7, MARKER)
    sinks.write(lambda: ENTRY, op=7)
    sinks.write(lambda: MARKER)
    sinks.remove(take)
    sinks.write(lambda: ENTRY, op=9)
    log.close()
    assert taken == [MARKER, ENTRY, MARKER]
    assert list(items_of(log)) == [MARKER, MARKER, ENTRY]
    assert full.overflowed


def test_calls_and_entries_meet_by_their_names() -> None:
    """In any order of both; entries that nobody has asked for before a marker are forgotten."""
    log = Log(1 << 20)
    following = Following(items_of(log), lambda error: error)
    asked = following.ask("mean", ENTRY.what)
    for item in (ENTRY, replace(ENTRY, op=8), replace(ENTRY, op=9, what="other"), MARKER):
        log(item)
    assert asked() is ENTRY
    assert following.next_marker(20.0) == MARKER
    assert following.ask("mean", ENTRY.what)().op == 8
    following.skip(9)
    unanswered = following.ask("mean", "other")
    assert following.next_marker(0.01) is None
    log.close()
    with pytest.raises(LinkError, match="has ended"):
        unanswered()
    with pytest.raises(LinkError, match="has ended"):
        following.next_marker(20.0)


def test_entries_that_wait_take_no_more_memory_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit waits at the donor, whose log outgrows its limit and ends: so do the calls, after what has come."""
    monkeypatch.setattr(following_module, "_MOST_BYTES", 2 * ENTRY.num_bytes)
    log = Log(4 * ENTRY.num_bytes)
    following = Following(items_of(log), lambda error: error)
    for item in (MARKER, *(replace(ENTRY, op=op) for op in range(8, 12))):
        assert log(item)
    wait_until(lambda: following._num_bytes == 3 * ENTRY.num_bytes and not log._items)
    assert [log(ENTRY) for _ in range(5)] == [True] * 4 + [False], "nobody reads the log"
    assert following.next_marker(20.0) == MARKER
    assert [following.ask("mean", ENTRY.what)().op for _ in range(4)] == [8, 9, 10, 11]
    with pytest.raises(LinkError, match="has ended"):
        following.ask("mean", ENTRY.what)()
    assert not following._entries and not following._asked and not following._num_bytes


@pytest.mark.parametrize("ahead", [False, True], ids=["as it comes", "asked before"])
def test_no_marker_and_no_call_waits_behind_the_bound(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is: a newcomer that makes the inner steps up to each marker follows to the end."""
    monkeypatch.setattr(following_module, "_MOST_BYTES", 0)
    log = Log(1 << 20)
    following = Following(items_of(log), lambda error: error)
    steps = range(1, 6)
    for step in steps:
        for fragment in range(3):
            log(replace(ENTRY, op=3 * step + fragment, what=f"{fragment} of {step}"))
        log(replace(MARKER, step=step))
    asked = {}
    for step in steps:
        if ahead:  # as with an overlap: what is sent in this step lands in the next one
            asked |= {each: following.ask("mean", each) for each in (f"0 of {step + 1}", f"2 of {step + 1}")}
        marker = following.next_marker(20.0)
        assert marker is not None and marker.step == step
        for each in (f"{fragment} of {step}" for fragment in range(3)):
            call = asked.pop(each, None) or following.ask("mean", each)
            assert call.args[0].result(20.0).what == each  # it waits for nothing that is not read
    following.fail(LinkError("the test is over"))


def test_a_marker_says_how_far_the_members_are() -> None:
    """The newest one that is there when it is taken out: its reader is so many steps behind."""
    log = Log(1 << 20)
    for step in (4, 8, 12):
        log(replace(MARKER, step=step))
    log.close()
    assert [(each.step, each.newest) for each in items_of(log) if isinstance(each, Marker)] == [
        (4, 12),
        (8, 12),
        (12, 12),
    ]
