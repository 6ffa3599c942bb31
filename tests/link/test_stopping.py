"""Regions, and the ranks of a region, agree through a coordinator on the step at which all stop."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from hf_cocodc.coordinator import rules
from hf_cocodc.coordinator.messages import AskStop, Hello, Promise, Stop, StopAt, Terms
from hf_cocodc.coordinator.rules import Came, Run, SendTo, Tick
from hf_cocodc.link import stopping
from hf_cocodc.link.stopping import StopAgreement
from tests.link.memory import wait_until
from tests.link.ranks import groups
from tests.listening import lanes

LAST = 10_000


class Coordinator:
    """The real rules in a thread, which speaks with the leader of each region as its client does.

    While it is not `open`, nothing travels either way: all messages come later. `deaf` regions hear and say nothing.

    Attributes:
        asked: the requests that have come in.
        answers: the steps in its answers, one for each region and question.
    """

    def __init__(self, count: int) -> None:
        self.open, self._ended = threading.Event(), threading.Event()
        self.open.set()
        self.deaf: set[int] = set()
        self.leaders: dict[int, StopAgreement] = {}
        self.asked: list[tuple[int, str]] = []
        self.answers: list[int] = []
        self._come: queue.SimpleQueue[Came] = queue.SimpleQueue()
        self._run = Run(name="run")
        for region in range(count):
            hello = Hello(
                region=region,
                join=False,
                lanes=lanes(),
                machine="m",
                token=str(region),
                terms=Terms(count=count),
                compared={},
            )
            self._do(Came(region, hello))
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def request(self, region: int, why: str) -> None:
        self.asked.append((region, why))
        self._come.put(Came(region, Stop(why=why)))

    def close(self) -> None:
        self._ended.set()
        self.open.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(0.002):
            for leader in list(self.leaders.values()):
                leader.poll()
            if self.open.is_set():
                while not self._come.empty():
                    came = self._come.get()
                    if came.who not in self.deaf:
                        self._do(came)
                self._do(Tick())

    def _do(self, event: Any) -> None:
        self._run, effects = rules.step(self._run, event, time.monotonic())
        for effect in effects:
            if isinstance(effect, SendTo) and effect.to not in self.deaf:
                self._hear(effect.to, effect.message)

    def _hear(self, region: int, message: Any) -> None:
        match message:
            case AskStop(number=number):
                self._come.put(Came(region, Promise(number=number, step=self.leaders[region].promise())))
            case StopAt(step=step, whys=whys):
                self.answers.append(step)
                self.leaders[region].answer(step, {int(each): why for each, why in whys.items()})


class Place:
    """Regions of so many ranks, and the agreement of each rank, made in its thread."""

    def __init__(self, *sizes: int) -> None:
        self.coordinator = Coordinator(len(sizes)) if len(sizes) > 1 else None
        ranks = [(region, rank) for region, size in enumerate(sizes) for rank in range(size)]
        made = {region: groups(size) if size > 1 else [lambda: None] for region, size in enumerate(sizes)}
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = {who: pool.submit(made[who[0]][who[1]]) for who in ranks}
        self.agreements = {who: self._agreement(who, group.result()) for who, group in found.items()}

    def _agreement(self, who: tuple[int, int], group: Any) -> StopAgreement:
        region, rank = who
        if rank or self.coordinator is None:
            return StopAgreement(group, None)
        coordinator = self.coordinator
        agreement = coordinator.leaders[region] = StopAgreement(
            group, lambda why: coordinator.request(region, why)
        )
        return agreement

    def train(self, live: Callable[[tuple[int, int], StopAgreement], Any]) -> list[Any]:
        """What each rank came to."""
        with ThreadPoolExecutor() as pool:
            runs: list[Future[Any]] = [pool.submit(live, *each) for each in self.agreements.items()]
            return [run.result(timeout=60) for run in runs]

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
        self.train(lambda who, agreement: agreement.close())


def train(agreement: StopAgreement, step_s: float, asks_at: int = 0, last: int = LAST, done: int = 0) -> int:
    """Steps until the agreement ends them; 0 if it does not."""
    if not done:
        agreement.start(0)
    for step in range(done + 1, last + 1):
        time.sleep(step_s)
        if step == asks_at:
            agreement.ask("SIGTERM")
        if not agreement.passes(step):
            return step
    return 0


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3), (3,), (2, 1)], ids=str)
def test_all_stop_at_one_step(sizes: tuple[int, ...]) -> None:
    """Whatever their speeds, and whichever ranks ask: at a step that is not far from the fastest one's."""
    moments, place = random.Random(sum(sizes)), Place(*sizes)
    asker = moments.choice(list(place.agreements))
    speeds = {who: moments.uniform(0.002, 0.01) for who in place.agreements}
    found = place.train(lambda who, each: train(each, speeds[who], 20 if who == asker else 0))
    [step] = set(found)
    assert 20 <= step < 400
    for (region, _), agreement in place.agreements.items():
        assert dict(agreement.reasons) == {asker[0]: "SIGTERM"}
        assert agreement.asked == ("SIGTERM" if region == asker[0] else "")
    place.close()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=str)
