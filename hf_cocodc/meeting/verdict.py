"""Who goes on after a loss, and which operation is the last that stands: a pure function of what the survivors report.

Members make the same operations in the same order; at most one is in progress. A member that holds the result of an operation
says so to all who take part in it ("have"); the operation is complete, for a member, when all of these words are there.
So if anyone has completed an operation, all who take part in it hold its result.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import LinkError
from .caller import Member
from .heard import MOST_MEMBERS, whole


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a member says about itself when a member is lost. Until the decision it completes no further operation.

    Attributes:
        number: how many decisions on losses there were before.
        member: who reports.
        first: the first operation that it takes part in; 0 if it follows, and takes part in none yet.
        last: the last operation that it takes part in, if it is about to leave; None otherwise.
        done: the last operation that it has completed.
        has: whether it holds the result of the next one.
        lost: the members that it misses.
        members: the members as it knows them, with itself; empty if it is none yet.
        sure: whether the connections to all that it misses have ended. Who is only silent or late may still report.
    """

    number: int
    member: Member
    first: int
    last: int | None = None
    done: int
    has: bool
    lost: tuple[Member, ...] = ()
    members: tuple[Member, ...] = ()
    sure: bool = True

    def takes_part_in(self, operation: int) -> bool:
        return 0 < self.first <= operation and (self.last is None or operation <= self.last)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What counts for all after a loss.

    Attributes:
        number: how many decisions there were before.
        members: who goes on, sorted.
        lost: all that were members in the eyes of anyone who reported, and do not go on, sorted.
        done: the last operation that stands. All later ones are void, and are made again without the lost.
    """

    number: int
    members: tuple[Member, ...]
    lost: tuple[Member, ...]
    done: int


def settle(reports: Collection[Report]) -> Decision:
    """The decision that follows from these reports, whatever their order.

    A member goes on if it reports and nobody who goes on misses it. Where reporters miss each other, the one that most of the
    others miss is dropped, of several the one with the highest region. The last operation that stands is the last that anyone
    has completed; or the next one, if all who go on and take part in it hold its result.

    Raises:
        ValueError: nobody who is a member reports.
    """
    known = {member for report in reports for member in report.members}
    going_on = {report.member: report for report in reports if report.member in known}
    if not going_on:
        raise ValueError("no member reports")
    while missed := Counter(
        each
        for report in going_on.values()
        for each in set(report.lost)
        if each in going_on and each != report.member
    ):
        del going_on[max(missed, key=lambda each: (missed[each], each))]
    taking_part = [report for report in reports if report.first and report.member in known]
    completed = [report.done for report in taking_part if report.first <= report.done]
    done = max(completed, default=min((report.first for report in taking_part), default=1) - 1)
    hold_next = [
        report.has and max(report.done, report.first - 1) == done
        for report in going_on.values()
        if report.takes_part_in(done + 1)
    ]
    if hold_next and all(hold_next):
        done += 1
    members = tuple(sorted(going_on))
    return Decision(
        number=max(report.number for report in reports),
        members=members,
        lost=tuple(sorted(known - set(members))),
        done=done,
    )


def to_plain(said: Report | Decision) -> dict[str, Any]:
    """As JSON can express it."""
    return asdict(said)


def report_from(plain: Any) -> Report:
    """Raises LinkError if it is no report."""
    return _from(Report, plain)


def decision_from(plain: Any) -> Decision:
    """Raises LinkError if it is no decision."""
    return _from(Decision, plain)


def _from(kind: Any, plain: Any) -> Any:
    try:
        found = dict(plain)
        for name in ("lost", "members"):
            if len(found[name]) > MOST_MEMBERS:
                raise ValueError(name)
            found[name] = tuple(_member(each) for each in found[name])
        if "member" in found:
            found["member"] = _member(found["member"])
        for name in {"number", "done", "first", "last"} & found.keys():
            if name != "last" or found[name] is not None:
                found[name] = whole(found[name])
        for name in {"has", "sure"} & found.keys():
            if type(found[name]) is not bool:
                raise TypeError(name)
        return kind(**found)
    except (TypeError, ValueError, KeyError) as error:
        raise LinkError(
            f"{str(plain)[:80]!r} is no {kind.__name__.lower()} of a region of this version."
        ) from error


def _member(plain: Any) -> Member:
    region, ticket = plain
    return Member(whole(region), whole(ticket))


def are_all_in(reports: Iterable[Report]) -> bool:
    """Whether every member has reported that none of the reporters misses."""
    told = list(reports)
    known = {member for report in told for member in report.members}
    missed = {member for report in told for member in report.lost}
    return known <= missed | {report.member for report in told}
