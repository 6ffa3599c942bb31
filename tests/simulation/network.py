"""Virtual time, and connections that deliver in order, late, after a cut, or not at all."""

import heapq
import random
from collections.abc import Callable, Hashable
from typing import Any

LONGEST_DELAY_S = 0.4
RESET = "reset"
"""What comes on a connection that was not closed in good order."""


class Actor:
    """A process. While it is frozen, what is due for it waits; once it is dead, nothing happens to it.

    Attributes:
        place: where it runs; cuts are between places.
        stood_still_s: for how long it was frozen so far.
    """

    def __init__(self, network: "Network", place: Hashable) -> None:
        self.network, self.place = network, place
        self.is_alive, self.is_frozen = True, False
        self.stood_still_s, self._stopped_at = 0.0, 0.0
        self.waiting: list[tuple[bool, Callable[[], None]]] = []
        self.connections: dict[Connection, None] = {}

    def hear(self, connection: "Connection", item: Any) -> None:
        """Something has come; None: the other end has closed the connection; RESET: it has broken."""
        raise NotImplementedError

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.network.at(self.network.now + delay_s, self, call)

    def kill(self) -> None:
        """End without a word. The system closes the connections, and resets one that has unread bytes."""
        self.is_alive = self.is_frozen = False
        self.waiting.clear()
        for connection in list(self.connections):
            has_unread = connection.kind == "coordinator" and self.network.chances.random() < 0.3
            connection.close(self, RESET if has_unread else None)

    @property
    def time(self) -> float:
        """By a clock that stands still while it does (`net/awake.py`)."""
        return self.network.now - self.stood_still_s

    def freeze(self) -> None:
        if not self.is_frozen:
            self._stopped_at = self.network.now
        self.is_frozen = self.is_alive

    def thaw(self) -> float:
        """Returns for how long it was frozen."""
        frozen_s = self.network.now - self._stopped_at if self.is_frozen else 0.0
        self.stood_still_s += frozen_s
        self.is_frozen = False
        waiting, self.waiting = self.waiting, []
        if (
            self.network.chances.random() < 0.5
        ):  # what it has set a time for happens before it reads what came
            waiting.sort(key=lambda each: each[0])
        for number, (_, call) in enumerate(waiting):
            self.later(1e-6 * number, call)
        return frozen_s


class Connection:
    """Two ways, in order each.

    Args:
        kind: "coordinator", "pair" or "log".
        about: anything that its ends need to know of it.
    """

    def __init__(self, kind: str, one: Actor, other: Actor, about: Any = None) -> None:
        self.kind, self.about = kind, about
        self.other = {one: other, other: one}
        self.arrives_at = {one: 0.0, other: 0.0}
        self.held: dict[Actor, list[Any]] = {one: [], other: []}
        self.closed_by: set[Actor] = set()
        for actor in (one, other):
            actor.connections[self] = None

    def send(self, sender: Actor, item: Any) -> None:
        if sender in self.closed_by:
            return
        network, receiver = sender.network, self.other[sender]
        at = max(self.arrives_at[receiver], network.now + network.random.random() * LONGEST_DELAY_S)
        self.arrives_at[receiver] = at + 1e-9
        network.at(at, receiver, lambda: self._arrive(sender, receiver, item), comes=True)

    def close(self, actor: Actor, how: str | None = None) -> None:
        """Close this end; the other one hears of it, as None or RESET, after all that was sent."""
        if actor not in self.closed_by:
            self.send(actor, how)
            self.closed_by.add(actor)
            actor.connections.pop(self, None)

    def break_down(self) -> None:
        """Both ends hear that it has ended."""
        for actor, other in self.other.items():
            self.send(other, RESET)
            self.closed_by.discard(actor)

    def flush(self) -> None:
        """Deliver what a cut has held back."""
        for receiver, sender in self.other.items():
            for _ in self.held[receiver]:
                self._release_soon(sender, receiver)

    def _release_soon(self, sender: Actor, receiver: Actor) -> None:
        network = sender.network
        network.at(network.now, receiver, lambda: self._release(sender, receiver), comes=True)

    def _release(self, sender: Actor, receiver: Actor) -> None:
        held = self.held[receiver]
        if held and not sender.network.is_cut(sender, receiver):
            self._hand_over(receiver, held.pop(0))

    def _arrive(self, sender: Actor, receiver: Actor, item: Any) -> None:
        """Items that were held back come first, also if they have yet to be released."""
        if self.held[receiver] or sender.network.is_cut(sender, receiver):
            self.held[receiver].append(item)
            sender.network.holding[self] = None
            self._release_soon(sender, receiver)
        else:
            self._hand_over(receiver, item)

    def _hand_over(self, receiver: Actor, item: Any) -> None:
        if receiver not in self.closed_by:
            receiver.hear(self, item)


class Network:
    """Args:
    seed: of all delays, and of `chances`: what else is left to chance.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.chances = random.Random(seed), random.Random(seed)
        self.now, self.num_events = 0.0, 0
        self.cuts: set[tuple[Hashable, Hashable]] = set()
        self.holding: dict[Connection, None] = {}
        self._queue: list[tuple[float, int, Actor | None, bool, Callable[[], None]]] = []
        self._number = 0

    def at(self, time: float, actor: Actor | None, call: Callable[[], None], comes: bool = False) -> None:
        """Call at a time, if the actor lives then, and once it is not frozen. `comes`: another one has sent something."""
        self._number += 1
        heapq.heappush(self._queue, (time, self._number, actor, comes, call))

    def is_cut(self, sender: Actor, receiver: Actor) -> bool:
        return (sender.place, receiver.place) in self.cuts

    def reaches(self, one: Actor, other: Actor) -> bool:
        """Whether both live, and hear each other."""
        return (
            one.is_alive
            and other.is_alive
            and not (one.is_frozen or other.is_frozen)
            and not (self.is_cut(one, other) or self.is_cut(other, one))
        )

    def cut(self, sender: Hashable, receiver: Hashable) -> None:
        self.cuts.add((sender, receiver))

    def heal(self, sender: Hashable, receiver: Hashable) -> None:
        self.cuts.discard((sender, receiver))
        holding, self.holding = self.holding, {}
        for connection in holding:
            connection.flush()
            if any(connection.held.values()):
                self.holding[connection] = None

    def run(self, until: float, goes_on: Callable[[], bool]) -> None:
        """Let things happen until a time, or while `goes_on`."""
        while self._queue and self._queue[0][0] <= until and goes_on():
            self.now, _, actor, comes, call = heapq.heappop(self._queue)
            if actor is not None and not actor.is_alive:
                continue
            if actor is not None and actor.is_frozen:
                actor.waiting.append((comes, call))
                continue
            self.num_events += 1
            call()
