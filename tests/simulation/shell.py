"""What `link/tcp.py` and the client do around the rules of a link, in virtual time."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from hf_cocodc import errors
from hf_cocodc.coordinator.messages import (
    AskStop,
    Beat,
    Bye,
    Decided,
    Leave,
    Over,
    Posted,
    Promise,
    Refuse,
    Resumed,
    Stop,
    StopAt,
    Terms,
    Waiting,
    Welcome,
)
from hf_cocodc.link import rules
from hf_cocodc.link.part import Call, Part, Standing, back, beat, enter
from hf_cocodc.link.rules import Begin
from hf_cocodc.link.voice import AllHold, Holds, ToCoordinator, ToRank, Voice, beat_of_all_ranks, heard, said
from hf_cocodc.net.members import Member

from .network import RESET, Actor, Connection

if TYPE_CHECKING:
    from .world import World

BEAT_S, KEEP_S, SILENT_S = 1.5, 3.0, 6.0
"""Seconds between two heartbeats that differ; between two that do not; until a client drops a silent coordinator."""
PROMISE_S, WAIT_S = 20.0, 40.0
"""Seconds for which a stop waits for its answer, and a loss for a coordinator that decides (`regions.wait_s`)."""
_FIRST_WAIT_S, _LONGEST_WAIT_S, _AGAIN_S, _LOOK_S = 0.2, 2.0, 1.0, 0.5


class LeftBehind(Exception):
    """The others have gone on without this process."""


class Undecided(Exception):
    """No coordinator has decided in time: this process saves a checkpoint and ends."""


class Lost(Exception):
    """The run is over."""


class Result(NamedTuple):
    """What a call gave. `knows`, `changes`: see `rules.Landed`; `changes` is -1 for one from a log."""

    digest: int
    knows: int
    changes: int
    members: tuple[Member, ...]


@dataclass
class Hand:
    """The attempt in hand, and what has come of it."""

    begin: Begin
    moved_at: float
    has_begun: bool = False
    is_held: bool = False
    is_said: bool = False
    is_looking: bool = False
    trailers: dict[Member, int] = field(default_factory=dict)
    haves: set[Member] = field(default_factory=set)
    awaits: Member | None = None
    awaits_since: float = 0.0


class Shell(Actor):
    """A process with a link. `Process` has the training loop.

    Attributes:
        connection: to the coordinator; None while there is none.
        pairs: connections to others, for transfers.
        sinks: connections of newcomers that take this member's log, each from a call on.
        failure: why no call will complete.
        lane: this process's place among the `ranks` of its region, whose first one has the connection to the coordinator.
        lines: to the other ranks, by their lanes; of a rank that is not the leader, to the leader alone.
        voice: on the leader of several ranks, what it knows of them.
    """

    me: Member
    part: Part
    terms: Terms
    step: int

    def __init__(self, world: "World", region: int, ranks: "list[Any]") -> None:
        super().__init__(world.network, region)
        self.world, self.region, self.terms = world, region, world.terms
        self.lane, self.ranks = len(ranks), ranks
        ranks.append(self)
        self.how: str | None = None
        self.asks_to_leave = self.asks_to_stop = False
        self._beats = 0

    def forget(self) -> None:
        """Be unknown to coordinator and others, as at the start."""
        self.connection: Connection | None = None
        self.welcome: Welcome | None = None
        self.refused: Refuse | None = None
        self.told: Waiting | None = None
        self.lines: dict[int, Connection] = {}
        self.voice: Voice | None = None
        self._rank_beats: dict[int, Beat] = {}
        self.has_started = False
        self.failure: Exception | None = None
        self.pairs: dict[Member, Connection] = {}
        self._broken_at: dict[Member, float] = {}
        self._closed: set[Member] = set()
        self.hand: Hand | None = None
        self._early: dict[tuple[int, int], list[tuple[Member, str, int]]] = {}
        self._before_start: list[Any] = []
        self._found: dict[int, Result] = {}
        self._knows: dict[int, int] = {}
        self.results: dict[int, Result] = {}
        self.sinks: dict[Connection, int] = {}
        self.wants: list[Member] = []
        self.has_moved = self.leaves = self.over = self.coasts = False
        self._promised: int | None = None
        self._promised_until, self.stop_at, self.passed, self._has_requested = 0.0, 0, 0, False
        self._wait_s, self._frozen_at, self._answered_at = _FIRST_WAIT_S, self.time, self.time
        self._last_beat, self._beat_at, self._heard_at = Beat(), -KEEP_S, 0.0
        self._beats += 1

    def poke(self) -> None:
        """Let the training loop look whether it may go on."""
        raise NotImplementedError

    # ---- the link: `TcpLink._feed` and what it calls ------------------------------------------------------------------

    def enter(self, welcome: Welcome) -> None:
        """Be a process of the run."""
        self.me, self.has_started = welcome.me, True
        self.part = enter(welcome, self.terms)
        if self.lane == 0 and len(self.ranks) > 1:
            self.voice = Voice(num_ranks=len(self.ranks), losses=welcome.losses)
            for rank in self.ranks[1:]:
                self.lines[rank.lane] = rank.lines[0] = Connection("rank", self, rank)
                rank.later(0.0, rank.poke)
        for other in sorted(self.part.meeting):
            self.world.connect_soon(self, other)
        self._heard_at = self.time
        self._beat(self._beats)
        before, self._before_start = self._before_start, []
        for message in before:
            self._hear_coordinator(message)

    def feed(self, event: rules.Event) -> tuple[int, ...]:
        """Let something happen, and do what the rules say. Returns the tickets of processes that have come in."""
        admitted: tuple[int, ...] = ()
        before = self.part
        if isinstance(event, rules.Made):
            self._knows[before.submitted + 1] = before.knows if before.standing is Standing.MEMBER else 0
        self.part, effects = rules.step(before, event)
        self.world.checks.stepped(self, before, event)
        for effect in effects:
            match effect:
                case rules.Begin():
                    self.hand = hand = Hand(effect, self.time, awaits_since=self.time)
                    self.later(0.05 * self.network.random.random(), partial(self._attempt, hand))
                case rules.Complete(call):
                    self._complete(call)
                case rules.Abandon():
                    self.hand = None
                case rules.Again(call):
                    self._found.pop(call.number, None)
                case rules.Tell(message):
                    self.send(message)
                case rules.HangUp():
                    self._disconnect()
                case rules.Connect(member, again):
                    self.later(_AGAIN_S if again else 0.0, partial(self._connect, self.me, member))
                case rules.Disconnect(member):
                    self._disconnect_pair(member)
                case rules.Switched(joined, left):
                    self.world.checks.switched(self, joined, left)
                    admitted = tuple(member.ticket for member in joined)
                case rules.Fail(error, why):
                    undecided = dict.fromkeys((errors.LinkError, errors.RegionLostError), Undecided)
                    kinds = {errors.LeftBehind: LeftBehind, **undecided}
                    self.fail(kinds.get(error, Lost)(why))
        if self.part.losses != before.losses and self.part.standing is Standing.MEMBER:
            self.has_moved = True
        self.poke()
        return admitted

    def fail(self, error: Exception) -> None:
        """End all calls, also later ones."""
        self.failure = self.failure or error
        self.feed(rules.Failed())

    def _complete(self, call: Call) -> None:
        self.hand = None
        result = self.results[call.number] = self._found.pop(call.number)
        self.world.checks.completed(self, call, result)
        for rank in self.ranks:
            if rank is not self:
                rank.later(0.0, rank.poke)
        for log, first in self.sinks.items():
            if call.number >= first:
                log.send(self, ("entry", call.number, result))

    def _attempt(self, hand: Hand) -> None:
        """Begin the attempt in hand: send what the others need."""
        if self.hand is not hand:
            return
        begin, hand.has_begun, hand.moved_at = hand.begin, True, self.time
        hand.trailers[self.me] = self._knows[begin.number]
        hand.haves.add(self.me)
        for other in begin.parties:
            if self.part.is_paired(other) and other in self.pairs:
                news = ("data", begin.number, begin.losses, self._knows[begin.number])
                self.pairs[other].send(self, news)
        for sender, kind, knows in self._early.pop((begin.number, begin.losses), ()):
            self._take(hand, sender, kind, knows)
        self._go_on(hand)

    def _take(self, hand: Hand, sender: Member, kind: str, knows: int) -> None:
        hand.moved_at = self.time
        if kind == "data":
            hand.trailers[sender] = knows
        else:
            hand.haves.add(sender)

    def _go_on(self, hand: Hand) -> None:
        """Go on with an attempt, as far as what has come allows."""
        begin = hand.begin
        if self.hand is not hand or not hand.has_begun:
            return
        missing = self._missing(hand)
        if missing and missing[0] != hand.awaits:
            hand.awaits, hand.awaits_since = missing[0], self.time
        for other in missing:
            if other not in self.pairs:
                broken_at = self._broken_at.setdefault(other, self.time)
                is_refused = self.world.refuses(self, other)
                is_closed = other in self._closed
                why = rules.why_lost(self.part, other, broken_at, is_refused, is_closed, self.time)
                if why is not None:
                    self.world.misses(self, other, why)
                    self.feed(rules.Missed(begin.number, begin.losses, other, why))
                    return
                if not hand.is_looking:
                    hand.is_looking = True
                    self.later(_LOOK_S, partial(self._look, hand))
        if not missing and not hand.is_held:
            hand.is_held = True
            self.later(0.1 * self.network.random.random(), lambda: self._hold(hand))
        elif not missing and len(self.ranks) > 1:
            if self.part.calls[0].has and not hand.is_said:
                hand.is_said = True
                self.send(Holds(number=begin.number, losses=begin.losses))
        elif not missing:
            self.feed(rules.AllHeld(begin.number, begin.losses))

    def _look(self, hand: Hand) -> None:
        hand.is_looking = False
        self._go_on(hand)

    def _missing(self, hand: Hand) -> list[Member]:
        """The parties from which something has yet to come, in order."""
        came = hand.haves if hand.is_held else hand.trailers
        return [each for each in hand.begin.parties if each not in came]

    def _hold(self, hand: Hand) -> None:
        """This process holds the result of the attempt."""
        if self.hand is not hand:
            return
        begin = hand.begin
        knows, digest = min(hand.trailers.values()), hash((begin.number, begin.parties))
        self._found[begin.number] = Result(digest, knows, self.part.calls[0].changes, begin.parties)
        self.feed(rules.Held(begin.number, begin.losses))
        if self.hand is hand:
            for other in begin.parties:
                if other in self.pairs:
                    self.pairs[other].send(self, ("have", begin.number, begin.losses, 0))
            self._go_on(hand)

    def _disconnect_pair(self, member: Member) -> None:
        """Close the connection to another process."""
        pair = self.pairs.pop(member, None)
        if pair is not None:
            pair.close(self)
        if self.hand is not None:
            self._go_on(self.hand)

    def hear(self, connection: Connection, item: Any) -> None:
        match connection.kind:
            case "coordinator" if connection is self.connection:
                if item in (None, RESET):
                    self._disconnect()
                elif self.voice is None or not self.has_started:
                    self._hear_coordinator(item)
                else:
                    self.voice, effects = heard(self.voice, item)
                    self._speak(effects)
                self.poke()
            case "rank":
                self._hear_rank(connection, item)
                self.poke()
            case "pair":
                self._hear_pair(connection, item)
            case "log":
                self.hear_log(connection, item)
                self.poke()

    def hear_log(self, connection: Connection, item: Any) -> None:
        raise NotImplementedError

    def _hear_pair(self, connection: Connection, item: Any) -> None:
        sender = connection.about[connection.other[self]]
        if item in (None, RESET):
            connection.close(self)
            if self.pairs.get(sender) is connection:
                del self.pairs[sender]
                self._broken_at[sender] = self.time
                if item is None:
                    self._closed.add(sender)
        else:
            kind, number, losses, knows = item
            hand = self.hand
            if (
                hand is not None
                and hand.has_begun
                and (hand.begin.number, hand.begin.losses) == (number, losses)
            ):
                self._take(hand, sender, kind, knows)
            else:
                self._early.setdefault((number, losses), []).append((sender, kind, knows))
        if self.hand is not None:
            self._go_on(self.hand)

    # ---- connections to other processes: `TcpLink._connect` ------------------------------------------------------------

    def _connect(self, me: Member, other: Member) -> None:
        if self.how is None and self.has_started and self.me == me:
            self.world.connect_soon(self, other)

    def connected(self, other: Member, pair: Connection) -> None:
        """A connection has come about; it counts if it is wanted."""
        if self.how is None and self.has_started and self.part.wants(other):
            self.pairs[other] = pair
            self._broken_at.pop(other, None)
            self._closed.discard(other)
            self.feed(rules.Connected(other))
        else:
            pair.close(self)

    def not_connected(self, me: Member, other: Member) -> None:
        if self.how is None and self.has_started and self.me == me:
            self.feed(rules.NotConnected(other, "they have not met"))

    def is_there(self, member: Member) -> bool:
        return self.part.is_there(member)

    # ---- the coordinator: `Client` and `TcpLink._hear` -----------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send a message to the coordinator; it is dropped while there is no connection."""
        if self.lane and self.lines:
            self.lines[0].send(self, message)
        elif self.voice is not None and self.has_started:
            self.later(0.0, partial(self._heed_rank, 0, message))  # of a thread of its own, too
        else:
            self._send_on(message)

    def _send_on(self, message: Any) -> None:
        if self.connection is not None:
            self.connection.send(self, message)

    # ---- ranks of a region: `speaking` ---------------------------------------------------------------------------------

    def _hear_rank(self, line: Connection, item: Any) -> None:
        if item is None:
            pass  # the world ends the ranks of a region together
        elif self.lane and isinstance(item, str):
            if self.has_started:
                self.feed(rules.Away())
        elif self.lane:
            self._hear_coordinator(item)
        else:
            self._heed_rank(line.other[self].lane, item)  # type: ignore[attr-defined]

    def _heed_rank(self, rank: int, message: Any) -> None:
        """Take what a rank says."""
        if isinstance(message, Beat) and rank:
            self._rank_beats[rank] = message
        elif isinstance(message, Beat | Bye):
            if rank == 0:
                self._send_on(message)
        elif self.voice is not None:
            self.voice, effects = said(self.voice, rank, message)
            self._speak(effects)

    def _speak(self, effects: Iterable[Any]) -> None:
        own = []
        for effect in effects:
            match effect:
                case ToCoordinator(message):
                    self._send_on(message)
                case ToRank(rank, message):
                    for other, line in self.lines.items():
                        if rank in (None, other):
                            line.send(self, message)
                    if rank in (None, 0):
                        own.append(message)
        for each in own:
            self._hear_coordinator(each)

    def _disconnect(self) -> None:
        if self.connection is None:
            return
        self.connection.close(self)
        self.connection = None
        if self.has_started:
            self.feed(rules.Away())
            for line in self.lines.values():
                line.send(self, "away")
        if self.has_started and self.refused is None:
            beats = self._beats
            self.later(self._wait_s, lambda: self._call_again(beats))

    def _call_again(self, beats: int) -> None:
        """Connect again, and say who comes back."""
        if self.how is not None or beats != self._beats or self.connection is not None:
            return
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        coordinator = self.world.reachable(self)
        if coordinator is None:
            self.later(self._wait_s, lambda: self._call_again(beats))
            return
        self.connection = Connection("coordinator", self, coordinator, "run")
        self._heard_at = self.time
        self.send(back(self.part))

    def _beat(self, beats: int) -> None:
        """Send a heartbeat now and then, and drop a coordinator that is silent."""
        if self.how is not None or beats != self._beats:
            return
        self.later(BEAT_S, lambda: self._beat(beats))
        connection, now = self.connection, self.time
        self.ask_to_stop()
        if self.part.answers:
            self._answered_at = now
        if not self.part.frozen or self.part.answers:
            self._frozen_at = now
        waited_s = 0.0 if self.awaits is None or self.hand is None else now - self.hand.awaits_since
        self.feed(rules.Waited(self.awaits, waited_s, now - self._frozen_at, now - self._answered_at))
        if self.lane:
            self.send(self._beat_now())
        if connection is None:
            return
        coordinator = connection.other[self]
        if not coordinator.is_frozen and not self.network.is_cut(coordinator, self):
            self._heard_at = now
        elif now - self._heard_at > SILENT_S:
            self._disconnect()
            return
        heartbeat = beat_of_all_ranks({**self._rank_beats, 0: self._beat_now()})
        same = structs.replace(heartbeat, step=0, op=0) == structs.replace(self._last_beat, step=0, op=0)
        if heartbeat.awaits is not None or not same or now - self._beat_at >= KEEP_S:
            self._last_beat, self._beat_at = heartbeat, now
            self.send(heartbeat)

    def _beat_now(self) -> Beat:
        hand, now, awaits = self.hand, self.time, self.awaits
        said = Beat(
            step=self.step,
            awaits=awaits,
            waited_s=now - hand.awaits_since if hand is not None and awaits is not None else 0.0,
            idle_s=now - hand.moved_at if hand is not None else 0.0,
            blocked_s=self.blocked_s,
            coasts=self.coasts,
        )
        return beat(self.part, said)

    @property
    def blocked_s(self) -> float | None:
        """For how long the training loop has waited for the link."""
        raise NotImplementedError

    def _hear_coordinator(self, message: Any) -> None:
        if not self.has_started:
            match message:
                case Welcome() if self.welcome is None:
                    self.welcome = message
                case Refuse():
                    self.refused = message
                case Waiting():
                    self.told = message
                case _:
                    self._before_start.append(message)
            return
        if isinstance(message, AllHold):
            self.feed(rules.AllHeld(message.number, message.losses))
            return
        if isinstance(message, Decided):
            self.world.checks.decided(self, message)
        if isinstance(message, Refuse):
            self.refused = message
        self.feed(rules.HeardFrom(message, self.awaits, self.time))
        match message:
            case Resumed():
                self._wait_s = _FIRST_WAIT_S
                if self.leaves:
                    self.send(Leave())
            case AskStop(number=number):
                self._promised, self._promised_until = self.passed + 1, self.time + PROMISE_S
                self.send(Promise(number=number, step=self._promised))
            case StopAt(step=step) if self._promised is not None:
                self.stop_at, self._promised = step, self._promised if step else None
            case Posted(sender=sender, topic="base"):
                self.wants.append(sender)
            case Posted(topic="no base"):
                self.refuse_base()
            case Over():
                self.over = True

    def refuse_base(self) -> None:
        raise NotImplementedError

    def ask_to_stop(self) -> None:
        if self.asks_to_stop and not self._has_requested:
            self._has_requested = True
            self.send(Stop(why="as asked"))

    @property
    def awaits(self) -> int | None:
        """The region for which the attempt in hand waits."""
        hand = self.hand
        if hand is None or not hand.has_begun or hand.awaits not in self._missing(hand):
            return None
        assert hand.awaits is not None
        return hand.awaits.region

    def part_with(self, bye: Bye) -> None:
        """Be lost to all others at once."""
        self.send(bye)
        for connection in list(self.connections):
            connection.close(self)
        self.connection = None
