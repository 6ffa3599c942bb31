"""Streaming DiLoCo: fragments sent in turn, landed later, mixed in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Problem, Trajectory, Vector


def streaming(
    problem: Problem,
    H: int,
    P: int,
    tau: int,
    alpha: float,
    outer_lr: float,
    mu: float,
    offsets: Sequence[int] | None = None,
) -> Trajectory:
    """Fragment p is sent at H + t_p, 2H + t_p, ... (t_p = p H // P), lands tau steps later and is mixed in.

    at t = k H + t_p, k >= 1:        Dbar_p = mean_m (x_m,p - theta_m,p)
    at t = k H + t_p + tau, k >= 1:  Theta_p = Nesterov(Theta_p, Dbar_p)
                                     theta_m,p = alpha theta_m,p + (1 - alpha) Theta_p

    x_m,p is Theta_p, but theta_m,p of the last send if p has not landed since: at the second send with tau = H.
    At equal steps every send comes before every landing; 0 <= tau <= H. `offsets` replaces the t_p.
    Source: arXiv 2501.18512; METHODS 0 and 2.
    """
    if len(problem.sizes) != P or not 0 <= tau <= H:
        raise ValueError(f"P={P} must be the fragments {len(problem.sizes)}, and 0 <= tau={tau} <= H={H}")
    t_ = [p * H // P for p in range(P)] if offsets is None else list(offsets)
    Theta = problem.start()
    theta = [problem.start() for _ in range(problem.M)]
    buf: list[Vector | None] = [None] * P
    Dbar: dict[tuple[int, int], Vector] = {}  # (fragment, step of its send) -> mean outer gradient
    unlanded: dict[
        int, list[Vector]
    ] = {}  # fragment -> theta of every region at a send since which it has not landed
    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(problem.M):
            grad = problem.gradient(m, t, theta[m])
            theta[m] = [x - problem.eta(t) * g for x, g in zip(theta[m], grad, strict=True)]

        for p in range(P):
            if (t - t_[p]) % H == 0 and t - t_[p] >= H:
                total = np.zeros_like(Theta[p])
                x = unlanded.get(p, [Theta[p]] * problem.M)
                for m in range(problem.M):
                    total = total + (x[m] - theta[m][p])
                Dbar[p, t] = total / problem.M
                unlanded[p] = [local[p].copy() for local in theta]

        for p in range(P):
            if (t - t_[p] - tau) % H == 0 and t - t_[p] - tau >= H:
                g = Dbar.pop((p, t - tau))
                unlanded.pop(p)
                old = buf[p]
                new = g if old is None else mu * old + g
                buf[p] = new
                Theta[p] = Theta[p] - outer_lr * (g + mu * new)
                for m in range(problem.M):
                    theta[m][p] = alpha * theta[m][p] + (1 - alpha) * Theta[p]

        trajectory.append(([[x.copy() for x in local] for local in theta], [x.copy() for x in Theta]))
    return trajectory
