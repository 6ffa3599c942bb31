"""Every order of messages, for three members, two calls and two faults, to a stated depth. Equal states are merged."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hf_cocodc.coordinator import rules
from hf_cocodc.coordinator.messages import (
    Announce,
    Ask,
    Back,
    Decided,
    Leave,
    Member,
    Place,
    Refuse,
    Resumed,
    Terms,
)
from hf_cocodc.coordinator.rules import Came, Ended, Run, Seat, Send, Tick
from hf_cocodc.links import rules as link
from hf_cocodc.links.rules import Part, Standing

from .coordinating import kept

DEPTH, FAULTS, CALLS = 4, 2, 2
MEMBERS = tuple(Member(region, region + 1) for region in range(3))
TERMS = Terms(count=3, elastic=True, most=3)
_LONG_S = 100.0


class Side(NamedTuple):
    """A member: its part, whether it lives and is connected, and messages on their way to and from the coordinator."""

    part: Part
    lives: bool = True
    connection: int = 0
    up: tuple[Any, ...] = ()
    down: tuple[Any, ...] = ()


@dataclass(frozen=True)
class State:
    """Everything. `begun`, `held`: (member, call, losses); `results`: what has completed: call -> parties and losses."""

    run: Run
    sides: tuple[Side, ...]
    begun: frozenset[tuple[Member, int, int]] = frozenset()
    held: frozenset[tuple[Member, int, int]] = frozenset()
    results: tuple[tuple[int, tuple[Member, ...], int], ...] = ()
    decisions: tuple[Any, ...] = ()
    faults: int = FAULTS
    connections: int = 3

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for states from which the same can happen."""
        run = self.run
        seats = tuple((who, seat.member) for who, seat in run.seats.items())
        waits = run.asked_at is not None
        memory = (
            run.losses,
            run.lost,
            run.members,
            run.decisions,
            run.announced,
            run.applied,
            run.generation,
        )
        hand = (frozenset(run.reports.items()), tuple(run.missed), waits, run.recovers, run.known)
        sides = tuple(
            (_frozen(side.part), side.lives, side.connection, *(tuple(map(_plain, way)) for way in side[3:]))
            for side in self.sides
        )
        return memory, hand, seats, sides, self.begun, self.held, self.results, self.faults


def _frozen(part: Part) -> tuple[Any, ...]:
    values = dict(vars(part))
    values["missed"] = tuple(sorted(part.missed))
    return tuple(values.values())


def _plain(message: Any) -> Any:
    return (message.losses, message.announced, message.generation) if isinstance(message, Back) else message


def first() -> State:
    """All have made their first call."""
    parts = [Part(me=me, elastic=True, standing=Standing.MEMBER, roster=MEMBERS) for me in MEMBERS]
    seats = {number: Seat(member=me, host="", heard_at=0.0) for number, me in enumerate(MEMBERS)}
    run = Run(name="run", run="run-0", generation=1, terms=TERMS, members=MEMBERS, tickets=3, seats=seats)
    state = State(run, tuple(Side(part, connection=number) for number, part in enumerate(parts)))
    for place in range(len(parts)):
        state = fed(state, place, link.Made("fragment"))
    return state


def coordinated(state: State, event: rules.Event, now: float = 0.0) -> State:
    run, effects = rules.step(state.run, event, now)
    sides = list(state.sides)
    for effect in effects:
        if isinstance(effect, Send):
            for place, side in enumerate(sides):
                if side.connection == effect.to:
                    sides[place] = side._replace(down=(*side.down, effect.message))
    return replace(state, run=run, sides=tuple(sides))


def fed(state: State, place: int, event: link.Event) -> State:
    """A member's rules make a step. Raises AssertionError if two members complete a call differently."""
    side = state.sides[place]
    part, effects = link.step(side.part, event)
    begun, held, results, up = state.begun, state.held, state.results, side.up
    if isinstance(event, link.Held) and part.calls and part.calls[0].has:
        held |= {(part.me, event.number, event.losses)}
    for effect in effects:
        match effect:
            case link.Begin(number=number, losses=losses):
                begun |= {(part.me, number, losses)}
            case link.Tell(report=report) if side.connection >= 0:
                up = (*up, report)
            case link.Complete(call=call):
                done = (call.number, call.parties, call.losses)
                assert done in results or all(each[0] != call.number for each in results), (done, results)
                results = tuple(sorted({*results, done}))
    sides = (*state.sides[:place], side._replace(part=part, up=up), *state.sides[place + 1 :])
    return replace(state, sides=sides, begun=begun, held=held, results=results)


