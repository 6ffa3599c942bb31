"""Who took part in a run, and when: read from the journals of its regions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...run.journal import BEGINNINGS

Events = Sequence[Mapping[str, Any]]
MOST_CHANGES = 12
"""Most changes that a sentence names."""


@dataclass(frozen=True)
class MemberChange:
    """After inner step `step`, `members` take part; `why` is what happened ("region 2 lost"), empty at the start."""

    step: int
    members: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True)
class _Notice:
    """What one journal says: these are the members from `step` on. `began_at`: the step of its newest start or resume, whose
    first notice `begins`, if nothing was trained meanwhile.
    """

    step: int
    epoch: int
    members: tuple[int, ...]
    began_at: int
    begins: bool


def changes(runs: Sequence[Events]) -> list[MemberChange]:
    """Who took part from the start on, and each change; nothing if a lost region would have ended the run, and every resume had
    as many regions.

    Regions may notice a loss at different inner steps: the first counts. A region notices what happened while it was away only
    after it is back; its own journal alone shows nothing but its absence.
    """
    epoch = -1
    goes = {
        (event["epoch"], event["region"]): event["kind"]
        for run in runs
        for event in run
        if event["kind"] in ("late", "left")
    }
    notices = sorted(
        (each for run in runs for each in _notices(run)),
        # a loss that ended a run comes before the resume from its step
        key=lambda each: (each.step, each.began_at, not each.begins, each.epoch),
    )
    history = _by_number(runs, notices[0].step if notices else math.inf)
    for each in notices:
        if history and history[-1].members == each.members:
            epoch = each.epoch if each.begins else max(epoch, each.epoch)  # a resumed run counts anew
        elif each.begins or each.epoch > epoch:
            before = history[-1].members if history else each.members
            ever = {region for change in history for region in change.members}
            lost = [
                f"region {r} {goes.get((each.epoch, r), 'lost')}" for r in before if r not in each.members
            ]
            come = [
                f"region {r} {'back' if r in ever else 'joined'}" for r in each.members if r not in before
            ]
            history.append(MemberChange(each.step, each.members, ", ".join(lost + come)))
            epoch = each.epoch
    for run in runs:
        for left_at, back_at in own_absences(run):
            history = _without(run[0]["region"], left_at, back_at, history)
    return history if notices or len(history) > 1 else []


def _by_number(runs: Sequence[Events], until: float) -> list[MemberChange]:
    """Who took part before inner step `until`, by the numbers of regions that starts and resumes name."""
    numbers: list[tuple[int, int]] = []
    # where journals differ, the lowest region's is right from its first line on: others may end with lines that the run gave up
    for run in sorted(runs, key=lambda run: run[0]["region"]):
        own = [(e["step"], e["num_regions"]) for e in run if e["kind"] in BEGINNINGS and e.get("num_regions")]
        numbers = [each for each in own if each[0] < (numbers[0][0] if numbers else until)] + numbers
    history: list[MemberChange] = []
    for step, number in numbers:
        members = tuple(range(number))
        if not history:
            history.append(MemberChange(0, members))
        elif members != history[-1].members:
            history.append(MemberChange(step, members, f"resumed with {number} region{'s' * (number != 1)}"))
    return history


def num_regions(runs: Sequence[Events], history: Sequence[MemberChange]) -> int:
    """Regions that began the run; if a lost region would have ended it, those of its newest start or resume."""
    if history:
        goes_on = any(event["kind"] == "epoch" for run in runs for event in run)
        return len(history[0 if goes_on else -1].members)
    newest = [next(event for event in reversed(run) if event["kind"] in BEGINNINGS) for run in runs]
    return max(start["num_regions"] for start in newest)


def attended(runs: Sequence[Events], history: Sequence[MemberChange]) -> Sequence[MemberChange]:
    """The `changes` of a run; if there are none, all its regions from step 0 on. Never empty."""
    return history or [MemberChange(0, tuple(range(num_regions(runs, history))))]


def periods(history: Sequence[MemberChange], end: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """From which inner step to which each set of members took part; `end` is the last step of the run."""
    edges = [*(change.step for change in history[1:]), end]
    return [(change.step, until, change.members) for change, until in zip(history, edges, strict=True)]


def spans(history: Sequence[MemberChange], end: int) -> dict[int, list[tuple[int, int]]]:
    """From which inner steps to which each region took part; `end` is the last step of the run."""
    regions = sorted({region for change in history for region in change.members})
    there: dict[int, list[tuple[int, int]]] = {region: [] for region in regions}
    for since, until, members in periods(history, end):
        for region in members:
            rows = there[region]
            if rows and rows[-1][1] == since:
                rows[-1] = (rows[-1][0], until)
            else:
                rows.append((since, until))
    return there


def losses(history: Sequence[MemberChange]) -> str:
    """How often a region was lost, or left behind because it was late, and how often one came back; empty if none was lost.

    >>> begin, loss = MemberChange(0, (0, 1, 2)), MemberChange(310, (0, 1), "region 2 lost")
    >>> losses([begin, loss, MemberChange(480, (0, 1, 2), "region 2 back")]), losses([begin])
    ('1 of a region, 1 return', '')
    """
    ends = [words.rpartition(" ")[2] for change in history for words in change.why.split(", ")]
    lost, back = ends.count("lost") + ends.count("late"), ends.count("back")
    return f"{lost} of a region, {back or 'no'} return{'s' * (back != 1)}" if lost else ""


def sentence(history: Sequence[MemberChange]) -> str:
    """How many regions took part, and each change of their number; empty if it did not change.

    >>> begin, loss = MemberChange(0, (0, 1, 2)), MemberChange(310, (0, 1), "region 2 lost")
    >>> sentence([begin, loss, MemberChange(480, (0, 1, 2), "region 2 back")])
    '3, 2 from step 310 to 480 (region 2 lost), 3 from step 480 (region 2 back)'
    """
    if len(history) < 2:
        return ""
    words = []
    shown = history[: MOST_CHANGES + 1]
    for place, change in enumerate(shown):
        until = f" to {history[place + 1].step}" if place + 1 < len(history) else ""
        since = f" from step {change.step}{until}" if place else ""
        words.append(f"{len(change.members)}{since}" + (f" ({change.why})" if change.why else ""))
    if len(history) > len(shown):
        words.append(f"and {len(history) - len(shown)} more, {len(history[-1].members)} at the end")
    return ", ".join(words)


def _notices(run: Events) -> Iterator[_Notice]:
    began_at, begins = 0, False
    for event in run:
        if event["kind"] in BEGINNINGS:
            began_at, begins = event["step"], True
        elif event["kind"] == "epoch":
            begins = begins and event["step"] == began_at
            yield _Notice(event["step"], event["epoch"], tuple(event["members"]), began_at, begins)
            begins = False


def own_absences(run: Events) -> Iterator[tuple[int, int]]:
    """From which inner step to which the region of a journal was away, each time that it came back."""
    left: int | None = None
    for place, event in enumerate(run):
        if event["kind"] in BEGINNINGS:
            left = run[place - 1]["step"] if place else None
        elif event["kind"] == "away" and left is None:
            left = event["step"]
        elif event["kind"] == "join" and event["region"] == run[0]["region"]:
            if left is not None and left < event["step"]:
                yield left, event["step"]
            left = None


def _without(region: int, left_at: int, back_at: int, history: Sequence[MemberChange]) -> list[MemberChange]:
    """The same changes with a region away from `left_at` to `back_at`, unless another journal says so already."""
    at = [change for change in history if change.step < back_at]
    if not at or region not in at[-1].members or len(at[-1].members) == 1:
        return list(history)
    rest = tuple(each for each in at[-1].members if each != region)
    since = max(left_at, at[-1].step)
    gone = MemberChange(since, rest, f"region {region} lost")
    back = MemberChange(back_at, at[-1].members, f"region {region} back")
    after = [change for change in history if change.step >= back_at]
    if after and after[0].step == back_at:
        come = [f"region {r} joined" for r in after[0].members if r not in at[-1].members]
        back = MemberChange(back_at, after[0].members, ", ".join([back.why, *come]))
        after = after[1:]
    return [*(change for change in at if change.step < since or change is at[0]), gone, back, *after]
