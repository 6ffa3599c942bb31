"""How regions of different speed share the global batch of an inner step: pure functions of what all regions hear of each other.

A region takes as many micro-batches as its speed allows, so that inner steps take all regions about equally long. Every region
learns the speeds of all with a transfer, and comes to the same deal at its landing: nobody decides, and nothing is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..validation import Count, Size

GAIN = 1.1
"""A deal is given up once another one would shorten the inner steps by this factor, ..."""
ROUNDS = 3
"""... for so many rounds in a row: a region that was busy for a moment changes nothing."""
COARSE = 1.15
"""Micro-batches are too coarse for the speeds of regions if inner steps take this much longer than with samples that could be
divided at will."""
MOST = 64
"""A region makes at most so many times the micro-batches of its own settings."""
FIXED, PER_REGION, OWN = "fixed", "per_region", "own"


class Pace(NamedTuple):
    """What a region says of its inner steps.

    Attributes:
        step_time_s: seconds of one; 0 if unknown.
        samples: in each of these, of all its ranks together.
        unit: samples of one micro-batch, of all its ranks together: it takes multiples of that.
    """

    step_time_s: Size
    samples: Count
    unit: Count

    @property
    def speed(self) -> float:
        """Samples per second; 0 if unknown, or more than any machine makes."""
        return self.samples / self.step_time_s if self.step_time_s > 1e-9 else 0.0


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How many samples regions have in an inner step.

    Attributes:
        batch: of all regions together where that stays fixed: of those that were there at the first landing.
        own: of each region by its own settings.
        samples: of each region that took part in the last transfer; others have their own.
        paces: what each region has said last, if its speed was known then.
        uneven: landings in a row at which another deal would have been worth it.
    """

    batch: Count = 0
    own: Mapping[int, Count] = field(default_factory=dict)
    samples: Mapping[int, Count] = field(default_factory=dict)
    paces: Mapping[int, Pace] = field(default_factory=dict)
    uneven: Count = 0


class Portion(NamedTuple):
    """The samples of the run that a region has in its next inner steps. Samples are numbered in the order in which they are
    dealt, pass after pass over the data.

    Attributes:
        since: inner step at which it was dealt; it holds from the next one on.
        first: number of the region's first sample in that next step; -1 if it has come in since: it has none of its own yet.
        stride: samples of all regions together in an inner step.
        samples: of this region in an inner step.
        own: number of its first sample in that next step among all that it has had, where its data are its own.
    """

    since: int
    first: int
    stride: int
    samples: int
    own: int = 0

    def begins(self, inner_step: int) -> int:
        """The number of the region's first sample in an inner step after `since`; those of the step follow each other. -1 if it
        has none of its own yet.

        >>> Portion(10, 100, 8, 2).begins(12)
        108
        """
        return self.first if self.first < 0 else self.first + (inner_step - self.since - 1) * self.stride

    def begins_own(self, inner_step: int) -> int:
        """The same among the samples that the region has had, where its data are its own.

        >>> Portion(10, 100, 8, 2, own=40).begins_own(12)
        42
        """
        return self.own + (inner_step - self.since - 1) * self.samples


@dataclass(frozen=True, kw_only=True)
class SampleQueue:
    """Which samples regions have: from the inner step after `since` on, all together `samples` in each, beginning with number
    `place`. Every sample is in exactly one part. `had`: how many each region has had before.
    """

    since: Count = 0
    place: Count = 0
    samples: Mapping[int, Count] = field(default_factory=dict)
    had: Mapping[int, Count] = field(default_factory=dict)

    def then(self, step: int, samples: Mapping[int, int]) -> "SampleQueue":
        """The queue, once so many samples are dealt after this inner step."""
        if samples == self.samples:
            return self
        steps, had = step - self.since, dict(self.had)
        for region, count in self.samples.items():
            had[region] = had.get(region, 0) + steps * count
        place = self.place + steps * sum(self.samples.values())
        return SampleQueue(since=step, place=place, samples=dict(samples), had=had)

    def portion(self, region: int, own: int) -> Portion:
        """Of a region, which has its `own` number of samples before it takes part.

        >>> [SampleQueue(place=5, samples={0: 3, 2: 1}).portion(region, own=9) for region in (0, 2)]
        [Portion(since=0, first=5, stride=4, samples=3, own=0), Portion(since=0, first=8, stride=4, samples=1, own=0)]
        """
        had = self.had.get(region, 0)
        if region not in self.samples:
            return Portion(self.since, -1, 0, own, had)
        before = sum(count for other, count in self.samples.items() if other < region)
        return Portion(self.since, self.place + before, sum(self.samples.values()), self.samples[region], had)


