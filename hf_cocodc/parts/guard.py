"""The norm guard: how much a region counts in a mean, by the norm of its outer gradient beside those of the others.

A region whose weights or inner optimizer have broken sends an outer gradient that is finite and far too large. All regions
learn all norms with a transfer and reach the same verdict: the rules are pure functions of these numbers.

The limits come from healthy runs (`python -m tests.benchmarks.guard`): in one transfer the largest norm was at most twice the
median, and no median was twice what the history let expect. They hold where all regions have the same learning rate, and where
a step of the inner optimizer is bounded (Adam and its kin, or gradient clipping). Elsewhere finite norms say nothing, and every
region counts as it says. The guard cannot see a wrong direction of ordinary norm.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

WARM_UP = 8
"""Landings of a fragment before its history says what is ordinary."""
LONGEST_HISTORY = 4096
_ROOM = 10.0
"""A mean is at most as long as the longest outer gradient that counts; the rounding of a format stays below this factor."""
_SAME_RATE = 2.0
"""Learning rates that differ by more are different ones."""
_MEANT_RATE = 100.0
"""Learning rates that differ by more are unintended: the larger one is a fault, and its outer gradients are judged."""
_SAME_SHARE = 0.6
"""Regions with at least this share of the largest weight have trained alike; one that has just come in has not."""
_FAR_LOSS = 2.0, 3.0
"""A loss above so many times the ordinary one plus so many nats belongs to a ruined model."""
CLIPPED, DROPPED, VOID = "clipped", "dropped", "void"
NOT_BOUNDED, RATES_DIFFER = "not bounded", "rates differ"


class Guard(NamedTuple):
    """From which norm on an outer gradient counts less, in multiples of an ordinary one.

    Attributes:
        clip: beyond this multiple it is scaled down to it.
        drop: beyond this multiple it does not count at all.
        history: landings of the fragment that say what is ordinary.
    """

    clip: float = 3.0
    drop: float = 6.0
    history: int = 16


class Said(NamedTuple):
    """What a region says of its outer gradient.

    Attributes:
        norm: over all lanes of the region.
        weight: its share in the mean; 0 if it does not count.
        rate: mean inner learning rate of the steps in it; 0 if unknown.
        carried: norm of what the codec adds from earlier transfers (error feedback); `norm` is without it.
        is_bounded: whether its inner optimizer bounds a step.
    """

    norm: float
    weight: float = 1.0
    rate: float = 0.0
    carried: float = 0.0
    is_bounded: bool = True


class Ordinary(NamedTuple):
    """By a fragment's last landings: the medians of norm and of norm / learning rate (`pace`); 0 during the warm-up."""

    norm: float = 0.0
    pace: float = 0.0

    def at(self, rate: float) -> float:
        """The ordinary norm at a learning rate. If local params keep a part of their way, norms fall later than rates.

        >>> Ordinary(1.0, 100.0).at(0.02), Ordinary(1.0, 100.0).at(0.001)
        (2.0, 1.0)
        """
        return max(self.norm, self.pace * rate)


class Verdict(NamedTuple):
    """How much each region counts in a mean.

    Attributes:
        weights: of the regions that took part, in their order.
        divisor: of the weighted sum; None means the sum of the weights.
        fates: for each region "", "clipped" or "dropped"; or "void", if the mean is void and its norm is a reason.
        limit: the ordinary norm that they were held against; 0 if there was none.
        most: norm that their mean does not reach, whatever the codec adds to it.
        outside: why finite norms were not judged: "not bounded" or "rates differ"; else empty.
    """

    weights: tuple[float, ...]
    divisor: float | None = None
    fates: tuple[str, ...] = ()
    limit: float = 0.0
    most: float = math.inf
    outside: str = ""

    @property
    def total(self) -> float:
        """The divisor of the weighted sum."""
        return sum(self.weights) if self.divisor is None else self.divisor

    @property
    def is_void(self) -> bool:
        """Whether the mean must change nothing, because most regions are wrong, or it is unclear which ones."""
        return VOID in self.fates


def ordinary(norms: Sequence[float], paces: Sequence[float]) -> Ordinary:
    """What is ordinary for a fragment, by what it remembers of its last landings (`agreed`).

    >>> ordinary([1.0] * 7, []), ordinary([1.0] * 5 + [2.0] * 4, [9.0] * 8)
    (Ordinary(norm=0.0, pace=0.0), Ordinary(norm=1.0, pace=9.0))
    """
    return Ordinary(*(lower_median(each) if len(each) >= WARM_UP else 0.0 for each in (norms, paces)))


def agreed(reports: Sequence[Said], verdict: Verdict, guard: Guard) -> tuple[float, float] | None:
    """Norm (lower median) and learning rate (lowest) of a landing that its fragment remembers; None if no region counts.

    Clipped norms count as clipped: a region that sends too much cannot raise what is ordinary.

    >>> agreed([Said(1.0), Said(9.0)], Verdict((1.0, 0.6), fates=("", "clipped"), limit=1.0), Guard())
    (1.0, 0.0)
    """
    counted = [each for each, weight in zip(reports, verdict.weights, strict=True) if weight]
    if not counted:
        return None
    most = guard.clip * verdict.limit or math.inf
    return lower_median([min(each.norm, most) for each in counted]), min(rates(counted), default=0.0)


