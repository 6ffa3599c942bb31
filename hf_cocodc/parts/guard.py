"""The norm guard: how much a region counts in a mean, by the norm of its outer gradient beside those of the others.

A region whose weights or inner optimizer have broken sends an outer gradient that is finite and far too large. All regions
hear the norms of all with a transfer, and come to the same verdict: the rules are pure functions of numbers that all have.

The limits come from runs that were well (`python -m tests.benchmarks.guard`): in one transfer the largest norm was at most twice
the median, and no median was twice what the history let expect. They hold where all regions have the same learning rate, and
where a step of the inner optimizer is bounded (Adam and its kin, or gradient clipping). Elsewhere finite norms say nothing, and
every region counts as it says. What the guard cannot see is a wrong direction of ordinary norm.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

WARM_UP = 8
"""Landings of a fragment before which its history does not say what is ordinary."""
LONGEST_HISTORY = 4096
"""Landings that a history has at most."""
_ROOM = 10.0
"""A mean is at most as long as the longest of what counts in it. What a format rounds stays below this."""
_SAME_RATE = 2.0
"""Learning rates that differ by more are not the same one."""
_MEANT_RATE = 100.0
"""Learning rates that differ by more are nobody's intention: the larger one is a fault, and its outer gradients are judged."""
_SAME_SHARE = 0.6
"""Regions with at least so much of the largest weight have trained alike. One that has just come in has not."""
_FAR_LOSS = 2.0, 3.0
"""A loss of more than so many times the ordinary one, and so many nats, is that of a model that is ruined."""
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
        carried: norm of what the codec adds from earlier transfers (error feedback), which `norm` is without.
        is_bounded: whether its inner optimizer bounds a step.
    """

    norm: float
    weight: float = 1.0
    rate: float = 0.0
    carried: float = 0.0
    is_bounded: bool = True


class Ordinary(NamedTuple):
    """What a fragment's last landings say of the next one; all 0 during the warm-up.

    Attributes:
        norm: median of their norms.
        pace: median of their norms divided by their learning rates.
    """

    norm: float = 0.0
    pace: float = 0.0

    def at(self, rate: float) -> float:
        """The norm that is ordinary at a learning rate. Where local params keep a part of their way, norms fall later than rates.

        >>> Ordinary(1.0, 100.0).at(0.02), Ordinary(1.0, 100.0).at(0.001)
        (2.0, 1.0)
        """
        return max(self.norm, self.pace * rate)


class Verdict(NamedTuple):
    """How much each region counts in a mean.

    Attributes:
        weights: of the regions that took part, in their order.
        divisor: what the weighted sum is divided by; None means the sum of the weights.
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
        """What the weighted sum is divided by."""
        return sum(self.weights) if self.divisor is None else self.divisor

    @property
    def is_void(self) -> bool:
        """Whether the mean must change nothing, because nobody can say which regions are right, or most are wrong."""
        return VOID in self.fates


def ordinary(norms: Sequence[float], paces: Sequence[float]) -> Ordinary:
    """What is ordinary for a fragment, by what it remembers of its last landings (`agreed`).

    >>> ordinary([1.0] * 7, []), ordinary([1.0] * 5 + [2.0] * 4, [9.0] * 8)
    (Ordinary(norm=0.0, pace=0.0), Ordinary(norm=1.0, pace=9.0))
    """
    return Ordinary(*(lower_median(each) if len(each) >= WARM_UP else 0.0 for each in (norms, paces)))


def agreed(said: Sequence[Said], verdict: Verdict, guard: Guard) -> tuple[float, float] | None:
    """Norm and learning rate of one landing that its fragment remembers: lower median and lowest; None if no region counts.

    Of norms that were clipped, what was left of them counts: who sends too much cannot raise what is ordinary.

    >>> agreed([Said(1.0), Said(9.0)], Verdict((1.0, 0.6), fates=("", "clipped"), limit=1.0), Guard())
    (1.0, 0.0)
    """
    counted = [each for each, weight in zip(said, verdict.weights, strict=True) if weight]
    if not counted:
        return None
    most = guard.clip * verdict.limit or math.inf
    return lower_median([min(each.norm, most) for each in counted]), min(rates(counted), default=0.0)