def deal_of(batch: int, paces: Mapping[int, Pace], own: Mapping[int, int]) -> dict[int, int]:
    """Samples for each region, together as near to `batch` as their micro-batches allow, so that the slowest inner step is as
    short as it can be. Each region has one micro-batch at least, and at most `MOST` times its `own` samples: what a region says
    of itself can keep no other busy without end. All speeds must be known.

    >>> deal_of(8, {0: Pace(1.0, 4, 1), 1: Pace(3.0, 4, 1)}, own={0: 4, 1: 4})
    {0: 6, 1: 2}
    >>> deal_of(8, {0: Pace(1.0, 4, 2), 1: Pace(9.0, 4, 2)}, own={0: 4, 1: 4})
    {0: 6, 1: 2}
    """
    most = {region: max(MOST * own[region] // pace.unit, 1) for region, pace in paces.items()}
    units = {region: min(count, most[region]) for region, count in _floors(batch, paces).items()}
    left = batch - sum(units[region] * pace.unit for region, pace in paces.items())
    while True:
        fitting = [r for r, pace in paces.items() if 2 * left >= pace.unit and units[r] < most[r]]
        if not fitting:
            return {region: units[region] * paces[region].unit for region in sorted(paces)}
        # the one that would be ready first
        region = min(fitting, key=lambda r: ((units[r] + 1) * paces[r].unit / paces[r].speed, r))
        units[region] += 1
        left -= paces[region].unit


def _floors(batch: int, paces: Mapping[int, Pace]) -> dict[int, int]:
    """The micro-batches that each region has ready by the time at which all would have made the batch, if samples could be
    divided at will; where that is less than one, it is one, and the others share the rest.
    """
    units = dict.fromkeys(paces, 1)
    free, left = set(paces), float(batch)
    while free:
        time_s = max(left, 0.0) / sum(paces[region].speed for region in free)
        slow = {region for region in free if time_s * paces[region].speed < paces[region].unit}
        if not slow:
            for region in free:
                units[region] = int(time_s * paces[region].speed / paces[region].unit + 1e-9)
            break
        free -= slow
        left -= sum(paces[region].unit for region in slow)
    return units


def step_time_s(samples: Mapping[int, int], paces: Mapping[int, Pace]) -> float:
    """Seconds of the slowest inner step, where regions have so many samples.

    >>> step_time_s({0: 6, 1: 2}, {0: Pace(1.0, 4, 1), 1: Pace(4.0, 4, 1)})
    2.0
    """
    return max(samples[region] / pace.speed for region, pace in paces.items())


def ideal_time_s(batch: int, paces: Mapping[int, Pace]) -> float:
    """Seconds of an inner step, if samples could be divided at will: all regions work all the time."""
    return batch / sum(pace.speed for pace in paces.values())


def coarse(samples: Mapping[int, int], paces: Mapping[int, Pace]) -> str:
    """What to change, if micro-batches are too coarse for these speeds; else "".

    >>> coarse({0: 6, 1: 2}, {0: Pace(1.0, 6, 1), 1: Pace(1.0, 2, 1)})
    ''
    """
    times = step_time_s(samples, paces), ideal_time_s(sum(samples.values()), paces)
    if times[0] <= COARSE * times[1]:
        return ""
    return (
        "regions.balance: the speeds of the regions ask for a finer deal: an inner step takes "
        f"{times[0] / times[1]:.2f} times as long as it could. Make micro-batches smaller and their number larger "
        "(per_device_train_batch_size, gradient_accumulation_steps)."
    )


def after(
    deal: Deal, said: Mapping[int, Pace], rule: str = FIXED, num_fragments: int = 1
) -> tuple[Deal, str]:
    """The deal after the landing of a transfer with which regions have `said` so; and why it is another one, else "".

    Args:
        rule: of the global batch where regions come or go. FIXED: it stays, and those that are there share it; PER_REGION: it
            is the sum of their own; OWN: nothing is shared.
        num_fragments: landings of a round.
    """
    own = {**{region: pace.samples for region, pace in said.items()}, **deal.own}
    paces = {**deal.paces, **{region: pace for region, pace in said.items() if pace.speed}}
    paces = {region: paces[region] for region in sorted(said) if region in paces}
    batch = deal.batch or sum(own[region] for region in said)
    now = {region: deal.samples.get(region, own[region]) for region in sorted(said)}
    if rule == OWN:
        return replace(
            deal, batch=batch, own=own, samples={region: own[region] for region in sorted(said)}
        ), ""
    next_one = replace(deal, batch=batch, own=own, samples=now, paces=paces)
    if paces.keys() != said.keys():
        return replace(next_one, uneven=0), ""
    best = deal_of(batch if rule == FIXED else sum(own[region] for region in said), paces, own)
    if deal.paces.keys() != paces.keys():
        is_first = not deal.paces or now.keys() == deal.samples.keys()
        why = "speeds are known" if is_first else "regions have come or gone"
    elif step_time_s(now, paces) <= GAIN * step_time_s(best, paces):
        return replace(next_one, uneven=0), ""
    elif deal.uneven + 1 < ROUNDS * num_fragments:
        return replace(next_one, uneven=deal.uneven + 1), ""
    else:
        why = "speeds have changed"
    return replace(next_one, samples=best, uneven=0), why if best != now else ""
