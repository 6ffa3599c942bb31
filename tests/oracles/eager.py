"""Eager updates: a one-round delay whose own part is fresh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Fragments, Problem, RegionTrajectory, Vector


def eager(problem: Problem, H: int, outer_lr: float, mu: float, staggered: bool = False) -> RegionTrajectory:
    """At each boundary a region steps on the last landed mean, its own share of it replaced by the fresh one.

    Delta_m(t) = Theta_m(t-H) - theta_m(t) ; Dbar(t) = mean_m Delta_m(t), known one boundary later
    g_m(t) = Dbar(t-H) + (Delta_m(t) - Delta_m(t-H)) / M
    Theta_m(t) = Nesterov(Theta_m(t-H), g_m(t)) ; theta_m = Theta_m(t)

    Primed with Dbar = Delta_m = 0, so the first boundary does step, on Delta_m / M. Momentum is per region.
    `staggered`: the same for each fragment by itself, boundaries H + t_p, 2H + t_p, ... (t_p = p H // P).
    The trajectory stops before the end, which `finished` adds.
    Source: arXiv 2502.12996; METHODS 0 and 3.
    """
    return _fragments_in_turn(problem, H, outer_lr, mu) if staggered else _rounds(problem, H, outer_lr, mu)


def mean_of(Theta: Sequence[Fragments]) -> Fragments:
    """The model to evaluate and export: mean_m Theta_m (arXiv 2502.12996; METHODS 3)."""
    return [np.mean(np.stack(parts), axis=0) for parts in zip(*Theta, strict=True)]


def finished(problem: Problem, H: int, outer_lr: float, mu: float) -> Vector:
    """The model after the end of `eager` (whole): what no boundary has taken in lands, then one blocking mean.

    With T no multiple of H the last, shorter round has a boundary of its own. Then the others' parts of the last
    outer gradients land: g_m = Dbar(T) - Delta_m(T) / M, one more outer step. If the first round is not over yet,
    the only boundary knows all parts: g = Dbar(T). One region alone has no others: nothing lands after its boundary.
    """
    M, T = problem.M, problem.T
    ends = [*range(H, T, H), T]
    Theta = [problem.theta0.copy() for _ in range(M)]
    buf = [np.zeros_like(problem.theta0) for _ in range(M)]
    last = [np.zeros_like(problem.theta0) for _ in range(M)]
    began = 0

    def step(m: int, g: Vector) -> None:
        buf[m] = mu * buf[m] + g
        Theta[m] = Theta[m] - outer_lr * (g + mu * buf[m])

    for end in ends:
        theta = [x.copy() for x in Theta]
        for t in range(began + 1, end + 1):
            theta = [theta[m] - problem.eta(t) * problem.gradient(m, t, theta[m]) for m in range(M)]
        fresh = [Theta[m] - theta[m] for m in range(M)]
        alone_or_first = M == 1 or T < H
        for m in range(M):
            step(m, sum(fresh) / M if alone_or_first else sum(last) / M + (fresh[m] - last[m]) / M)
        last, began = fresh, end
    if M > 1 and T >= H:
        for m in range(M):
            step(m, sum(last) / M - last[m] / M)
    return np.asarray(sum(Theta) / M)


def _rounds(problem: Problem, H: int, outer_lr: float, mu: float) -> RegionTrajectory:
    """The whole model at once: rounds of H steps."""
    M, T = problem.M, problem.T
    Theta = [problem.theta0.copy() for _ in range(M)]
    theta = [problem.theta0.copy() for _ in range(M)]
    buf: list[Vector | None] = [None] * M
    Delta_old = [np.zeros_like(problem.theta0) for _ in range(M)]
    Dbar_old = np.zeros_like(problem.theta0)
    trajectory: RegionTrajectory = []
    for round_start in range(0, T, H):
        for t in range(round_start + 1, min(round_start + H, T) + 1):
            for m in range(M):
                theta[m] = theta[m] - problem.eta(t) * problem.gradient(m, t, theta[m])
            if t == round_start + H:
                Delta = [Theta[m] - theta[m] for m in range(M)]
                for m in range(M):
                    g = Dbar_old + (Delta[m] - Delta_old[m]) / M
                    old = buf[m]
                    new = g if old is None else mu * old + g
                    buf[m] = new
                    Theta[m] = Theta[m] - outer_lr * (g + mu * new)
                    theta[m] = Theta[m].copy()
                Delta_old = Delta
                Dbar_old = np.mean(np.stack(Delta), axis=0)
            trajectory.append(([problem.split(x) for x in theta], [problem.split(x) for x in Theta]))
    return trajectory


def _fragments_in_turn(problem: Problem, H: int, outer_lr: float, mu: float) -> RegionTrajectory:
    """Each fragment by itself: `boundary` counts 1, 2, ... for the one whose turn it is."""
    M, P = problem.M, len(problem.sizes)
    Theta = [problem.start() for _ in range(M)]
    theta = [problem.start() for _ in range(M)]
    Delta = {(m, p, 0): np.zeros(problem.sizes[p]) for m in range(M) for p in range(P)}
    buf: dict[tuple[int, int], Vector] = {}
    trajectory: RegionTrajectory = []
    for t in range(1, problem.T + 1):
        for m in range(M):
            grad = problem.gradient(m, t, theta[m])
            theta[m] = [x - problem.eta(t) * g for x, g in zip(theta[m], grad, strict=True)]
        for p in range(P):
            boundary, rest = divmod(t - p * H // P, H)
            if rest != 0 or boundary < 1:
                continue
            Dbar = np.mean(np.stack([Delta[m, p, boundary - 1] for m in range(M)]), axis=0)
            for m in range(M):
                Delta[m, p, boundary] = Theta[m][p] - theta[m][p]
                g = Dbar + (Delta[m, p, boundary] - Delta[m, p, boundary - 1]) / M
                buf[m, p] = mu * buf[m, p] + g if (m, p) in buf else g
                Theta[m][p] = Theta[m][p] - outer_lr * (g + mu * buf[m, p])
                theta[m][p] = Theta[m][p].copy()
        trajectory.append(([[x.copy() for x in y] for y in theta], [[x.copy() for x in y] for y in Theta]))
    return trajectory
