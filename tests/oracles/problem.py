"""The common problem of the oracles: M regions, each with its own noisy quadratic loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Fragments = list[Vector]
"""One model: one 1-D vector a fragment."""
Trajectory = list[tuple[list[Fragments], Fragments]]
"""Entry t - 1: (theta of every region, the common Theta) after the events of inner step t."""
RegionTrajectory = list[tuple[list[Fragments], list[Fragments]]]
"""Entry t - 1: (theta of every region, Theta of every region) after the events of inner step t."""


@dataclass(frozen=True)
class Problem:
    """L_m(theta) = 0.5 sum(h_m (theta - c_m)^2), with a gradient perturbation fixed by (seed, region, step).

    `h` and `c` have shape (M, n), `theta0` has shape (n,), n = sum(sizes); `lr` has T entries and the
    learning rate of inner step t (1..T) is lr[t - 1], see `eta`.
    """

    M: int
    sizes: tuple[int, ...]
    T: int
    lr: tuple[float, ...]
    h: Vector
    c: Vector
    theta0: Vector
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        n = sum(self.sizes)
        if self.h.shape != (self.M, n) or self.c.shape != (self.M, n) or self.theta0.shape != (n,):
            raise ValueError(f"h, c must be ({self.M}, {n}) and theta0 ({n},)")
        if len(self.lr) != self.T:
            raise ValueError(f"lr has {len(self.lr)} entries, T is {self.T}")

    def eta(self, step: int) -> float:
        """The inner learning rate of step t, t = 1..T."""
        if not 1 <= step <= self.T:
            raise ValueError(f"step {step} is outside 1..{self.T}")
        return self.lr[step - 1]

    def perturbation(self, region: int, step: int) -> Vector:
        """The deterministic gradient noise of (region, step), shape (n,)."""
        draw = np.random.default_rng([self.seed, region, step]).standard_normal(sum(self.sizes))
        return self.noise * draw

    @overload
    def gradient(self, region: int, step: int, theta: Vector) -> Vector: ...
    @overload
    def gradient(self, region: int, step: int, theta: Fragments) -> Fragments: ...
    def gradient(self, region: int, step: int, theta: Vector | Fragments) -> Vector | Fragments:
        """h_m (theta - c_m) + perturbation(m, t), in the form (fragments or concatenation) theta came in."""
        if isinstance(theta, list):
            return self.split(self.gradient(region, step, np.concatenate(theta)))
        slope: Vector = self.h[region] * (theta - self.c[region])
        return slope + self.perturbation(region, step)

    def split(self, whole: Vector) -> Fragments:
        """Cut a concatenation into copies of its fragments."""
        return [part.copy() for part in np.split(whole, np.cumsum(self.sizes)[:-1])]

    def start(self) -> Fragments:
        """A fresh copy of the initial parameters, as fragments."""
        return self.split(self.theta0)


def make_problem(M: int, sizes: Sequence[int], T: int, lr: float | Sequence[float], seed: int) -> Problem:
    """Draw a problem: h in [0.5, 1.5], c and theta0 standard normal; a float lr (about 0.05) is constant."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    rates = (float(lr),) * T if isinstance(lr, (int, float)) else tuple(float(rate) for rate in lr)
    h = rng.uniform(0.5, 1.5, (M, n))
    c = rng.standard_normal((M, n))
    return Problem(M, tuple(sizes), T, rates, h, c, rng.standard_normal(n), seed=seed)


def distance(left: Trajectory, right: Trajectory) -> float:
    """The largest difference between two trajectories over all steps, regions and values."""
    assert len(left) == len(right)
    worst = 0.0
    for (theta_a, Theta_a), (theta_b, Theta_b) in zip(left, right, strict=True):
        for a, b in zip([*theta_a, Theta_a], [*theta_b, Theta_b], strict=True):
            worst = max(worst, float(np.max(np.abs(np.concatenate(a) - np.concatenate(b)))))
    return worst