def heard(state: State, place: int, message: Any) -> State:
    """A member hears its coordinator. Raises AssertionError if two members hear different decisions."""
    match message:
        case Ask(number=number):
            return fed(state, place, link.Asked(number))
        case Decided(decision=decision):
            if decision.number >= state.sides[place].part.losses:
                others = [each for each in state.decisions if each.number == decision.number]
                assert others in ([], [decision]), (decision, others)
                state = replace(state, decisions=tuple({*state.decisions, decision}))
            return fed(state, place, message)
        case Announce(change=change):
            return fed(state, place, link.Known(change))
        case Resumed() if state.sides[place].part.frozen:
            return fed(state, place, link.Asked(state.sides[place].part.losses))
        case Refuse():
            part = replace(state.sides[place].part, standing=Standing.OUT, calls=())
            return with_side(state, place, part=part)
    return state


def with_side(state: State, place: int, **news: Any) -> State:
    side = state.sides[place]._replace(**news)
    return replace(state, sides=(*state.sides[:place], side, *state.sides[place + 1 :]))


def deliveries(state: State) -> Iterator[State]:
    """What can happen without a fault."""
    for place, side in enumerate(state.sides):
        if side.up:
            sender = side.connection if side.connection >= 0 else 1000 + place
            yield coordinated(with_side(state, place, up=side.up[1:]), Came(sender, side.up[0]))
        if not side.lives:
            continue
        part = side.part
        if side.down:
            yield heard(with_side(state, place, down=side.down[1:]), place, side.down[0])
        if side.connection < 0 and part.standing is Standing.MEMBER:
            yield called_again(state, place)
        if part.standing is Standing.MEMBER and part.submitted < CALLS:
            yield fed(state, place, link.Made("fragment"))
        if not part.calls or part.frozen or not part.calls[0].begun:
            continue
        call = part.calls[0]
        attempt = call.number, call.losses
        came = state.held if call.has else state.begun
        if all((member, *attempt) in came for member in call.parties):
            yield fed(state, place, link.AllHeld(*attempt) if call.has else link.Held(*attempt))
        for member, other in zip(MEMBERS, state.sides, strict=True):
            has_gone = not other.lives or other.part.standing is Standing.OUT
            if member != part.me and member in call.parties and (has_gone or member.ticket in part.lost):
                yield fed(state, place, link.Missed(*attempt, member, "gone"))
    if state.run.asked_at is not None and not state.run.recovers:
        yield coordinated(state, Tick(), state.run.asked_at + _LONG_S)


def called_again(state: State, place: int) -> State:
    part = state.sides[place].part
    back = Back(
        run="run-0",
        member=part.me,
        is_member=True,
        host="",
        generation=state.run.generation if not state.run.recovers else 1,
        losses=part.losses,
        changes=part.changes,
        announced=part.announced,
        members=tuple(Place(each, "") for each in part.members),
        terms=TERMS,
        compared={},
    )
    number = state.connections
    state = with_side(replace(state, connections=number + 1), place, connection=number, up=(back,), down=())
    return state


def mishaps(state: State) -> Iterator[State]:
    """What can go wrong."""
    if not state.faults:
        return
    state = replace(state, faults=state.faults - 1)
    for place, side in enumerate(state.sides):
        if not side.lives:
            continue
        if sum(each.lives for each in state.sides) > 1:  # what it has sent may arrive, or not
            dead = with_side(state, place, lives=False, connection=-1, down=())
            yield coordinated(with_side(dead, place, up=()), Ended(side.connection))
            # it is frozen, or cut off, as another one sees it
            for other, neighbor in enumerate(state.sides):
                call = neighbor.part.calls[0] if neighbor.part.calls else None
                if other != place and call is not None and call.begun and not neighbor.part.frozen:
                    yield fed(state, other, link.Missed(call.number, call.losses, side.part.me, "silent"))
        if side.connection >= 0:
            cut = with_side(state, place, connection=-1, up=(), down=())
            yield coordinated(cut, Ended(side.connection))
            yield with_side(state, place, up=(*side.up, Leave()))
    for run in (replace(kept(state.run), generation=state.run.generation + 1), Run(name="run")):
        sides = tuple(side._replace(connection=-1, up=(), down=()) for side in state.sides)
        yield replace(state, run=run, sides=sides)


def drained(state: State) -> State:
    """The state after all that can happen without a further fault, in one order."""
    for _ in range(300):
        following = next(deliveries(state), None)
        if following is None:
            return state
        state = following
    raise AssertionError(f"it does not come to rest: {state}")


def test_every_order() -> None:
    layer = {first().key: first()}
    seen = set(layer)
    for depth in range(DEPTH):
        following: dict[Any, State] = {}
        for state in layer.values():
            for after in (*deliveries(state), *mishaps(state)):
                key = after.key
                if key not in seen:
                    seen.add(key)
                    following[key] = after
        layer = following
        print(f"{len(layer)} states after {depth + 1} steps")  # noqa: T201
    for state in layer.values():
        end = drained(state)
        dead = any(not side.lives for side in end.sides)
        for side in end.sides:
            waits = end.run.recovers and dead  # for an operator
            has_ended = side.part.standing is Standing.OUT or side.part.done == CALLS
            assert not side.lives or has_ended or waits, end
    assert len(seen) > 1000
