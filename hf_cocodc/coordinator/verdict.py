"""Who goes on after a loss, and which operation is the last that stands: a pure function of what the survivors report.

Members make the same operations in the same order; at most one is in progress. A member that holds the result of an operation
says so to all who take part in it ("have"); the operation is complete, for a member, when all of these words are there.
So if anyone has completed an operation, all who take part in it hold its result.
"""

from collections import Counter
from collections.abc import Collection

from .messages import Decision, Report


def settle(reports: Collection[Report]) -> Decision:
    """The decision that follows from these reports, whatever their order. Raises ValueError if no member reports.

    A member goes on if it reports and nobody who goes on misses it. Where reporters miss each other, the one that most of the
    others miss is dropped, of several the one with the highest region. The last operation that stands is the last that anyone
    has completed; or the next one, if all who go on and take part in it hold its result.
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
    # one that has left may still have a part in an earlier operation, and be missed there
    missing = known | {each for report in reports for each in report.lost}
    return Decision(
        number=max(report.number for report in reports),
        members=members,
        lost=tuple(sorted(missing - set(members))),
        done=done,
    )
