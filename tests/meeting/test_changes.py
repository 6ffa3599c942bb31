"""Members that agree on a loss: over real presence, at a real store in a process of its own."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.meeting.changes import Changes
from hf_cocodc.meeting.presence import Member, Presence
from hf_cocodc.meeting.store import SteadyStore, StoreAwayError, serve_store
from hf_cocodc.meeting.verdict import Decision, Report, to_plain
from tests.meeting.test_presence import PATIENCE_S, Circle, eventually
from tests.meeting.test_store import until_it_answers
from tests.processes.stores import StoreProcess

A, B, C, D = (Member(region, 10 + region) for region in range(4))


class Party:
    """One member: its part in the agreement, and what it has been told."""

    def __init__(self, presence: Presence, address: str, members: tuple[Member, ...], wait_s: float) -> None:
        self.me, self.presence, self.members = presence.me, presence, members
        self.done, self.has, self.freezes = 4, False, 0
        self.decisions: list[Decision] = []
        self.changes = Changes(
            SteadyStore(address, timeout_s=0.5),
            "run-7",
            self.me,
            presence,
            self.freeze,
            self.decided,
            patience_s=0.5,
            wait_s=wait_s,
        )
        presence.on_lost(lambda member, why: self.changes.begin({member: why}))
        eventually(lambda: self.changes._born)

    def freeze(self) -> Report:
        self.freezes += 1
        return Report(
            number=len(self.decisions),
            member=self.me,
            first=1 if self.members else 0,
            done=self.done,
            has=self.has,
            members=self.members,
        )

    def decided(self, decision: Decision) -> None:
        self.decisions.append(decision)
        if self.members:
            self.members = decision.members
        for member in decision.lost:
            self.presence.drop(member)


@contextlib.contextmanager
def parties(address: str, *members: Member, wait_s: float = 1e9) -> Iterator[dict[Member, Party]]:
    found = Circle(*members)
    everyone = {member: Party(each, address, members, wait_s) for member, each in found.all.items()}
    try:
        yield everyone
    finally:
        for party in everyone.values():
            party.changes.close()
        found.close()


def kill(party: Party) -> None:
    """As the kernel ends the connections of a process that dies."""
    party.changes.close()
    party.presence._orders.give(
        lambda: [peer.channel.socket.shutdown(2) for peer in party.presence._peers.values()]
    )


class Place:
    """A store in this process, which ends with the test or before."""

    def __init__(self) -> None:
        self._server: Any = serve_store()
        self.port = self._server.port
        self.address = f"127.0.0.1:{self.port}"
        PLACES.append(self)

    def end(self) -> None:
        self._server = None

    def begin_again(self) -> None:
        """Empty, at the same address."""
        self._server = serve_store(port=self.port)


PLACES: list[Place] = []


@pytest.fixture(autouse=True)
def _no_store_is_left() -> Iterator[None]:
    yield
    PLACES.clear()


def test_survivors_decide_once() -> None:
    """One member dies: all others take the same decision, also on a second loss; the last of all goes on alone."""
    with parties(Place().address, A, B, C, D) as everyone:
        everyone[A].done, everyone[B].has, everyone[C].has = 5, True, True
        kill(everyone[D])
        alive = [everyone[member] for member in (A, B, C)]
        eventually(lambda: all(party.decisions for party in alive))
        expected = Decision(number=0, members=(A, B, C), lost=(D,), done=5)
        assert [party.decisions for party in alive] == [[expected]] * 3
        kill(everyone[A])
        eventually(lambda: all(len(party.decisions) == 2 for party in alive[1:]))
        assert alive[1].decisions == alive[2].decisions
        assert alive[1].decisions[1].members == (B, C)
        kill(everyone[B])
        eventually(lambda: len(alive[2].decisions) == 3)
        assert alive[2].decisions[2] == Decision(number=2, members=(C,), lost=(B,), done=5)


def test_of_two_that_do_not_hear_each_other_one_goes_on() -> None:
    """Both report through the store; both take the same decision. The one that is out hears so there."""
    with parties(Place().address, A, B) as everyone:
        kill_line = everyone[A].presence
        kill_line._orders.give(
            lambda: [peer.channel.socket.shutdown(2) for peer in kill_line._peers.values()]
        )
        eventually(lambda: all(party.decisions for party in everyone.values()))
        assert everyone[A].decisions == everyone[B].decisions
        assert len(everyone[A].decisions[0].members) == 1


def test_the_larger_half_goes_on() -> None:
    """A member that hears nobody is out, though it has the lowest number and would be first to decide."""
    with parties(Place().address, A, B, C) as everyone:
        for party, lost in ((A, (B, C)), (B, (A,)), (C, (A,))):
            everyone[party].changes.begin(dict.fromkeys(lost, "silent"))
        eventually(lambda: all(party.decisions for party in everyone.values()))
        assert {party.decisions[0] for party in everyone.values()} == {
            Decision(number=0, members=(B, C), lost=(A,), done=4)
        }


def test_a_member_that_is_late_is_out_though_it_reports() -> None:
    """Of two, the one that misses the other goes on."""
    with parties(Place().address, A, B) as everyone:
        everyone[B].changes.begin({A: "it is late"})
        eventually(lambda: all(party.decisions for party in everyone.values()))
        assert everyone[A].decisions == everyone[B].decisions
        assert everyone[A].decisions[0].members == (B,)


def test_whoever_slept_through_decisions_learns_them_in_order() -> None:
    """A newcomer that knows fewer decisions than there were, and a member that says what is long decided."""
    place = Place()
    with parties(place.address, A, B, C) as everyone:
        kill(everyone[C])
        eventually(lambda: everyone[A].decisions and everyone[B].decisions)
        with parties(place.address, D) as apart:
            new = apart[D]
            new.members = ()
            for party in (everyone[A], everyone[B]):
                party.presence.accept = lambda hello: None
            addresses = {party.me: party.presence.address for party in (everyone[A], everyone[B])}
            new.presence.connect(addresses, time.monotonic() + PATIENCE_S)
            kill(everyone[A])
            eventually(lambda: len(new.decisions) == len(everyone[B].decisions) == 2)
            assert new.decisions == everyone[B].decisions
            assert new.decisions[1].members == (B,), "who follows is no member"
        with parties(place.address, D) as apart:
            apart[D].changes.expect(2)
            eventually(lambda: apart[D].decisions == everyone[B].decisions)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "dead"])
def test_a_loss_waits_for_a_store_that_is_away(
    frozen: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody decides without it, and nothing hangs; the log says what is waited for. Then all agree."""
    place = Place()
    with contextlib.ExitStack() as kept:
        process = kept.enter_context(StoreProcess(tmp_path)) if frozen else None
        address = place.address if process is None else process.address
        everyone = kept.enter_context(parties(address, A, B, C))
        place.end() if process is None else process.freeze()
        kill(everyone[C])
        alive = [everyone[A], everyone[B]]
        eventually(lambda: all(party.changes.is_settling for party in alive))
        eventually(lambda: "Who is lost is decided there: this waits until it is back" in caplog.text)
        assert not any(party.decisions for party in alive)
        place.begin_again() if process is None else process.thaw()
        eventually(lambda: all(party.decisions for party in alive))
        assert alive[0].decisions == alive[1].decisions
        assert alive[0].decisions[0].members == (A, B)


