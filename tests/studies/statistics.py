"""What runs that are paired by seed say: means, intervals of differences, steps to a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

TAIL = 6
"""The loss of a run is its mean over the last evaluations, one in so many of them."""


class Interval(NamedTuple):
    """A mean, and how far it may be from the true one.

    Attributes:
        mean: of the values.
        half: half the width of the interval around it; None if fewer than two values say nothing of it.
        num: number of values.
    """

    mean: float
    half: float | None
    num: int

    @property
    def decides(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.half is not None and abs(self.mean) > self.half


def interval(values: Sequence[float], confidence: float) -> Interval:
    """Student's t interval of the mean of values that are independent and about normal.

    ::

        mean +- t s / sqrt(n) ;  t is the (1 + confidence) / 2 quantile of Student's distribution with n - 1 degrees of freedom

    Args:
        values: one a seed.
        confidence: 0.95 for an interval that holds the true mean in 95 % of all studies.
    """
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return Interval(mean(values), None, count)
    quantile = float(t.ppf((1 + confidence) / 2, count - 1))
    return Interval(mean(values), quantile * stdev(values) / math.sqrt(count), count)


def paired(values: Sequence[float], references: Sequence[float], confidence: float) -> Interval:
    """The interval of the differences value - reference of the same seeds."""
    return interval([value - other for value, other in zip(values, references, strict=True)], confidence)


def tail_loss(curve: Sequence[Sequence[Any]]) -> float:
    """The mean loss over the last sixth of the evaluations, at least one; infinite if one of them is not finite.

    A last bit moves the loss at the end of a run by more than methods differ; the mean over several evaluations moves less.
    The last point, of the finished model, is left out: it is at the same inner step as the one before.
    """
    losses = [loss for _, loss in curve[:-1]]
    tail = losses[-max(1, len(losses) // TAIL) :]
    return math.inf if None in tail else mean(tail)


def steps_to(curve: Sequence[Sequence[Any]], loss: float) -> float | None:
    """The inner step at which a curve first reaches a loss, interpolated between two evaluations; None if it never does."""
    before: tuple[int, float] | None = None
    for step, now in curve:
        if now is None:
            before = None
            continue
        if now <= loss:
            if before is None or step == before[0]:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - now)
        before = step, now
    return None
