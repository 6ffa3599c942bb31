"""Regions of two lanes, whose ranks have one voice at the coordinator: the real rules of both, in every order of messages.

One region of three is killed at some moment. Its end is seen at different moments in each lane, and by the coordinator.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest

from hf_cocodc.coordinator import rules as coordinating
from hf_cocodc.coordinator.messages import Beat, Hello, Terms, Welcome
from hf_cocodc.coordinator.rules import Came, Ended, Run, SendTo, Tick
from hf_cocodc.link import rules, voice
from hf_cocodc.link.rules import Begin, Complete, Connected, Fail, Held, Made, Missed, Send, enter
from hf_cocodc.link.voice import AllHold, Holds, ToCoordinator, ToRank, Voice
from hf_cocodc.net.letters import Member

REGIONS, LANES, CALLS, IN_FLIGHT = 3, 2, 6, 2
SEEDS = 120
_MOST = 20_000


class Violated(AssertionError):
    """Something does not hold."""


class Rank:
    """One rank's link: an attempt is data from every party, then a "have" from every party."""

    def __init__(self, world: World, region: int, lane: int, welcome: Welcome) -> None:
        self.world, self.region, self.lane = world, region, lane
        self.part = enter(welcome, world.terms)
        self.came: dict[tuple[int, int, str], set[Member]] = defaultdict(set)
        self.closed: set[Member] = set()
        self.holds: set[tuple[int, int]] = set()
        self.completed: dict[int, tuple[Member, ...]] = {}
        self.feed(*map(Connected, self.part.meeting))
        for _ in range(IN_FLIGHT):
            self.feed(Made("a mean"))

    def feed(self, *events: rules.Event) -> None:
        for event in events:
            self.part, effects = rules.step(self.part, event)
            for effect in effects:
                self._do(effect)
        self.go_on()

    def _do(self, effect: rules.Effect) -> None:
        match effect:
            case Begin(number, losses, parties):
                self._tell(parties, number, losses, "data")
            case Send(message):
                self.world.send(("rank", self.region, self.lane), message)
            case Complete(call):
                self.world.check_complete(self, call)
                self.completed[call.number] = call.parties
                if self.part.submitted < CALLS:
                    self.feed(Made("a mean"))
            case Fail(why=why):
                raise Violated(f"region {self.region} fails: {why}")

    def _tell(self, parties: tuple[Member, ...], *item: Any) -> None:
        for other in parties:
            if other != self.part.me:
                self.world.send(("pair", self.region, self.lane, other.region), (self.part.me, *item))

    def go_on(self) -> None:
        """Go on with the attempt in hand, as far as what has come allows."""
        call = self.part.in_hand
        if call is None:
            return
        number, losses, parties = call.number, call.losses, call.parties
        kind = "have" if call.has else "data"
        missing = {*parties} - {self.part.me} - self.came[number, losses, kind]
        gone = sorted(missing & self.closed)
        if gone:
            self.feed(Missed(number, losses, gone[0], "its connection has ended"))
        elif not missing and not call.has:
            self.holds.add((number, losses))
            self._tell(parties, number, losses, "have")
            self.feed(Held(number, losses))
        elif not missing and (number, losses, "said") not in self.came:
            self.came[number, losses, "said"] = set()
            self.world.send(("rank", self.region, self.lane), Holds(number=number, losses=losses))

    def hear(self, message: Any) -> None:
        if isinstance(message, AllHold):
            self.feed(rules.AllHeld(message.number, message.losses))
        else:
            self.feed(rules.HeardFrom(message))

    def hear_pair(self, item: Any) -> None:
        match item:
            case (Member() as sender, "closed"):
                self.closed.add(sender)
            case (Member() as sender, number, losses, kind):
                self.came[number, losses, kind].add(sender)
        self.go_on()