def test_the_first_decision_counts(sizes: tuple[int, ...]) -> None:
    """A scheduler signals all regions. The slower one hears it when the other has stopped already, and now promises a later step:
    the second decision changes nothing. Each request is made once."""
    place = Place(*sizes)
    coordinator = place.coordinator
    assert coordinator is not None
    stopped = threading.Event()

    def live(who: tuple[int, int], agreement: StopAgreement) -> int:
        if who[0] == 0:
            step = train(agreement, 0.002, 20 if who == (0, 0) else 0)
            stopped.set()
            return step
        agreement.start(0)
        assert stopped.wait(30)
        agreement.ask("SIGTERM later")
        wait_until(lambda: len(coordinator.answers) == 4)
        assert agreement.passes(1)
        return train(agreement, 0.001, done=1)

    [step] = set(place.train(live))
    assert step >= 20
    assert coordinator.asked == [(0, "SIGTERM"), (1, "SIGTERM later")]
    assert all(dict(each.reasons) == {0: "SIGTERM"} for each in place.agreements.values())
    place.close()


def test_a_region_that_does_not_answer_ends_the_attempt_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """They train on, and say it with the next transfer."""
    monkeypatch.setattr(rules, "PROMISE_S", 0.3)
    place = Place(1, 2, 1)
    assert place.coordinator is not None
    place.coordinator.deaf.add(2)
    found = place.train(lambda who, each: train(each, 0.01, 5 if who == (1, 1) else 0, 100))
    assert found == [0, 0, 0, 0]
    assert place.agreements[1, 0].asked == "SIGTERM", "the leader says it with the next transfer"
    assert place.coordinator.asked == [(1, "SIGTERM")]
    place.close()


def test_a_region_that_has_stopped_already_names_its_step() -> None:
    """It has heard of the request from a transfer, and no longer calls `passes`: the others come to its step."""
    place = Place(1, 1)
    first, second = place.agreements.values()
    first.start(99)  # stands at the end of step 100
    assert train(second, 0.002, asks_at=5) == 100
    place.close()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_a_request_before_anybody_has_begun_stops_the_first_step(sizes: tuple[int, ...]) -> None:
    """They load a checkpoint of step 50, and promise before they know that."""
    place = Place(*sizes)
    leader = place.agreements[0, 0]
    leader.ask("SIGTERM")
    assert place.coordinator is not None
    answers = place.coordinator.answers
    wait_until(lambda: len(answers) == 2)
    assert max(answers) <= 2

    def live(who: tuple[int, int], agreement: StopAgreement) -> int:
        agreement.forget(50)
        agreement.start(50)
        return train(agreement, 0.01, done=50, last=80)

    assert set(place.train(live)) == {51}
    place.close()


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)], ids=str)
def test_a_coordinator_that_hangs_keeps_nobody_waiting(sizes: tuple[int, ...]) -> None:
    """Nobody promises before it has asked. When it is back, all agree through it."""
    place = Place(*sizes)
    assert place.coordinator is not None
    place.coordinator.open.clear()
    found = place.train(lambda who, each: train(each, 0.005, 5 if who != (1, 0) else 0, 60))
    assert set(found) == {0}
    place.coordinator.open.set()
    [step] = set(place.train(lambda who, each: train(each, 0.005, done=60)))
    assert step > 60
    place.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_promise_to_a_coordinator_that_hangs_binds_for_a_limited_time(
    ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks of the region train on, past their promise. A decision to stop that comes later is ignored, and loud."""
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.5)
    place = Place(ranks, 1)
    leader, began = place.agreements[0, 0], time.monotonic()
    del place.agreements[1, 0]
    promised: list[int] = []

    def live(who: tuple[int, int], agreement: StopAgreement) -> int:
        agreement.start(7)
        if agreement is leader:
            promised.append(agreement.promise())
        return train(agreement, 0.01, last=20, done=7)

    assert place.train(live) == [0] * ranks
    assert time.monotonic() > began + 0.5
    assert promised == [7 + ranks]
    assert "travels with the next transfer" in caplog.text
    leader.answer(7 + ranks, {1: "SIGTERM"})
    assert "heard of it too late" in caplog.text
    leader.answer(0, {})
    assert place.train(lambda who, each: each.passes(21)) == [True] * ranks
    place.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_answer_to_an_earlier_promise_is_too_late(ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator was away, and asks anew: nobody stops at a step that this region has passed."""
    place = Place(ranks, 1)
    del place.agreements[1, 0]
    leader = place.agreements[0, 0]

    def live(who: tuple[int, int], agreement: StopAgreement) -> int:
        agreement.start(0)
        agreement.passes(1)
        if agreement is leader:
            agreement.promise()
            agreement.answer(0, {})
        agreement.passes(2)
        agreement.passes(3)
        if agreement is leader:
            agreement.promise()
            agreement.answer(3, {1: "SIGTERM"})
            agreement.answer(9, {1: "SIGTERM"})
        return train(agreement, 0.001, done=3, last=20)

    assert set(place.train(live)) == {9}
    assert "regions stop at step 3, but" in caplog.text
    place.close()


def test_a_request_reaches_the_leader_without_the_coordinator() -> None:
    """It must say it with the next transfer."""
    place = Place(1, 2)
    assert place.coordinator is not None
    place.coordinator.open.clear()
    del place.agreements[0, 0]
    found = place.train(lambda who, each: train(each, 0.001, 2 if who[1] else 0, 4))
    assert found == [0, 0]
    assert {each.asked for each in place.agreements.values()} == {"SIGTERM"}
    place.close()


def test_a_leader_that_waits_for_a_transfer_still_asks() -> None:
    """Its client passes the request on while training stands still; the others come to its step."""
    place = Place(1, 1)
    first, second = place.agreements.values()
    first.start(30)
    first.ask("SIGTERM")
    assert train(second, 0.002) == 31
    assert not first.passes(31)
    place.close()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (3,)], ids=str)
