"""DiLoCoX: a one-round delay, and low-rank outer gradients with error feedback."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .problem import Problem, Trajectory, Vector


def naive_delay(problem: Problem, H: int, outer_lr: float, mu: float) -> Trajectory:
    """Round k trains while the mean of round k-1 travels; it is applied at the end of round k.

    delta_m,k = x_m - theta_m, x_m: theta_m where round k began
    Theta_k = Nesterov(Theta_{k-1}, mean_m delta_m,{k-1}) ; theta_m = Theta_k

    After round 1 nothing lands: Theta_1 = Theta_0, no outer step, theta_m goes on, and round 2 begins from it:
    every step is in exactly one delta_m.
    Source: arXiv 2506.21263; METHODS 0, 3 and 5.
    """
    M, T = problem.M, problem.T
    Theta = problem.theta0.copy()
    theta = [Theta.copy() for _ in range(M)]
    began = [Theta.copy() for _ in range(M)]
    buf = None
    Dbar_before = None
    trajectory: Trajectory = []
    for round_start in range(0, T, H):
        for t in range(round_start + 1, min(round_start + H, T) + 1):
            for m in range(M):
                theta[m] = theta[m] - problem.eta(t) * problem.gradient(m, t, theta[m])
            if t == round_start + H:
                Dbar = sum((began[m] - theta[m] for m in range(M)), np.zeros_like(Theta)) / M
                if Dbar_before is not None:
                    g = Dbar_before
                    buf = g if buf is None else mu * buf + g
                    Theta = Theta - outer_lr * (g + mu * buf)
                    theta = [Theta.copy() for _ in range(M)]
                began = [x.copy() for x in theta]
                Dbar_before = Dbar
            trajectory.append(([problem.split(x) for x in theta], problem.split(Theta)))
    return trajectory


def orthonormalize(A: Vector) -> Vector:
    """The Q of A = Q R (reduced, Householder), signs chosen so that the diagonal of R is >= 0.

    A rank-deficient A still gives orthonormal columns; A with more columns than rows gives a square Q.
    Source: PowerSGD, arXiv 1905.13727; METHODS 5.
    """
    Q, R = np.linalg.qr(A)
    return Q * np.where(np.diagonal(R) < 0, -1.0, 1.0)


def lowrank_mean(deltas: list[Vector], Q0: Vector) -> tuple[Vector, Vector, list[Vector]]:
    """One PowerSGD iteration on the regions' matrices: (estimate of the mean, new Q, what each sent).

    P = orthonormalize(mean_m Delta_m Q0) ; Q_m = Delta_m^T P ; Q = mean_m Q_m
    estimate = P Q^T ; message of region m = P Q_m^T (their mean is the estimate)

    Delta_m (rows, cols), Q0 (cols, rank); the new Q is (cols, min(rows, rank)).
    Source: arXiv 1905.13727 (PowerSGD) as used by 2506.21263; METHODS 5.
    """
    P = orthonormalize(np.mean([Delta @ Q0 for Delta in deltas], axis=0))
    Qs = [Delta.T @ P for Delta in deltas]
    Q = np.mean(Qs, axis=0)
    return P @ Q.T, Q, [P @ Q_m.T for Q_m in Qs]


def lowrank_delay(
    problem: Problem,
    shape: tuple[int, int],
    H: int,
    outer_lr: float,
    mu: float,
    Q0: Vector,
    feedback: Literal["own", "mean"] | None = "own",
) -> Trajectory:
    """`naive_delay` of a model that is one matrix, its outer gradients sent at low rank with error feedback.

    meant_m = x_m - theta_m + e_m
    Dbar_k, Q, sent_m = lowrank_mean(meant, Q) ; e_m = meant_m - sent_m

    One fragment, problem.sizes == (rows * cols,), row-major. Q is warm-started from round to round; e_m
    starts at 0. No int4. feedback "mean": e_m = meant_m - Dbar_k; None: e_m = 0.
    Source: arXiv 2506.21263; METHODS 0 and 5.
    """
    if problem.sizes != (shape[0] * shape[1],):
        raise ValueError(f"sizes={problem.sizes} must be one fragment of {shape[0]} * {shape[1]} values")
    M, T = problem.M, problem.T
    Theta = problem.theta0.reshape(shape).copy()
    theta = [Theta.copy() for _ in range(M)]
    began = [Theta.copy() for _ in range(M)]
    e = [np.zeros(shape) for _ in range(M)]
    Q, buf, Dbar_before = Q0, None, None
    trajectory: Trajectory = []
    for round_start in range(0, T, H):
        for t in range(round_start + 1, min(round_start + H, T) + 1):
            for m in range(M):
                gradient = problem.gradient(m, t, theta[m].ravel()).reshape(shape)
                theta[m] = theta[m] - problem.eta(t) * gradient
            if t == round_start + H:
                meant = [began[m] - theta[m] + e[m] for m in range(M)]
                Dbar, Q, sent = lowrank_mean(meant, Q)
                if feedback is not None:
                    e = [meant[m] - (sent[m] if feedback == "own" else Dbar) for m in range(M)]
                if Dbar_before is not None:
                    buf = Dbar_before if buf is None else mu * buf + Dbar_before
                    Theta = Theta - outer_lr * (Dbar_before + mu * buf)
                    theta = [Theta.copy() for _ in range(M)]
                began = [x.copy() for x in theta]
                Dbar_before = Dbar
            trajectory.append(([[x.ravel().copy()] for x in theta], [Theta.ravel().copy()]))
    return trajectory
