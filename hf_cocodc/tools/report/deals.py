"""How the global batch of a run was dealt (`regions.balance: auto`): read from the journals of its regions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...run.figures import shares


@dataclass(frozen=True)
class DealRecord:
    """After inner step `step`, regions have so many `samples` in each; `speeds` in samples per second, as measured then."""

    step: int
    samples: Mapping[int, int]
    speeds: Mapping[int, float]
    why: str


def deals(runs: Iterable[Iterable[Mapping[str, Any]]]) -> list[DealRecord]:
    """Each deal once, in order: all regions write the same ones, but for those at which they were away."""
    found = {event["step"]: event for run in runs for event in run if event["kind"] == "deal"}
    return [
        DealRecord(
            step,
            {int(region): count for region, count in event["samples"].items()},
            {int(region): speed for region, speed in event.get("speeds", {}).items()},
            event.get("why", ""),
        )
        for step, event in sorted(found.items())
    ]


def sentence(dealt: Sequence[DealRecord]) -> str:
    """The last deal, and how many there were; empty if there was none.

    >>> first, second = DealRecord(20, {0: 8, 1: 8}, {}, "speeds are known"), DealRecord(60, {0: 12, 1: 4}, {}, "too late")
    >>> sentence([first, second])
    '16 samples in an inner step, region 0: 12, region 1: 4, from step 60 on (too late); 2 deals'
    """
    if not dealt:
        return ""
    last = dealt[-1]
    words = f"{sum(last.samples.values())} samples in an inner step, {shares(last.samples)}, from step {last.step} on"
    return f"{words} ({last.why})" + (f"; {len(dealt)} deals" if len(dealt) > 1 else "")


def samples_in(region: int, since: int, until: int, own: int, dealt: Sequence[DealRecord]) -> int:
    """Samples of a region in the inner steps after `since`, up to `until`; it has its `own` number unless it was dealt another.

    >>> samples_in(1, 10, 30, own=8, dealt=[DealRecord(20, {0: 12, 1: 4}, {}, "")])
    120
    """
    total, begin, now = 0, since, own
    for each in dealt:
        edge = min(max(each.step, since), until)
        total += now * (edge - begin)
        begin, now = edge, each.samples.get(region, own)
    return total + now * max(until - begin, 0)
