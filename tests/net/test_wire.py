"""Pairs of regions and views of them, between wires in one process, over real connections."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_cocodc import threads
from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.net import pairs, reaching, wire
from hf_cocodc.net.connection import Connection, Operation
from hf_cocodc.net.view import Revoked, UnderWay, View
from hf_cocodc.net.wire import FIRST, Wire
from tests.link.memory import PATIENCE_S, at_once, connect, connected, wait_until
from tests.listening import lanes

IDS = (2, 5, 9)
TAG = 63
"""No call of a view has come to it yet."""


def met(views: Sequence[View]) -> list[list[float]]:
    """What each of the views gets in a swap of numbers that name their regions."""
    own = [torch.tensor([float(view.regions[view.region])]) for view in views]
    got = at_once(
        *(lambda v=view, mine=mine: v.swap(mine, "a swap") for view, mine in zip(views, own, strict=True))
    )
    return [[float(each) for each in row] for row in got]


def row() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.uint8)


def test_a_key_that_is_none_costs_its_region() -> None:
    """Keys with it would be known to all."""
    here, there = Wire(0), lanes()[0]
    with pytest.raises(LinkError, match="region 1 says that its key is 0000.*none of X25519"):
        here.meet(1, there, "run")
    assert not here._port._expected, "nobody is expected any more"
    here.close()


def test_a_view_knows_positions_and_its_errors_ids() -> None:
    """Regions keep their numbers whoever takes part; only inside a view they have positions."""
    wires = connected(IDS)
    assert [wires[5].regions, wires[9].regions] == [[2, 9], [2, 5]]
    views = [wires[region].view(reversed(IDS), 1) for region in IDS]
    assert [(view.region, view.others, view.regions) for view in views] == [
        *((0, [1, 2], [2, 5, 9]), (1, [0, 2], [2, 5, 9]), (2, [0, 1], [2, 5, 9]))
    ]
    assert met(views) == [[2.0, 5.0, 9.0]] * 3
    pending, waits = views[0].receive(2, row(), TAG, 0, "late news"), wires[2].waits
    moved_at = waits.moved_at

    def wait() -> None:
        views[0].wait([pending], "late news", may_be_late=True)

    def send() -> None:
        wait_until(lambda: waits.region is not None)
        assert (waits.region, waits.what) == (9, "late news") and waits.late_since is not None
        views[2].wait([views[2].send(0, row(), TAG, 0, "late news")], "late news")

    at_once(wait, send)
    assert waits.region is waits.late_since is None and waits.moved_at > moved_at
    alone = wires[5].view([5], 1)
    assert (alone.region, alone.num_regions, alone.others, alone.rtt_s) == (0, 1, [], 0.0)
    assert met([alone]) == [[5.0]]


def test_a_connection_that_is_no_longer_wanted_does_not_count() -> None:
    """Its end is closed, and the one that was there before stays. The other end notices it."""
    wires = connected(IDS[:2])
    before = [wires[region].view(IDS[:2], 1) for region in IDS[:2]]
    late = Wire(5, connections=1, timeout_s=20.0)
    with ThreadPoolExecutor(2) as pool:
        refusing = pool.submit(wires[2].meet, 5, late.whereabouts, "2-5")
        late.add(late.meet(2, wires[2].whereabouts, "2-5"))
        refusing.result().close()
    assert met(before) == [[2.0, 5.0]] * 2
    with pytest.raises(RegionLostError):
        late.view([2, 5], 1).swap(torch.zeros(1), "a swap")
    late.close()


def test_the_first_call_that_fails_ends_the_waiting() -> None:
    """What is in progress goes on; no thread begins another call."""
    begun, go_on = [], threading.Event()

    def call(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise LinkError("region 3 has gone.")
        go_on.wait(20.0)

    with pytest.raises(LinkError, match="has gone"):
        threads.side_by_side([partial(call, number) for number in range(6)], 2)
    go_on.set()
    time.sleep(0.3)
    assert sorted(begun) == [0, 1]


def test_a_region_that_says_nothing_while_regions_meet_is_named() -> None:
    """Later the coordinator judges, from heartbeats that count bytes."""
    view = connected((2, 5))[2].view((2, 5), FIRST)
    view._timeout_s = 0.2
    awaited = view.receive(1, torch.zeros(8, dtype=torch.uint8), TAG, 0, "news")
    with pytest.raises(RegionLostError, match="region 5 went silent in the middle of news"):
        view.wait([awaited], "news")


def test_bytes_that_flow_are_progress() -> None:
    """What the heartbeats say of a transfer in which nothing moves."""
    wires = connected((2, 5))
    waits = wires[2].waits
    waits.begin(5, "news", is_late=False)
    wires[2].look()
    before = waits.moved_at
    wires[2].look()
    assert waits.moved_at == before
    wires[5]._pairs[2].connection(None).send(Operation(1, 900, torch.zeros(10, dtype=torch.uint8)))

    def has_moved() -> bool:
        wires[2].look()
        return waits.moved_at > before

    wait_until(has_moved)


def test_a_thread_that_was_left_alone_hides_nothing_from_its_successor() -> None:
    """It may be about to wait, or have waited to the end, when its attempt becomes void."""
    wires = connected((2, 5))
    old, new = (wires[2].view((2, 5), order) for order in (1, 2))
    old.revoke()
    awaited = new.receive(1, row(), TAG, 0, "news")
    waiting = threading.Thread(target=lambda: new.wait([awaited], "news"))
    waiting.start()
    wait_until(lambda: wires[2].waits.region == 5)
    old.revoke()
    with pytest.raises(Revoked):
        old.wait([], "news")
    assert wires[2].waits.region == 5
    view = wires[5].view((2, 5), 2)
    view.wait([view.send(0, row(), TAG, 0, "news")], "news")
    waiting.join(PATIENCE_S)


def test_a_wire_waits_for_a_region_that_lives() -> None:
    """It may itself wait for a region that hangs, and so send nothing for longer than the time-out."""
    wires = connected((2, 5))
    wires[2].timeout_s = 0.001
    views, news = [wires[region].view((2, 5), 1) for region in (2, 5)], row()
    awaited = views[0].receive(1, news, TAG, 0, "news")

    def send() -> None:
        time.sleep(0.1)
        views[1].wait([views[1].send(0, row() + 3, TAG, 0, "news")], "news")

    at_once(lambda: views[0].wait([awaited], "news"), send)
    assert news.tolist() == [3] * 4


def test_a_region_that_comes_back_is_connected_again() -> None:
    """A dropped pair is unknown until both ends connect under another key; then all is as before."""
    wires = connected(IDS)
    wires[5].drop(9)
    wires[9].drop(5)
    wires[9].drop(5)
    with pytest.raises(LinkError, match="region 5 has no connection to region 9"):
        wires[5].view(IDS, 1)
    connect(wires[5], wires[9], "again")
    assert met([wires[region].view(IDS, 1) for region in IDS]) == [[2.0, 5.0, 9.0]] * 3


def test_a_revoked_view_is_of_no_use_to_a_thread_that_wakes_up_late() -> None:
    """A thread that waits wakes up at once. Nothing is done with what comes late, and nobody is told that it has arrived."""
    wires = connected(IDS[:2])
    views = [wires[region].view(IDS[:2], 1) for region in IDS[:2]]
    waits, late = wires[2].waits, []
    pending = views[0].receive(1, row(), TAG, 0, "news")

    def wait() -> None:
        with pytest.raises(Revoked):
            views[0].wait([pending], "news", may_be_late=True)
        late.append("revoked")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    wait_until(lambda: waits.region == 5)
    views[0].revoke()
    moved_at = waits.moved_at
    thread.join()
    for call in (
        views[0].tag,
        lambda: views[0].send(1, row(), 0, 0, ""),
        lambda: views[0].receive(1, row(), 0, 0, ""),
        lambda: views[0].wait([pending], ""),
        lambda: views[0].begin_swap(row(), ""),
    ):
        with pytest.raises(Revoked):
            call()
    views[1].wait([views[1].send(0, row(), TAG, 0, "news")], "news")
    assert late == ["revoked"] and waits.moved_at == moved_at
    assert met([wires[region].view(IDS[:2], 2) for region in IDS[:2]]) == [[2.0, 5.0]] * 2


def test_nothing_is_left_of_dropped_pairs() -> None:
    """Whatever is under way: sockets are closed, memory is freed, and threads that wait at one of the ends wake up."""
    one, other = IDS[:2]
    gc.collect()  # connections of earlier tests
    wires = {region: Wire(region, 2, timeout_s=20.0) for region in (one, other)}
    before, memories, threads = num_sockets(), [], []
    for turn in range(5):
        connect(wires[one], wires[other], str(turn))
        views = [wires[region].view((one, other), 1) for region in (one, other)]
        vain = [_begin(view, memories) for view in views]
        threads.append(threading.Thread(target=_wait_in_vain, args=(views[turn % 2], vain[turn % 2])))
        threads[-1].start()
        for view in views:
            view.revoke()
        for view, own in zip(views, wires.values(), strict=True):
            own.drop(view.regions[1 - view.region])
    del views, view, vain, own
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for each in wires.values():
        each.close()
    wait_until(lambda: num_sockets() <= before)
    gc.collect()
    # what a thread still held at the first collection may be part of a cycle now
    wait_until(lambda: gc.collect() >= 0 and not any(memory() is not None for memory in memories))


def _begin(view: View, memories: list[weakref.ref]) -> UnderWay:
    """Some operations that end, some that take their time, and some that do not; returns one that does not."""
    calls = {10 + view.region: view.receive, 20: view.send, 21: view.receive, 30 + view.region: view.send}
    begun = {}
    for tag, call in calls.items():
        for size in (100, 8_000_000):
            memory = torch.zeros(size, dtype=torch.uint8)
            memories.append(weakref.ref(memory))
            begun[tag] = call(1 - view.region, memory, 20 if tag == 21 else tag, 0, "something")
    return begun[10 + view.region]


def _wait_in_vain(view: View, pending: UnderWay) -> None:
    with pytest.raises(Revoked):
        view.wait([pending], "something", may_be_late=True)


def test_a_revoked_view_does_not_wait_for_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All views share the limit; a message that would have to wait for hours is given up with its view."""
    monkeypatch.setattr(Connection, "pace", lambda *args: False)
    wires = connected(IDS[:2], rate_limit=0.001)
    first, second = (wires[2].view(IDS[:2], order) for order in (1, 2))
    first.send(1, row(), 0, 0, "the first one")
    failed = []

    def send() -> None:
        try:
            second.send(1, row(), 0, 0, "the second one")
        except Revoked as error:
            failed.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    second.revoke()
    thread.join()
    assert failed


