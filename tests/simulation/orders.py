"""Every order in which messages can arrive, for a few members and a few faults, over the real rules; equal states are merged.

Time stands still; when nothing is on its way, all time-outs of the coordinator may pass at once. A state is immutable.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hf_cocodc.coordinator import rules as coordinator
from hf_cocodc.coordinator.messages import Bye, Decided, Generation, Leave, Place, Terms, Welcome
from hf_cocodc.coordinator.rules import Came, Ended, Run, Seat, SendTo, Tick, kept
from hf_cocodc.coordinator.state import revived
from hf_cocodc.link import rules as link
from hf_cocodc.link.part import Part, Standing, back, enter
from hf_cocodc.net.members import Member
from tests.listening import lanes

from .checks import Violation

_LATE = 1000.0
FIRST = Generation(1, "")
Action = tuple[Any, ...]


@dataclass(frozen=True)
class Node:
    """A member's process.

    Attributes:
        how: how it has ended; empty while it runs.
        connection: its number at the coordinator; 0 for none.
        up, down: what is on its way to the coordinator, and from it; None: the connection ends.
        inboxes: what is on its way from each other process.
        pairs: other processes to which it is connected.
        heard: what has come for calls: ("data" or "have", from whom, number, losses, knows).
        knew: changes that it knew when it made each call.
    """

    part: Part
    how: str = ""
    connection: int = 0
    up: tuple[Any, ...] = ()
    down: tuple[Any, ...] = ()
    inboxes: tuple[tuple[Any, ...], ...] = ()
    pairs: frozenset[int] = frozenset()
    heard: frozenset[tuple[Any, ...]] = frozenset()
    knew: tuple[int, ...] = ()


@dataclass(frozen=True)
class State:
    """`file`: what the coordinator has on its disk. `seen`: what must be equal in all. `faults`: those that may still come."""

    run: Run
    file: Run
    nodes: tuple[Node, ...]
    faults: tuple[Action, ...]
    seen: tuple[tuple[Any, Any], ...] = ()


def first_state(count: int, faults: tuple[Action, ...]) -> State:
    """All have met, and nothing has been sent."""
    members = tuple(Member(region, region + 1) for region in range(count))
    seats = {each.ticket: Seat(member=each, since=0.0, heard_at=0.0) for each in members}
    terms = Terms(count=count, most=count, wait_s=3600.0)
    run = Run(
        name="run",
        run="1",
        generations=(FIRST,),
        terms=terms,
        members=members,
        lanes=dict.fromkeys(members, lanes()),
        tokens={each: coordinator._digest("") for each in members},
        tickets=count,
        seats=seats,
    )
    nodes = tuple(
        Node(
            _connected(me, members, terms),
            connection=me.ticket,
            inboxes=((),) * count,
            pairs=frozenset(range(count)) - {me.region},
        )
        for me in members
    )
    return State(run, kept(run), nodes, faults)


def _connected(me: Member, members: tuple[Member, ...], terms: Terms) -> Part:
    """The part of a process that has met the others, and is connected to them."""
    places = tuple(Place(each, lanes()) for each in members)
    welcome = Welcome(run="1", generation=FIRST, me=me, joins=False, members=places)
    part = enter(welcome, terms)
    for other in sorted(part.meeting):
        part, _ = link.step(part, link.Connected(other))
    return part


def actions(state: State, calls: int) -> Iterator[Action]:
    """What can happen next."""
    is_quiet = True
    for i, node in enumerate(state.nodes):
        if node.up:
            is_quiet = False
            yield "up", i
        if node.how:
            continue
        if node.down:
            is_quiet = False
            yield "down", i
        for j, inbox in enumerate(node.inboxes):
            if inbox:
                is_quiet = False
                yield "peer", i, j
        part = node.part
        if not part.calls and part.submitted < calls:
            yield "make", i
        elif not part.calls:
            yield "finish", i
        if not node.connection:
            yield "call", i
    if is_quiet and state.run.asked_at is not None and state.run.has_majority:
        yield ("late",)
    for fault in state.faults:
        if fault[0] == "coordinator" or not any(state.nodes[i].how for i in fault[1:]):
            yield fault


def after(state: State, action: Action) -> State:
    """The state after an action.

    Raises:
        Violation: something holds no more.
    """
    work = _Work(state)
    if action in state.faults:
        work.faults.remove(action)
    getattr(work, action[0])(*action[1:])
    return State(
        work.run, work.file, tuple(work.nodes), tuple(work.faults), tuple(sorted(work.seen.items(), key=repr))
    )


class _Work:
    """The state as one action changes it. Methods without underscore are actions."""

    def __init__(self, state: State) -> None:
        self.run, self.file = state.run, state.file
        self.nodes, self.faults, self.seen = list(state.nodes), list(state.faults), dict(state.seen)

    # -- what can happen

    def up(self, i: int) -> None:
        message, *rest = self.nodes[i].up
        self._set(i, up=tuple(rest))
        number, message = message
        self._decide(Ended(number) if message is None else Came(number, message))

    def down(self, i: int) -> None:
        message, *rest = self.nodes[i].down
        self._set(i, down=tuple(rest))
        if message is None:
            self._set(i, connection=0)
            self._feed(i, link.Away())
            return
        if isinstance(message, Decided) and message.decision.number >= self.nodes[i].part.losses:
            self._same(("decision", message.decision.number), message.decision)
        self._feed(i, link.HeardFrom(message))

    def peer(self, i: int, j: int) -> None:
        inboxes = list(self.nodes[i].inboxes)
        item, *rest = inboxes[j]
        inboxes[j] = tuple(rest)
        self._set(i, inboxes=tuple(inboxes))
        if item is None:
            self._set(i, pairs=self.nodes[i].pairs - {j})
        else:
            kind, *what = item
            self._set(i, heard=self.nodes[i].heard | {(kind, j, *what)})
        self._go_on(i)

    def make(self, i: int) -> None:
        self._feed(i, link.Ticked())
        part = self.nodes[i].part
        if part.last is not None:
            self._bye(i, "left")
            return
        number = part.submitted + 1
        self._same(("members of", number, part.losses), (part.members, part.changes))
        self._set(i, knew=(*self.nodes[i].knew, part.knows))
        self._feed(i, link.Made(f"call {number}"))

    def finish(self, i: int) -> None:
        self._bye(i, "finished")

    def call(self, i: int) -> None:
        node, part = self.nodes[i], self.nodes[i].part
        taken = [seat for seat in self.run.seats if seat % 10 == part.me.ticket]
        taken += [number for number, _ in node.up if number % 10 == part.me.ticket]
        number = max(taken, default=part.me.ticket) + 10
        self._set(i, connection=number, up=(*node.up, (number, back(part))))

    def late(self) -> None:
        """All time-outs of the coordinator pass."""
        self._decide(Tick(), _LATE)

    # -- faults

    def kill(self, i: int) -> None:
        self._end(i, "killed")

    def leave(self, i: int) -> None:
        self._send(i, Leave())

    def split(self, i: int, j: int) -> None:
        """The connection between two members breaks."""
        for one, other in ((i, j), (j, i)):
            inboxes = list(self.nodes[one].inboxes)
            inboxes[other] = (*inboxes[other], None)
            self._set(one, inboxes=tuple(inboxes))

    def away(self, i: int) -> None:
        """The connection to the coordinator breaks; what was on its way from it may have arrived."""
        node = self.nodes[i]
        if node.connection:
            self._set(i, up=(*node.up, (node.connection, None)), down=(*node.down, None))

    def coordinator(self, has_file: bool) -> None:
        """It dies, and is started again. What was on its way to it is lost."""
        for i, node in enumerate(self.nodes):
            down = (*node.down, None) if node.connection and None not in node.down else node.down
            self._set(i, up=(), down=down)
        if has_file:
            self.file = revived(self.file, "")
            self.run = coordinator.restarted(self.file, 0.0, True)
        else:
            self.run = self.file = Run(name="run")

    # -- what follows

    def _set(self, i: int, **news: Any) -> None:
        self.nodes[i] = replace(self.nodes[i], **news)

    def _same(self, what: tuple[Any, ...], value: Any) -> None:
        if self.seen.setdefault(what, value) != value:
            raise Violation(f"{what}: {self.seen[what]} and {value}")

    def _send(self, i: int, message: Any) -> None:
        node = self.nodes[i]
        if node.connection and None not in node.down:
            self._set(i, up=(*node.up, (node.connection, message)))

    def _post(self, i: int, j: int, item: Any) -> None:
        inboxes = list(self.nodes[j].inboxes)
        inboxes[i] = (*inboxes[i], item)
        if not self.nodes[j].how and i in self.nodes[j].pairs and None not in self.nodes[j].inboxes[i]:
            self._set(j, inboxes=tuple(inboxes))

    def _decide(self, event: Any, now: float = 0.0) -> None:
        self.run, effects = coordinator.step(self.run, event, now)
        if now:  # the time of a coordinator that decides nothing else meanwhile does not matter
            away = dict.fromkeys(self.run.away, 0.0)
            asked_at = None if self.run.asked_at is None else 0.0
            self.run = replace(self.run, away=away, asked_at=asked_at, alone_since=None, here_at=0.0)
        for effect in effects:
            if not isinstance(effect, SendTo):
                self.file = kept(self.run)
                continue
            for i, node in enumerate(self.nodes):
                if node.connection == effect.to and not node.how and None not in node.down:
                    self._set(i, down=(*node.down, effect.message))

    def _feed(self, i: int, event: link.Event) -> None:
        before = self.nodes[i].part
        part, effects = link.step(before, event)
        if (part.losses, part.changes + part.losses) < (before.losses, before.changes + before.losses):
            raise Violation(f"{before.me} goes back")
        self._set(i, part=part)
        for effect in effects:
            match effect:
                case link.Begin(number, losses, parties):
                    self._set(i, heard=self.nodes[i].heard | {self._data(i, number, losses)})
                    for member in parties:
                        if member.region != i:
                            _, _, *what = self._data(i, number, losses)
                            self._post(i, member.region, ("data", *what))
                case link.Complete(call):
                    self._complete(i, call)
                case link.Tell(message):
                    self._send(i, message)
                case link.HangUp():
                    raise Violation("a coordinator has lost its generation")
                case link.Disconnect(member):
                    self._post(i, member.region, None)
                    self._set(i, pairs=self.nodes[i].pairs - {member.region})
                case link.Fail(why=why):
                    self._end(i, f"behind: {why}")
        if not self.nodes[i].how:
            self._go_on(i)

    def _data(self, i: int, number: int, losses: int) -> tuple[Any, ...]:
        return "data", i, number, losses, self.nodes[i].knew[number - 1]

    def _complete(self, i: int, call: link.Call) -> None:
        node = self.nodes[i]
        self._same(("result of", call.number), (call.parties, call.losses))
        heard = [each for each in node.heard if each[2] == call.number]
        knows = [each[4] for each in heard if each[0] == "data" and each[3] == call.losses]
        self._set(i, heard=node.heard - set(heard))
        self._feed(i, link.Landed(min(knows), call.changes))

    def _go_on(self, i: int) -> None:
        """Go on with the attempt in hand, as far as what has come allows."""
        node = self.nodes[i]
        if node.how or node.part.frozen or not node.part.calls or not node.part.calls[0].begun:
            return
        call = node.part.calls[0]
        kind = "have" if call.has else "data"
        came = {each[1] for each in node.heard if each[0] == kind and each[2:4] == (call.number, call.losses)}
        missing = [each for each in call.parties if each.region not in came]
        for member in missing:
            if member.region not in node.pairs and member.region != i:
                self._feed(i, link.Missed(call.number, call.losses, member, "its connection has ended"))
                return
        if missing:
            return
        if call.has:
            self._feed(i, link.AllHeld(call.number, call.losses))
            return
        self._set(i, heard=node.heard | {("have", i, call.number, call.losses, 0)})
        for member in call.parties:
            if member.region != i:
                self._post(i, member.region, ("have", call.number, call.losses, 0))
        self._feed(i, link.Held(call.number, call.losses))

    def _bye(self, i: int, how: str) -> None:
        self._send(i, Bye(how=how))
        self._end(i, how)

    def _end(self, i: int, how: str) -> None:
        for j in range(len(self.nodes)):
            if j != i:
                self._post(i, j, None)
        node = self.nodes[i]
        up = (*node.up, (node.connection, None)) if node.connection and None not in node.down else node.up
        self._set(i, how=how, up=up, down=(), inboxes=((),) * len(self.nodes), heard=frozenset())


def check_end(state: State, calls: int) -> None:
    """Nothing can happen any more: every process must have ended."""
    for node in state.nodes:
        if not node.how and state.run.run:  # else the coordinator has lost its file
            raise Violation(f"hangs: {node}, {state.run}")
        if node.how == "finished" and node.part.done != calls:
            raise Violation(f"has finished without the last calls: {node}")


class Search:
    """Looks at all states that can follow.

    Args:
        calls: that each member makes.
        every: of the states at the end of the depth, each of so many is followed to its end, one way.

    Attributes:
        num_states, num_steps, num_ends: how many different ones were looked at.
    """

    def __init__(self, calls: int = 2, every: int = 20) -> None:
        self.calls, self.every = calls, every
        self.num_states = self.num_steps = self.num_ends = 0
        self._names: dict[bytes, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}

    def _name(self, part: Any) -> int:
        """A number that equal parts of states have in common. Most parts are the same objects as one step before."""
        found = self._known.get(id(part))
        if found is None:
            name = self._names.setdefault(pickle.dumps(_plain(part)), len(self._names))
            found = self._known[id(part)] = (part, name)
        return found[1]

    def key(self, state: State) -> tuple[int, ...]:
        parts = (state.run, state.file, *state.nodes, state.faults, state.seen)
        return tuple(map(self._name, parts))

    def look(self, first: State, depth: int) -> None:
        """Look at every state up to `depth` actions away.

        Raises:
            Violation: something holds no more; the text tells the actions.
        """
        states: list[tuple[State, tuple[Action, ...]]] = [(first, ())]
        seen = {self.key(first)}
        for _ in range(depth):
            following = []
            for state, path in states:
                for action in list(actions(state, self.calls)):
                    new = self._after(state, action, path)
                    key = self.key(new)
                    if key not in seen:
                        seen.add(key)
                        following.append((new, (*path, action)))
                self._end_if_quiet(state, path)
            states = following
        self.num_states += len(seen)
        for state, path in states[:: self.every]:
            self._follow(state, path)

    def _after(self, state: State, action: Action, path: tuple[Action, ...]) -> State:
        self.num_steps += 1
        try:
            return after(state, action)
        except Exception as error:
            raise Violation(f"{error}\nafter {(*path, action)}") from error

    def _end_if_quiet(self, state: State, path: tuple[Action, ...]) -> bool:
        if any(action not in state.faults for action in actions(state, self.calls)):
            return False
        self.num_ends += 1
        try:
            check_end(state, self.calls)
        except Violation as error:
            raise Violation(f"{error}\nafter {path}") from error
        return True

    def _follow(self, state: State, path: tuple[Action, ...]) -> None:
        """Let a state go on to its end, without further faults."""
        state = replace(state, faults=())
        for number in range(1000):
            if self._end_if_quiet(state, path):
                return
            possible = list(actions(state, self.calls))
            action = possible[number % len(possible)]
            state, path = self._after(state, action, path), (*path, action)
        raise Violation(f"goes on without end\nafter {path}")


def _plain(value: Any) -> Any:
    """Equal for equal values, whatever the order of sets and mappings."""
    if isinstance(value, dict):
        return sorted(((_plain(key), _plain(each)) for key, each in value.items()), key=repr)
    if isinstance(value, frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Standing):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return (type(value).__name__, *(_plain(each) for each in vars(value).values()))
    return value