class World:
    """All ranks, their leaders' voices, a coordinator, and lines between them that keep their order."""

    def __init__(self, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self.terms = Terms(count=REGIONS, elastic=True, least=1, most=REGIONS)
        self.lines: dict[tuple[Any, ...], deque[Any]] = defaultdict(deque)
        self.run, self.dead = Run(name="run"), set[int]()
        self.welcomes: dict[int, Welcome] = {}
        self.ranks: dict[tuple[int, int], Rank] = {}
        self.voices = {region: Voice(num_ranks=LANES) for region in range(REGIONS)}
        for region in range(REGIONS):
            about = {"join": False, "host": "h", "machine": "", "token": f"{region:032x}", "compared": {}}
            self._coordinate(Came(region, Hello(region=region, terms=self.terms, **about)))  # type: ignore[arg-type]
        for region, welcome in self.welcomes.items():
            for lane in range(LANES):
                self.ranks[region, lane] = Rank(self, region, lane, welcome)

    def send(self, line: tuple[Any, ...], item: Any) -> None:
        if line[1] not in self.dead:
            self.lines[line].append(item)

    def live(self, dies_at: int) -> None:
        """Let all happen; region 2 is killed at its `dies_at`-th event. Raises Violated."""
        for count in range(_MOST):
            if count == dies_at:
                self._kill(2)
            if self._has_ended():
                self._check_end()
                return
            waiting = sorted(line for line, items in self.lines.items() if items)
            if waiting:
                line = self.random.choice(waiting)
                self._deliver(line, self.lines[line].popleft())
            else:
                self._pass_time()
        raise Violated(
            "hangs: " + "; ".join(f"{key}: {sorted(rank.completed)}" for key, rank in self._living())
        )

    def check_complete(self, rank: Rank, call: rules.Call) -> None:
        """All ranks of all parties that live hold the result of a call that completes."""
        for member in call.parties:
            for lane in range(LANES):
                other = self.ranks[member.region, lane]
                if member.region not in self.dead and (call.number, call.losses) not in other.holds:
                    raise Violated(
                        f"region {rank.region} completes call {call.number} before {member} holds it"
                    )

    def _living(self) -> list[tuple[tuple[int, int], Rank]]:
        return [(key, rank) for key, rank in self.ranks.items() if key[0] not in self.dead]

    def _has_ended(self) -> bool:
        return all(len(rank.completed) == CALLS for _, rank in self._living())

    def _check_end(self) -> None:
        """Each call has the same parties in all ranks of all regions."""
        for number in range(1, CALLS + 1):
            parties = {rank.completed[number] for _, rank in self._living()}
            if len(parties) > 1:
                raise Violated(f"call {number} has the parties {parties}")

    def _kill(self, region: int) -> None:
        """What it has sent may come, or not; then its ends."""
        for line, items in list(self.lines.items()):
            if line[1] == region:
                while items and self.random.random() < 0.3:
                    items.pop()
        me = self.welcomes[region].me
        for lane in range(LANES):
            for other in range(REGIONS):
                if other != region:
                    self.lines["pair", region, lane, other].append((me, "closed"))
        self.lines["up", region].append(None)
        self.dead.add(region)

    def _deliver(self, line: tuple[Any, ...], item: Any) -> None:
        match line:
            case ("pair", _, lane, other) if other not in self.dead:
                self.ranks[other, lane].hear_pair(item)
            case ("up", region):
                self._coordinate(Ended(region) if item is None else Came(region, item))
            case ("down", region) if region not in self.dead:
                self._speak(region, voice.heard(self.voices[region], item))
            case ("rank", region, lane) if region not in self.dead:
                self._speak(region, voice.said(self.voices[region], lane, item))
            case ("to rank", region, lane) if region not in self.dead:
                self.ranks[region, lane].hear(item)

    def _speak(self, region: int, said: tuple[Voice, tuple[voice.Effect, ...]]) -> None:
        self.voices[region], effects = said
        for effect in effects:
            match effect:
                case ToCoordinator(message):
                    self.send(("up", region), message)
                case ToRank(rank, message):
                    for lane in range(LANES) if rank is None else [rank]:
                        self.send(("to rank", region, lane), message)

    def _coordinate(self, event: coordinating.Event) -> None:
        self.run, effects = coordinating.step(self.run, event, self.now)
        for effect in effects:
            match effect:
                case SendTo(to, Welcome() as welcome):
                    self.welcomes[to] = welcome
                case SendTo(to, message):
                    self.lines["down", to].append(message)

    def _pass_time(self) -> None:
        self.now += 0.5
        for (region, lane), rank in self._living():
            if lane == voice.LEADER:
                self._coordinate(Came(region, rules.beat(rank.part, Beat())))
        self._coordinate(Tick())


def test_a_call_of_several_lanes_counts_in_all_or_in_none() -> None:
    """Whenever a region dies, and in whatever order the others hear of it."""
    for seed in range(SEEDS):
        try:
            World(seed).live(dies_at=random.Random(seed).randrange(250))
        except Violated as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def too_early(kind: Callable[..., Any]) -> Any:
    return lambda voice, rank, message: (
        voice,
        (ToRank(None, kind(number=message.number, losses=message.losses)),),
    )


def alone(given: Voice, rank: int, report: Any) -> Any:
    """A rank's report, as if it were its region's."""
    return given, (ToCoordinator(report),) if report.number == given.losses else ()


@pytest.mark.parametrize(
    ("name", "change"),
    [("_held", too_early(AllHold)), ("_reported", alone)],
    ids=lambda value: str(value)[:9],
)
def test_a_voice_that_speaks_for_one_rank_is_found_out(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a call completed, or a region reported, as soon as one of its ranks says so."""
    monkeypatch.setattr(voice, name, change)
    with pytest.raises(AssertionError, match="seed"):
        test_a_call_of_several_lanes_counts_in_all_or_in_none()
