"""SparseLoCo: the largest values of each tile, in two bits, with error feedback and plain SGD outside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Problem, Trajectory, Vector


def sparseloco(
    problem: Problem, shapes: Sequence[tuple[int, ...]], H: int, outer_lr: float, k: int, beta: float
) -> Trajectory:
    """Rounds of H local steps from the common Theta; each fragment of the problem is one parameter of the given shape.

    a_m = beta e_m + Theta - theta_m ; s_m = message(a_m) ; e_m = a_m - s_m
    Theta = Theta - outer_lr mean_m s_m ; theta_m = Theta

    A last round of fewer than H steps is not synchronized.
    Source: arXiv 2508.15706; METHODS 7.
    """
    M = problem.M
    Theta = problem.start()
    theta = [problem.start() for _ in range(M)]
    e = [[np.zeros_like(part) for part in Theta] for _ in range(M)]
    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(M):
            grad = problem.gradient(m, t, theta[m])
            theta[m] = [x - problem.eta(t) * g for x, g in zip(theta[m], grad, strict=True)]
        if t % H == 0:
            for p, shape in enumerate(shapes):
                mean = np.zeros_like(Theta[p])
                for m in range(M):
                    a = beta * e[m][p] + Theta[p] - theta[m][p]
                    s = message(a.reshape(shape), k).ravel()
                    e[m][p] = a - s
                    mean = mean + s / M
                Theta[p] = Theta[p] - outer_lr * mean
            theta = [[part.copy() for part in Theta] for _ in range(M)]
        trajectory.append(([[x.copy() for x in local] for local in theta], [x.copy() for x in Theta]))
    return trajectory


def message(a: Vector, k: int) -> Vector:
    """What is left of a parameter: tile by tile the k largest magnitudes, of equal ones the first, in two bits.

    A tile of a matrix has at most 64 rows, and 4096 values; where there are fewer columns than fill it, more rows. A vector is
    one row. Matrices of more dimensions are matrices of their first one.
    Source: arXiv 2508.15706 (64 x 64 and 4096; what a narrow matrix does is decided here).
    """
    matrix = a.reshape(a.shape[0], -1) if a.ndim > 1 else a.reshape(1, -1)
    rows, cols = matrix.shape
    wide = min(cols, 4096 // min(rows, 64))
    high = min(rows, 4096 // wide)
    out = np.zeros_like(matrix)
    for top in range(0, rows, high):
        for left in range(0, cols, wide):
            tile = matrix[top : top + high, left : left + wide]
            out[top : top + high, left : left + wide] = _kept(tile.ravel(), k).reshape(tile.shape)
    return out.reshape(a.shape)


def _kept(tile: Vector, k: int) -> Vector:
    where = np.argsort(-np.abs(tile), kind="stable")[:k]
    out = np.zeros_like(tile)
    out[where] = two_bits(np.pad(tile[where], (0, k - len(where))))[: len(where)]
    return out


def two_bits(values: Vector) -> Vector:
    """The sign of each value, times the mean magnitude of those up to the mean magnitude, or of those above it.

    Zeros that fill up a tile of fewer than k values count.
    Source: decided here (the paper says: 2 bits and a codebook).
    """
    size = np.abs(values)
    above = size > size.mean()
    small = size[~above].mean() if (~above).any() else 0.0
    large = size[above].mean() if above.any() else 0.0
    return np.where(values < 0, -1.0, 1.0) * np.where(above, large, small)