@pytest.mark.parametrize(("asked", "expected"), [((2, 3), 4), ((16, 16), 16), ((40, 1), 4)])
def test_each_pair_agrees_on_its_connections(
    asked: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the end that asks for more; fewer with so many regions that there would be too many sockets. Messages are
    cut for the most that a pair can have, so that all regions cut them alike."""
    wants = iter(asked)
    monkeypatch.setattr(wire, "connections_for", lambda rtt_s, rate: next(wants))
    if max(asked) > pairs.MAX_CONNECTIONS:
        monkeypatch.setattr(wire, "MAX_SOCKETS", 7)
    wires = connected(IDS[:2], connections=None)
    for one, other in (IDS[:2], IDS[1::-1]):
        view = wires[one].view((one, other), 1)
        assert len(wires[one]._pairs[other].bulk) == expected
        assert view.connections == pairs.MAX_CONNECTIONS


@pytest.mark.parametrize("told", [math.nan, math.inf, 1e9, 0.0, -1.0, 2.5, 65.0])
def test_a_number_of_connections_that_no_region_asks_for(
    told: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end takes no memory for it, and names the region."""
    wires = {region: Wire(region, timeout_s=20.0) for region in IDS[:2]}
    swap = View.swap

    def lying(view: View, own: torch.Tensor, what: str) -> list[torch.Tensor]:
        lies = what == "the number of connections" and view.regions[view.region] == IDS[0]
        return swap(view, torch.full_like(own, told) if lies else own, what)

    monkeypatch.setattr(View, "swap", lying)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(wires[one].meet, other, wires[other].whereabouts, "pair")
            for one, other in (IDS[:2], IDS[1::-1])
        ]
        errors = [each.exception() for each in calls]
    # who finds it first closes the connection
    assert all(isinstance(each, RegionLostError) for each in errors)
    assert any(f"region 2 asks for {told:g} connections" in str(each) for each in errors)
    assert wires[5].regions == []


