"""DiLoCo whose outer gradients are quantized with error feedback, and whose mean is quantized a second time (MuLoCo)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .problem import Problem, Trajectory, Vector

Quantize = Callable[[Vector], Vector]
"""From values to what their bytes decode to."""


def quantized(
    problem: Problem, H: int, outer_lr: float, mu: float, quantize: Quantize, beta: float, again: bool
) -> Trajectory:
    """Rounds of H local steps from the common Theta, then one outer Nesterov step on the mean of what regions sent.

    a_m = beta e_m + Theta - theta_m ; s_m = Q(a_m) ; e_m = a_m - s_m
    g = mean_m s_m, or Q(mean_m s_m) with `again` ; buf = mu buf + g ; Theta = Theta - outer_lr (g + mu buf) ; theta_m = Theta

    Q sees the whole model as one vector. No residual has the error of the second quantization. A last round of fewer than H
    steps is not synchronized.
    Source: arXiv 2505.23725 and METHODS 7: the authors quantize the mean of 2 and 4 bits a second time, that of top-k not.
    """
    M = problem.M
    Theta = problem.theta0.copy()
    theta = [Theta.copy() for _ in range(M)]
    e = np.zeros((M, len(Theta)))
    buf = np.zeros_like(Theta)
    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(M):
            theta[m] = theta[m] - problem.eta(t) * problem.gradient(m, t, theta[m])
        if t % H == 0:
            a = beta * e + Theta - np.array(theta)
            s = np.array([quantize(each) for each in a])
            e = a - s
            g = s.mean(axis=0)
            if again:
                g = quantize(g)
            buf = mu * buf + g
            Theta = Theta - outer_lr * (g + mu * buf)
            theta = [Theta.copy() for _ in range(M)]
        trajectory.append(([problem.split(local) for local in theta], problem.split(Theta)))
    return trajectory


def by_block(block: int, quantize: Quantize) -> Quantize:
    """Quantize every `block` neighboring values alone; the last block may be shorter."""

    def quantized_blocks(values: Vector) -> Vector:
        parts = [quantize(values[start : start + block]) for start in range(0, len(values), block)]
        return np.concatenate(parts)

    return quantized_blocks
