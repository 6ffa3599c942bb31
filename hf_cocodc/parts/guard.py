"""The norm guard: how much a region counts in a mean, by the norm of its outer gradient beside those of the others.

A region whose weights or inner optimizer have broken sends an outer gradient that is finite and far too large. All regions
hear the norms of all with a transfer, and come to the same verdict: they are pure functions of numbers that all regions have.
What the guard cannot see is a wrong direction of ordinary norm.
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
CLIPPED, DROPPED = "clipped", "dropped"


class Guard(NamedTuple):
    """From which norm on an outer gradient counts less, in multiples of an ordinary one.

    Attributes:
        clip: beyond this multiple it is scaled down to it.
        drop: beyond this multiple it does not count at all.
        history: landings of the fragment whose norms say what is ordinary.
    """

    clip: float = 5.0
    drop: float = 50.0
    history: int = 16


class Verdict(NamedTuple):
    """How much each region counts in a mean.

    Attributes:
        weights: of the regions that took part, in their order.
        divisor: what the weighted sum is divided by; None means the sum of the weights.
        fates: for each region "", "clipped" or "dropped".
        limit: the ordinary norm that they were held against; 0 if there was none.
        most: norm that their mean does not reach, whatever the codec adds to it.
    """

    weights: tuple[float, ...]
    divisor: float | None = None
    fates: tuple[str, ...] = ()
    limit: float = 0.0
    most: float = math.inf

    @property
    def total(self) -> float:
        """What the weighted sum is divided by."""
        return sum(self.weights) if self.divisor is None else self.divisor


def reference(norms: Sequence[float]) -> float:
    """The ordinary norm of a fragment, from the agreed norms of its last landings: their median; 0 during the warm-up.

    >>> reference([1.0] * 7), reference([1.0] * 5 + [2.0] * 4)
    (0.0, 1.0)
    """
    return lower_median(norms) if len(norms) >= WARM_UP else 0.0


def agreed(norms: Sequence[float], weights: Sequence[float]) -> float | None:
    """The norm of one transfer that enters the history: the lower median of the regions that count; None if there is none.

    It is the smaller one of two. Fewer than half of the regions cannot raise it above all sound norms.

    >>> agreed([1.0, 9e9], [1.0, 1.0]), agreed([1.0, 9e9], [0.0, 1.0]), agreed([1.0], [0.0])
    (1.0, 9000000000.0, None)
    """
    counted = [norm for norm, weight in zip(norms, weights, strict=True) if weight]
    return lower_median(counted) if counted else None


def judge(
    guard: Guard | None,
    reference: float,
    norms: Sequence[float],
    weights: Sequence[float],
    carried: Sequence[float] = (),
) -> Verdict:
    """How much each region counts in a mean.

    ::

        L = max(reference, lower median of the norms of this transfer)
        norm > drop L: weight 0 ;  norm > clip L: weight w clip L / norm ;  divisor: the sum of w over those not dropped
        the mean is void if its norm > 10 (clip L + the largest of what is carried)

    The norms of this transfer count beside the history, so that what all regions do together (a warm-up, a spike of the
    learning rate, more regions) is never taken for a fault of one. One of them is the lower median: not all can be dropped.

    Before there is a history, nothing is clipped, and nothing is dropped unless all regions count alike: one that has just come
    in, and has made fewer steps, says nothing about the others.

    Args:
        guard: the limits; None lets every region count as it says.
        reference: see `reference`; 0 if there is no history yet.
        norms: of the outer gradients, one for each region.
        weights: as the regions say them.
        carried: norms of what codecs add from earlier transfers (error feedback), which the norms are without.
    """
    said = tuple(weights)
    now = agreed(norms, said)
    is_known = reference or len({weight for weight in said if weight}) == 1
    limit = max(reference, now or 0.0)
    if guard is None or now is None or not limit or not is_known:
        return Verdict(said, fates=("",) * len(said))
    if not reference:
        guard = guard._replace(clip=guard.drop)
    added = max((each for each, weight in zip(carried, said, strict=False) if weight), default=0.0)
    most = _ROOM * (guard.clip * limit + added)
    shares = [share(guard, limit, norm) if weight else 1.0 for norm, weight in zip(norms, said, strict=True)]
    fates = tuple("" if each == 1 else CLIPPED if each else DROPPED for each in shares)
    if not any(fates):
        return Verdict(said, None, fates, limit, most)
    judged = tuple(weight * each for weight, each in zip(said, shares, strict=True))
    divisor = sum(weight for weight, fate in zip(said, fates, strict=True) if fate != DROPPED)
    return Verdict(judged, divisor, fates, limit, most)


def believed(square: float, verdict: Verdict) -> float:
    """The sum of squares of a mean by this verdict; infinite if the mean is larger than what went into it, and so void.

    >>> believed(4.0, Verdict((1.0,), most=3.0)), believed(9.1, Verdict((1.0,), most=3.0))
    (4.0, inf)
    """
    return square if square <= verdict.most * verdict.most else math.inf


def share(guard: Guard, limit: float, norm: float) -> float:
    """What counts of an outer gradient of this norm: 1, less if it is clipped, 0 if it is dropped.

    >>> [share(Guard(), 2.0, norm) for norm in (10, 20, 100, 101)]
    [1.0, 0.5, 0.1, 0.0]
    """
    if norm <= guard.clip * limit:
        return 1.0
    return guard.clip * limit / norm if norm <= guard.drop * limit else 0.0


def lower_median(norms: Sequence[float]) -> float:
    """The middle one of these norms; of an even number, the smaller one of the two in the middle."""
    return sorted(norms)[(len(norms) - 1) // 2]
