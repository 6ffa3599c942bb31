"""Who took part in a run, and when: read from the journals of its regions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...run.journal import BEGINNINGS

Events = Sequence[Mapping[str, Any]]
MOST_CHANGES = 12
"""A sentence names at most so many changes."""


@dataclass(frozen=True)
class MemberChange:
    """From inner step `step` on other regions take part.

    Attributes:
        step: the last inner step without the change.
        members: numbers of the regions that take part from here on.
        why: what happened ("region 2 lost, region 1 left"); empty at the start.
    """

    step: int
    members: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True)
class _Notice:
    """What one journal says: these are the members from `step` on."""

    step: int
    epoch: int
    members: tuple[int, ...]
    begins: bool


def changes(runs: Sequence[Events]) -> list[MemberChange]:
    """Who took part from the start on, and each change of it; nothing if the run would have ended with a lost region, and was
    always resumed with as many regions.

    Regions may notice a loss at different inner steps: the first one counts. A region notices only after it is back what has
    happened while it was away, and without another journal than its own nothing but that it was away.
    """
    epoch = -1
    goes = {
        (event["epoch"], event["region"]): event["kind"] for run in runs for event in run if _is_exit(event)
    }
    notices = sorted(
        (each for run in runs for each in _notices(run)),
        key=lambda each: (each.step, not each.begins, each.epoch),
    )
    found = _by_number(runs, notices[0].step if notices else math.inf)
    for each in notices:
        if found and found[-1].members == each.members:
            epoch = each.epoch if each.begins else max(epoch, each.epoch)  # a resumed run counts anew
        elif each.begins or each.epoch > epoch:
            before = found[-1].members if found else each.members
            ever = {region for change in found for region in change.members}
            lost = [
                f"region {r} {goes.get((each.epoch, r), 'lost')}" for r in before if r not in each.members
            ]
            come = [
                f"region {r} {'back' if r in ever else 'joined'}" for r in each.members if r not in before
            ]
            found.append(MemberChange(each.step, each.members, ", ".join(lost + come)))
            epoch = each.epoch
    for run in runs:
        for left_at, back_at in _own_absences(run):
            found = _without(run[0]["region"], left_at, back_at, found)
    return found if notices or len(found) > 1 else []


def _by_number(runs: Sequence[Events], until: float) -> list[MemberChange]:
    """Who took part before inner step `until`, by the numbers of regions that starts and resumes name.

    Region 0 always takes part. Where journals differ, that of the lowest region is right, from its first line on: others may end
    with lines that the run has given up.
    """
    numbers: list[tuple[int, int]] = []
    for run in sorted(runs, key=lambda run: run[0]["region"]):
        own = [(e["step"], e["num_regions"]) for e in run if e["kind"] in BEGINNINGS and e.get("num_regions")]
        numbers = [each for each in own if each[0] < (numbers[0][0] if numbers else until)] + numbers
    found: list[MemberChange] = []
    for step, number in numbers:
        members = tuple(range(number))
        if not found:
            found.append(MemberChange(0, members))
        elif members != found[-1].members:
            found.append(MemberChange(step, members, f"resumed with {number} region{'s' * (number != 1)}"))
    return found


def num_regions(runs: Sequence[Events], found: Sequence[MemberChange]) -> int:
    """Regions that began a run; of one that would end with a lost region, those of its newest start or resume."""
    if found:
        goes_on = any(event["kind"] == "epoch" for run in runs for event in run)
        return len(found[0 if goes_on else -1].members)
    newest = [next(event for event in reversed(run) if event["kind"] in BEGINNINGS) for run in runs]
    return max(max(start["num_regions"], 1 + start["region"]) for start in newest)


def attended(runs: Sequence[Events], found: Sequence[MemberChange]) -> Sequence[MemberChange]:
    """The `changes` of a run; of one without any, all its regions from step 0 on. Never empty."""
    return found or [MemberChange(0, tuple(range(num_regions(runs, found))))]


def periods(found: Sequence[MemberChange], end: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """From which inner step to which each set of members took part. `end` is the last step of the run."""
    edges = [*(change.step for change in found[1:]), end]
    return [(change.step, until, change.members) for change, until in zip(found, edges, strict=True)]


def spans(found: Sequence[MemberChange], end: int) -> dict[int, list[tuple[int, int]]]:
    """The inner steps from which, and to which, each region took part. `end` is the last step of the run."""
    regions = sorted({region for change in found for region in change.members})
    there: dict[int, list[tuple[int, int]]] = {region: [] for region in regions}
    for since, until, members in periods(found, end):
        for region in members:
            rows = there[region]
            if rows and rows[-1][1] == since:
                rows[-1] = (rows[-1][0], until)
            else:
                rows.append((since, until))
    return there


def sentence(found: Sequence[MemberChange]) -> str:
    """How many regions took part, and from which inner step on another number.

    >>> begin, loss = MemberChange(0, (0, 1, 2)), MemberChange(310, (0, 1), "region 2 lost")
    >>> sentence([begin, loss, MemberChange(480, (0, 1, 2), "region 2 back")])
    '3, 2 from step 310 to 480 (region 2 lost), 3 from step 480 (region 2 back)'
    """
    if len(found) == 1:
        return f"{len(found[0].members)} throughout"
    words = []
    shown = found[: MOST_CHANGES + 1]
    for place, change in enumerate(shown):
        until = f" to {found[place + 1].step}" if place + 1 < len(found) else ""
        since = f" from step {change.step}{until}" if place else ""
        words.append(f"{len(change.members)}{since}" + (f" ({change.why})" if change.why else ""))
    if len(found) > len(shown):
        words.append(f"and {len(found) - len(shown)} more, {len(found[-1].members)} at the end")
    return ", ".join(words)


def _is_exit(event: Mapping[str, Any]) -> bool:
    return event["kind"] in ("late", "left")


def _notices(run: Events) -> Iterator[_Notice]:
    begins = False
    for event in run:
        if event["kind"] == "epoch":
            yield _Notice(event["step"], event["epoch"], tuple(event["members"]), begins)
        begins = event["kind"] in BEGINNINGS or (begins and event["kind"] == "note")


def _own_absences(run: Events) -> Iterator[tuple[int, int]]:
    """From which to which inner step the region of a journal was away, each time that it came back."""
    for place, event in enumerate(run):
        if event["kind"] != "join" or event["region"] != run[0]["region"]:
            continue
        first = place
        if place and run[place - 1]["kind"] == "epoch" and run[place - 1]["epoch"] == event["epoch"]:
            first = place = place - 1  # of the return itself
        while first and (first == place or run[first]["kind"] not in (*BEGINNINGS, "epoch")):
            first -= 1
        if run[first]["kind"] == "epoch":  # the process went on: only the members had gone on without it
            first = place
        earlier = [each["step"] for each in run[:first] if each.get("step") is not None]
        if earlier and earlier[-1] < event["step"]:
            yield earlier[-1], event["step"]


def _without(region: int, left_at: int, back_at: int, found: Sequence[MemberChange]) -> list[MemberChange]:
    """The same changes with a region away from `left_at` to `back_at`, unless another journal has said so."""
    at = [change for change in found if change.step < back_at]
    if not at or region not in at[-1].members or len(at[-1].members) == 1:
        return list(found)
    rest = tuple(each for each in at[-1].members if each != region)
    since = max(left_at, at[-1].step)
    gone = MemberChange(since, rest, f"region {region} lost")
    back = MemberChange(back_at, at[-1].members, f"region {region} back")
    after = [change for change in found if change.step >= back_at]
    if after and after[0].step == back_at:
        come = [f"region {r} joined" for r in after[0].members if r not in at[-1].members]
        back = MemberChange(back_at, after[0].members, ", ".join([back.why, *come]))
        after = after[1:]
    return [*(change for change in at if change.step < since or change is at[0]), gone, back, *after]