def judge(guard: Guard | None, known: Ordinary, said: Sequence[Said]) -> Verdict:
    """How much each region counts in a mean.

    ::

        now = lower median of the norms of this transfer;  K = what is ordinary at the lowest rate (`Ordinary.at`)
        L = max(K, now)
        norm > drop L: weight 0 ;  norm > clip L: weight w clip L / norm ;  divisor: the sum of w over those not dropped
        the mean is void if regions differ and now > drop K, or if its norm > 10 (clip L + the largest of what is carried)

    The norms of this transfer count beside the history: what all regions do alike (they unfreeze a part, their data change) is
    no fault of one. Where they differ by more than clip, a median far above the history is a majority that is wrong.

    Before there is a history, the smallest norm stands for it: if half of the regions or more are beyond drop times it, the mean
    is void, because nobody can say which are right. A region that has just come in, and has made fewer steps, says nothing
    about the others then.

    Args:
        guard: the limits; None lets every region count as it says.
    """
    weights = tuple(each.weight for each in said)
    counted = [each for each in said if each.weight]
    alike = have_trained_alike(counted)
    moving = [each.norm for each in alike if each.norm]
    if guard is None or not moving:
        return Verdict(weights, fates=("",) * len(said))
    if reason := outside(counted):
        return Verdict(weights, fates=("",) * len(said), outside=reason)
    now = lower_median([each.norm for each in (counted if known.norm else alike)])
    before = known.at(min(rates(counted), default=0.0))  # of a rate that is a fault, no norm is ordinary
    beyond = guard.drop * (before or min(moving))
    differ = max(moving) > guard.clip * min(moving)
    if differ and (now > beyond if before else 2 * sum(norm > beyond for norm in moving) >= len(moving)):
        fates = tuple(VOID if each.weight and each.norm > beyond else "" for each in said)
        return Verdict(weights, None, fates, beyond / guard.drop)
    limit = max(before, now) or min(moving)
    most = _ROOM * (guard.clip * limit + max(each.carried for each in counted))
    shares = [share(guard, limit, each.norm) if each.weight else 1.0 for each in said]
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
    found = rates(counted)
    return RATES_DIFFER if found and _SAME_RATE < max(found) / min(found) <= _MEANT_RATE else ""


def rates(counted: Sequence[Said]) -> list[float]:
    """The learning rates of regions that have trained alike, as far as they are known."""
    return [each.rate for each in have_trained_alike(counted) if each.rate]


def have_trained_alike(counted: Sequence[Said]) -> list[Said]:
    """Those that have about the largest weight."""
    most = max((each.weight for each in counted), default=0.0)
    return [each for each in counted if each.weight >= _SAME_SHARE * most]


def believed(square: float, verdict: Verdict) -> float:
    """The sum of squares of a mean by this verdict; infinite if the mean is void, or larger than what went into it.

    >>> believed(4.0, Verdict((1.0,), most=3.0)), believed(9.1, Verdict((1.0,), most=3.0))
    (4.0, inf)
    """
    return math.inf if verdict.is_void or square > verdict.most * verdict.most else square


def share(guard: Guard, limit: float, norm: float) -> float:
    """What counts of an outer gradient of this norm: 1, less if it is clipped, 0 if it is dropped.

    >>> [share(Guard(), 2.0, norm) for norm in (6, 12, 13)]
    [1.0, 0.5, 0.0]
    """
    if norm <= guard.clip * limit:
        return 1.0
    return guard.clip * limit / norm if norm <= guard.drop * limit else 0.0


def is_far(loss: float, losses: Sequence[float]) -> bool:
    """Whether a loss is that of a ruined model, by the losses that its fragment remembers.

    >>> is_far(8.0, [2.0] * 8), is_far(7.0, [2.0] * 8), is_far(8.0, [5.0, 2.0]), is_far(9e9, [])
    (True, False, True, False)
    """
    if not losses:
        return False
    times, nats = _FAR_LOSS
    before = lower_median(losses) if len(losses) >= WARM_UP else min(losses)
    return before > 0 and not loss <= times * before + nats


def lower_median(values: Sequence[float]) -> float:
    """The middle one of these values; of an even number, the smaller one of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
