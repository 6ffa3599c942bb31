"""What a step of a run has changed, in words: the lines of the coordinator's log."""

from collections.abc import Iterable, Iterator

from ..errors import short
from .messages import AskStop, Bye, LeaveNow, Member, Note, Refuse, Resumed, StopAt
from .rules import Came, Effect, Event, Run, SendTo

_LONGEST = 600


def lines(before: Run, event: Event, after: Run, effects: Iterable[Effect]) -> list[str]:
    """One line for each thing that has happened to a run in one step."""
    said = [*_said(before, event), *_lines(before, after, effects)]
    return [short(f"run {after.name!r}: {line}", _LONGEST) for line in said]


def regions(members: Iterable[Member]) -> str:
    """
    >>> regions([Member(1, 4), Member(0, 2)])
    'regions 0, 1'
    """
    numbers = sorted({member.region for member in members})
    return f"region{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers)) or '(none)'}"


def _said(before: Run, event: Event) -> Iterator[str]:
    """What a region says of its own end."""
    match event:
        case Came(who, Note(text=text)) if who in before.seats:
            yield f"region {before.seats[who].member.region} says: {text}"
        case Came(who, Bye(how=how, step=at)) if who in before.seats:
            yield f"region {before.seats[who].member.region} ends at step {at} ({how})"


def _lines(before: Run, after: Run, effects: Iterable[Effect]) -> Iterator[str]:
    has_begun = bool(after.run) and after.run != before.run
    if has_begun and not after.recovers:
        where = ", ".join(sorted({*after.hosts.values()}))
        yield f"{regions(after.members)} have met, from {where}; generation {after.generation}"
    yield from _waiting(before, after)
    if after.recovers and not (before.recovers and before.run == after.run):
        yield "this coordinator does not remember the run, and decides nothing before all its members have called"
    if before.recovers and not after.recovers and before.run == after.run:
        yield f"all members have called: {regions(after.members)}; generation {after.generation}"
    if before.run == after.run and not (after.recovers or before.recovers):
        yield from _changes(before, after)
    yield from _connections(before, after, has_begun)
    yield from _messages(after, effects)
    if after.ended is not None and before.ended is None:
        place = f"; the model lies at {after.ended.place}" if after.ended.place else ""
        yield f"ended at step {after.ended.step} ({after.ended.how}){place}"


def _waiting(before: Run, after: Run) -> Iterator[str]:
    for who, hello in after.hellos.items():
        if who not in before.hellos:
            does = "wants to join" if hello.join else f"of {hello.terms.count} waits for the others"
            yield f"region {hello.region} {does}, from {hello.host} ({hello.machine})"


def _changes(before: Run, after: Run) -> Iterator[str]:
    """Losses, joins and leaves."""
    if after.losses > before.losses:
        for decided in after.decisions:
            if decided.decision.number >= before.losses:
                for member, why in zip(decided.decision.lost, decided.whys, strict=False):
                    yield f"region {member.region} is lost: {why}"
        yield f"{regions(after.members)} go on"
        return
    come, gone = set(after.members) - set(before.members), set(before.members) - set(after.members)
    if come:
        yield f"{regions(come)} joined; members: {regions(after.members)}"
    if gone:
        yield f"{regions(gone)} left; members: {regions(after.members)}"
    known = {change.number for change in before.announced}
    for change in after.announced:
        if change.number not in known:
            yield f"region {change.member.region} {'comes in' if change.kind == 'join' else 'leaves'} (change {change.number})"


def _connections(before: Run, after: Run, has_begun: bool) -> Iterator[str]:
    """Processes that are connected now, or no longer."""
    if after.asked_at is not None and before.asked_at is None and after.reports:
        missed = {member for report in after.reports.values() for member in report.lost} | {*after.missed}
        reporter = regions(after.reports)
        yield f"{reporter} missed {regions(missed)}: asking the others"
    here = {seat.member for seat in after.seats.values()}
    for seat in before.seats.values():
        if seat.member not in here and seat.member in after.expected and after.ended is None:
            yield f"region {seat.member.region} has no connection to this coordinator any more"
    if not has_begun:
        for member in after.newcomers.keys() - before.newcomers.keys():
            yield f"region {member.region} is a newcomer, with ticket {member.ticket}"
    for member in before.newcomers.keys() - after.newcomers.keys() - set(after.members):
        yield f"region {member.region}, which wanted to join, has gone"


def _messages(after: Run, effects: Iterable[Effect]) -> Iterator[str]:
    asked = answered = False
    for effect in effects:
        match effect:
            case SendTo(message=Refuse(why=why)):
                yield f"refused: {why}"
            case SendTo(to=to, message=Resumed()) if to in after.seats:
                yield f"region {after.seats[to].member.region} is back"
            case SendTo(to=to, message=LeaveNow()) if to in after.seats:
                yield f"region {after.seats[to].member.region} is asked to leave"
            case SendTo(message=AskStop()) if not asked and after.question is not None:
                asked = True
                yield f"asked to stop: {'; '.join(f'region {r}: {why}' for r, why in after.question.whys.items())}"
            case SendTo(message=StopAt(step=at)) if not answered:
                answered = True
                yield f"stops at step {at}" if at else "has agreed on no step at which to stop"
