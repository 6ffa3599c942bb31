"""DiLoCo, written as the two nested loops of its paper."""

from __future__ import annotations

import numpy as np

from .problem import Problem, Trajectory


def diloco(problem: Problem, H: int, outer_lr: float, mu: float) -> Trajectory:
    """Rounds of H local steps from the common Theta, then one outer Nesterov step on the mean outer gradient.

    Delta_m = Theta - theta_m ; g = mean_m Delta_m ; buf = mu buf + g (first: buf = g)
    Theta = Theta - outer_lr (g + mu buf) ; theta_m = Theta

    A last round of fewer than H steps is not synchronized.
    Source: arXiv 2311.08105; METHODS 0 and 1.
    """
    M, T = problem.M, problem.T
    Theta = problem.theta0.copy()
    theta = [Theta.copy() for _ in range(M)]
    buf = None
    trajectory: Trajectory = []
    for round_start in range(0, T, H):
        for t in range(round_start + 1, min(round_start + H, T) + 1):
            for m in range(M):
                theta[m] = theta[m] - problem.eta(t) * problem.gradient(m, t, theta[m])
            if t == round_start + H:
                g = np.zeros_like(Theta)
                for m in range(M):
                    g = g + (Theta - theta[m])
                g = g / M
                buf = g if buf is None else mu * buf + g
                Theta = Theta - outer_lr * (g + mu * buf)
                theta = [Theta.copy() for _ in range(M)]
            trajectory.append(([problem.split(local) for local in theta], problem.split(Theta)))
    return trajectory