def test_all_stop_once_more(sizes: tuple[int, ...]) -> None:
    """After a stop all go on from an earlier step in the same processes, and can be stopped again."""
    place = Place(*sizes)
    asker = list(place.agreements)[-1]
    met = threading.Barrier(len(place.agreements))

    def live(who: tuple[int, int], agreement: StopAgreement) -> tuple[int, int]:
        first = train(agreement, 0.005, 20 if who == asker else 0)
        met.wait()  # all load a checkpoint
        agreement.forget(3)
        assert (agreement.asked, agreement.reasons) == ("", {})
        met.wait()
        return first, train(agreement, 0.005, 80 if who == asker else 0, done=3)

    [(first, second)] = set(place.train(live))
    assert first >= 20
    assert 80 <= second < LAST
    place.close()


def test_a_request_that_was_not_decided_is_forgotten() -> None:
    """It was made before all loaded a checkpoint."""
    place = Place(2)

    def live(who: tuple[int, int], agreement: StopAgreement) -> int:
        agreement.start(0)
        agreement.ask("SIGTERM")
        agreement.forget(0)
        assert agreement.asked == ""
        agreement.passes(1)
        return train(agreement, 0.001, last=20, done=1)

    assert place.train(live) == [0, 0]
    place.close()


def test_a_region_that_has_come_to_its_last_step_keeps_nobody_waiting() -> None:
    """One rank was asked to stop at the end of the last step but one; nobody calls `passes` at the last."""
    place = Place(3)
    assert place.train(lambda who, each: train(each, 0.001, 9 if who[1] == 1 else 0, 9)) == [0, 0, 0]
    place.close()


def test_ranks_that_stop_alone_are_heard_by_their_region() -> None:
    """Where regions do not agree on a step, as in elastic runs: one rank is asked to stop, and another is done."""
    place = Place(3)
    for agreement in place.agreements.values():
        agreement.decides = False

    def live(who: tuple[int, int], agreement: StopAgreement) -> tuple[str, bool]:
        agreement.start(0)
        for step in range(1, 5):
            if step == 2 and who[1] == 1:
                agreement.ask("SIGTERM")
            if step == 2 and who[1] == 2:
                agreement.is_done = True
            assert agreement.passes(step)
        return agreement.asked, agreement.is_done

    assert place.train(live) == [("SIGTERM", True)] * 3
    place.close()


def test_a_request_is_made_again_once_the_coordinator_is_back() -> None:
    """It may have been away when it was made."""
    asked: list[str] = []
    agreement = StopAgreement(None, asked.append)
    agreement.ask("SIGTERM")
    for _ in range(2):
        agreement.poll()
    assert asked == ["SIGTERM"]
    agreement.ask_again()
    agreement.poll()
    assert asked == ["SIGTERM"] * 2
    agreement.promise()
    agreement.answer(5, {0: "SIGTERM"})
    agreement.ask_again()
    agreement.poll()
    assert asked == ["SIGTERM"] * 2, "it is answered"