def judge(guard: Guard | None, known: Ordinary, reports: Sequence[Said]) -> Verdict:
    """How much each region counts in a mean.

    ::

        now = lower median of the norms of this transfer;  K = what is ordinary at the lowest rate (`Ordinary.at`)
        L = max(K, now)
        norm > drop L: weight 0 ;  norm > clip L: weight w clip L / norm ;  divisor: the sum of w over those not dropped
        the mean is void if regions differ and now > drop K, or if its norm > 10 (clip L + the largest of what is carried)

    The norms of this transfer count beside the history: what all regions do alike (they unfreeze a part, their data change) is
    no fault of one. Where they differ by more than clip, a median far above the history is a wrong majority.

    Before there is a history, the smallest norm stands for it, without regions that have just come in and made fewer steps: if
    at least half of the regions are beyond drop times it, the mean is void, because it is unclear which are right. Without a
    guard every region counts as it says.
    """
    weights = tuple(each.weight for each in reports)
    counted = [each for each in reports if each.weight]
    alike = have_trained_alike(counted)
    moving = [each.norm for each in alike if each.norm]
    if guard is None or not moving:
        return Verdict(weights, fates=("",) * len(reports))
    if reason := outside(counted):
        return Verdict(weights, fates=("",) * len(reports), outside=reason)
    now = lower_median([each.norm for each in (counted if known.norm else alike)])
    before = known.at(min(rates(counted), default=0.0))  # of a rate that is a fault, no norm is ordinary
    beyond = guard.drop * (before or min(moving))
    differ = max(moving) > guard.clip * min(moving)
    if differ and (now > beyond if before else 2 * sum(norm > beyond for norm in moving) >= len(moving)):
        fates = tuple(VOID if each.weight and each.norm > beyond else "" for each in reports)
        return Verdict(weights, None, fates, beyond / guard.drop)
    limit = max(before, now) or min(moving)
    most = _ROOM * (guard.clip * limit + max(each.carried for each in counted))
    shares = [share(guard, limit, each.norm) if each.weight else 1.0 for each in reports]
    fates = tuple("" if each == 1 else CLIPPED if each else DROPPED for each in shares)
    if not any(fates):
        return Verdict(weights, None, fates, limit, most)
    judged = tuple(weight * each for weight, each in zip(weights, shares, strict=True))
    divisor = sum(weight for weight, fate in zip(weights, fates, strict=True) if fate != DROPPED)
    return Verdict(judged, divisor, fates, limit, most)


def outside(counted: Sequence[Said]) -> str:
    """Why the norms of these regions cannot be compared; empty if they can.

    >>> outside([Said(1.0, rate=0.1), Said(1.0, rate=0.4)]), outside([Said(1.0, rate=0.1), Said(1.0, rate=40.0)])
    ('rates differ', '')
    """
    if not all(each.is_bounded for each in counted):
        return NOT_BOUNDED
    known = rates(counted)
    return RATES_DIFFER if known and _SAME_RATE < max(known) / min(known) <= _MEANT_RATE else ""


def rates(counted: Sequence[Said]) -> list[float]:
    """The known learning rates of regions that have trained alike."""
    return [each.rate for each in have_trained_alike(counted) if each.rate]


def have_trained_alike(counted: Sequence[Said]) -> list[Said]:
    """Those with about the largest weight."""
    most = max((each.weight for each in counted), default=0.0)
    return [each for each in counted if each.weight >= _SAME_SHARE * most]


def believed(square: float, verdict: Verdict) -> float:
    """The sum of squares of a mean; infinite if the verdict is void, or the mean is larger than what went into it.

    >>> believed(4.0, Verdict((1.0,), most=3.0)), believed(9.1, Verdict((1.0,), most=3.0))
    (4.0, inf)
    """
    return math.inf if verdict.is_void or square > verdict.most * verdict.most else square


def share(guard: Guard, limit: float, norm: float) -> float:
    """The share of an outer gradient of this norm that counts: below 1 if it is clipped, 0 if it is dropped.

    >>> [share(Guard(), 2.0, norm) for norm in (6, 12, 13)]
    [1.0, 0.5, 0.0]
    """
    if norm <= guard.clip * limit:
        return 1.0
    return guard.clip * limit / norm if norm <= guard.drop * limit else 0.0


def is_far(loss: float, losses: Sequence[float]) -> bool:
    """Whether a loss belongs to a ruined model, by the losses that its fragment remembers.

    >>> is_far(8.0, [2.0] * 8), is_far(7.0, [2.0] * 8), is_far(8.0, [5.0, 2.0]), is_far(9e9, [])
    (True, False, True, False)
    """
    if not losses:
        return False
    times, nats = _FAR_LOSS
    before = lower_median(losses) if len(losses) >= WARM_UP else min(losses)
    return before > 0 and not loss <= times * before + nats


def lower_median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the smaller of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
