"""Radial-directional averaging: the mean of norms, and the direction of the mean direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Problem, Trajectory, Vector


def radial_mean(tensors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """One parameter's outer gradients of M regions, weighted.

    R = sum_m w_m ||v_m|| / sum_m w_m ; D = sum_m w_m v_m / ||v_m|| ; R D / ||D||, and 0 where D is

    Source: arXiv 2604.21428; METHODS 7.
    """
    total = sum(weights)
    norms = [float(np.sqrt((v.ravel() ** 2).sum())) for v in tensors]
    length = sum(w * n for w, n in zip(weights, norms, strict=True)) / total
    direction = np.zeros_like(tensors[0])
    for v, w, n in zip(tensors, weights, norms, strict=True):
        if n:
            direction = direction + w * v / n
    size = float(np.sqrt((direction.ravel() ** 2).sum()))
    return length * direction / size if size else direction


def radial_diloco(problem: Problem, H: int, outer_lr: float, mu: float) -> Trajectory:
    """DiLoCo with radial means: each fragment of the problem is one parameter inside a block.

    g = radial_mean_m (Theta - theta_m) ; buf = mu buf + g ; Theta = Theta - outer_lr (g + mu buf) ; theta_m = Theta

    A last round of fewer than H steps is not synchronized.
    Source: arXiv 2311.08105 and 2604.21428; METHODS 0, 1 and 7.
    """
    Theta, buf = problem.start(), [np.zeros(size) for size in problem.sizes]
    theta = [problem.start() for _ in range(problem.M)]
    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(problem.M):
            grad = problem.gradient(m, t, theta[m])
            theta[m] = [x - problem.eta(t) * g for x, g in zip(theta[m], grad, strict=True)]
        if t % H == 0:
            for p in range(len(Theta)):
                g = radial_mean([Theta[p] - local[p] for local in theta], [1.0] * problem.M)
                buf[p] = mu * buf[p] + g
                Theta[p] = Theta[p] - outer_lr * (g + mu * buf[p])
            theta = [[x.copy() for x in Theta] for _ in range(problem.M)]
        trajectory.append(([[x.copy() for x in local] for local in theta], [x.copy() for x in Theta]))
    return trajectory


def plain_mean(tensors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """The weighted mean, for parameters outside the blocks."""
    return sum((w * v for v, w in zip(tensors, weights, strict=True)), np.zeros_like(tensors[0])) / sum(
        weights
    )