def test_a_region_that_has_not_heard_of_the_others_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens: so it is no region that nobody reaches."""
    monkeypatch.setattr(reaching, "REACH_S", 0.3)
    one, other = (Wire(region, 1, timeout_s=20.0) for region in (2, 5))
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(one.meet, 5, other.whereabouts, "2-5")
        time.sleep(1.0)
        monkeypatch.undo()
        other.add(other.meet(2, one.whereabouts, "2-5"))
        one.add(early.result())
    assert met([wire.view([2, 5], 1) for wire in (one, other)]) == [[2.0, 5.0]] * 2
    for each in (one, other):
        each.close()


def test_a_region_that_does_not_come_is_named() -> None:
    """The wire stays as it was."""
    alone, other = Wire(2, timeout_s=0.5), Wire(7)
    expected = (
        f"region 7 do not reach each other: 127.0.0.1:{other.port} .what answers there is not that region"
    )
    with pytest.raises(LinkError, match=expected):
        alone.meet(7, other.whereabouts, "2-7")
    assert alone.regions == []
    for each in (alone, other):
        each.close()


def test_threads_end_with_their_connections() -> None:
    """Two for each connection, one for the port; they wait in the kernel, and no end of the interpreter waits for them."""
    before = set(threading.enumerate())
    wires = connected(IDS, connections=4)
    others = len(wires) - 1
    wait_until(lambda: len(_ours(before)) == len(wires) * (1 + others * 2 * (1 + 4 + 1)))
    wires[2].drop(5)
    for each in wires.values():
        each.close()
    wait_until(lambda: not _ours(before))


def num_sockets() -> int:
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread has closed it meanwhile
            found += "socket" in os.readlink(each)
    return found


def _ours(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        each for each in threading.enumerate() if each not in before and each.name.startswith("hf_cocodc")
    ]