def test_a_loss_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """Without a store nobody may go on alone: after wait_s a member falls out, and says why. It takes nobody with it."""
    place = Place()
    with parties(place.address, A, B, C, wait_s=1.0) as everyone:
        everyone[B].changes._wait_s = 1e9
        place.end()
        kill(everyone[C])
        assert eventually(lambda: everyone[A].decisions)[0].lost == (A,)
        assert "A loss has waited for the store for 1 s (regions.wait_s)" in caplog.text
        assert not everyone[B].decisions


def test_too_few_at_a_store_that_came_back_empty_do_not_wait_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store and one of two regions are lost at once: the other cannot know who went on. It falls out, and says why."""
    place = Place()
    with parties(place.address, A, B, wait_s=1.0) as everyone:
        until_it_answers(everyone[A].changes.refill)
        place.end()
        place.begin_again()
        kill(everyone[B])
        assert eventually(lambda: everyone[A].decisions)[0].lost == (A,)
        assert "A loss has waited for more reports for 1 s (regions.wait_s)" in caplog.text


def test_a_store_that_came_back_empty_serves_no_minority(caplog: pytest.LogCaptureFixture) -> None:
    """Who missed a decision cannot make another one at a new store. Members fill it; then it counts as before."""
    place = Place()
    with parties(place.address, A, B, C) as everyone:
        kill(everyone[C])
        eventually(lambda: everyone[A].decisions and everyone[B].decisions)
        place.end()
        store = SteadyStore(place.address, timeout_s=0.5)
        with pytest.raises(StoreAwayError):
            everyone[A].changes.refill()
        place.begin_again()
        until_it_answers(everyone[A].changes.refill)
        text = store.peek("run-7/change/0")
        assert b'"members": [[0, 10], [1, 11]]' in text
        store.set("run-7/change/0", text.decode().replace("[[0, 10], [1, 11]]", "[[2, 12]]"))
        until_it_answers(everyone[B].changes.refill)
        assert B in eventually(lambda: everyone[B].decisions[1:])[0].lost


def test_a_decision_that_was_deleted_is_put_back() -> None:
    """So nobody else makes another one in its place. Whoever finds another one there falls out: it counts for the others."""
    place = Place()
    with parties(place.address, A, B, C) as everyone:
        kill(everyone[C])
        eventually(lambda: everyone[A].decisions and everyone[B].decisions)
        store = SteadyStore(place.address)
        text = store.peek("run-7/change/0").decode()
        store.delete_key("run-7/change/0")
        everyone[A].changes.refill()
        assert store.peek("run-7/change/0").decode() == text
        store.set("run-7/change/0", text.replace("[[0, 10], [1, 11]]", "[[2, 12]]"))
        everyone[A].changes.refill()
        assert eventually(lambda: everyone[A].decisions[1:])[0].lost == (A,)
        everyone[A].changes.refill()
        assert everyone[A].changes._inbox.empty(), "it has fallen out already"


def test_decisions_that_nobody_has_made_are_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """A member that says it knows 2**50 of them: the next loss is decided all the same."""
    with parties(Place().address, A, B, C) as everyone:
        said = {**to_plain(everyone[B].freeze()), "number": 2**50}
        everyone[B].presence.tell(A, "report", report=said)
        eventually(lambda: everyone[A].changes._ahead == 2**50)
        kill(everyone[C])
        eventually(lambda: everyone[A].decisions and everyone[B].decisions)
        assert everyone[A].decisions == everyone[B].decisions
        assert "region 0 hears of decision 0 on a loss, and nobody has made it" in caplog.text


def test_a_report_that_is_long_decided_costs_no_time() -> None:
    """However many decisions there were: a newcomer believes the number that the store says."""
    with parties(Place().address, A, B) as everyone:
        changes = everyone[A].changes
        changes.number = changes._ahead = 2**40
        everyone[B].presence.tell(A, "report", report=to_plain(everyone[B].freeze()))
        changes.begin({B: "late"})
        eventually(lambda: changes.is_settling)


def test_nonsense_changes_nothing() -> None:
    """Reports and decisions that are none, and reports in the name of another. Also such at the store."""
    place = Place()
    store = SteadyStore(place.address)
    decision = {"number": 3, "members": [[0, 10]], "lost": [], "done": 5}
    store.set("run-7/change/0", json.dumps(decision))
    store.set("run-7/change/0/11", "[1, 2")
    with parties(place.address, A, B) as everyone:
        tell = everyone[B].presence.tell
        for said in ({}, {"report": 3}, {"report": {"number": 0}}):
            tell(A, "report", **said)
            tell(A, "decision", **said)
        other = {**to_plain(everyone[A].freeze()), "lost": [list(B)]}
        tell(A, "report", report=other)
        everyone[A].changes.begin({B: "late"})
        eventually(lambda: everyone[A].decisions and everyone[B].decisions)
        assert everyone[A].decisions[0].members == (A,)
        store.set("run-7/change/0", "\udc80".encode("utf-8", "surrogateescape"))  # type: ignore[arg-type]
        everyone[A].changes._born = b"another store"
        everyone[A].changes.refill()
        assert len(everyone[A].decisions) == 1
        assert b'"members": [[0, 10]]' in store.peek("run-7/change/0"), (
            "what all know replaces what nobody wrote"
        )


def test_threads_end() -> None:
    """Closed members leave no thread behind, whatever they were waiting for."""
    before = threading.active_count()
    with parties(Place().address, A, B):
        pass
    eventually(lambda: threading.active_count() <= before)
