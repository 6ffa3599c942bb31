"""MuLoCo: DiLoCo around Muon for matrices and AdamW for vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Problem, Trajectory, Vector

QUINTIC = (3.4445, -4.7750, 2.0315)
"""The coefficients of Muon's iteration (Keller Jordan)."""


def muloco(
    problem: Problem,
    shapes: Sequence[tuple[int, ...]],
    H: int,
    outer_lr: float,
    outer_mu: float,
    weight_decay: float = 0.1,
    momentum: float = 0.9,
    nesterov: bool = False,
    beta2: float = 0.99,
) -> Trajectory:
    """Rounds of H inner steps from the common Theta; each fragment of the problem is one parameter of the given shape.

    u = outer_mu u + outer_lr mean_m (Theta - theta_m) ; Theta = Theta - outer_mu u - outer_lr mean_m (Theta - theta_m)

    Matrices take steps of `Muon`, vectors of `AdamW` without weight decay; nothing is quantized (`quantized`). Moments stay in
    their region. A last round of fewer than H steps is not synchronized.
    Source: arXiv 2505.23725, in the form of its authors' code (u has the learning rate in it); METHODS 7.
    """
    M = problem.M
    Theta = problem.start()
    theta = [problem.start() for _ in range(M)]
    inner = [
        [
            Muon(shape, weight_decay, momentum, nesterov) if len(shape) == 2 else AdamW(shape, beta2)
            for shape in shapes
        ]
        for _ in range(M)
    ]
    u = [np.zeros_like(part) for part in Theta]
    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(M):
            grad = problem.gradient(m, t, theta[m])
            theta[m] = [
                optimizer.step(x, g, problem.eta(t))
                for optimizer, x, g in zip(inner[m], theta[m], grad, strict=True)
            ]
        if t % H == 0:
            for p in range(len(shapes)):
                mean = np.mean([Theta[p] - theta[m][p] for m in range(M)], axis=0)
                u[p] = outer_mu * u[p] + outer_lr * mean
                Theta[p] = Theta[p] - outer_mu * u[p] - outer_lr * mean
            theta = [[part.copy() for part in Theta] for _ in range(M)]
        trajectory.append(([[x.copy() for x in local] for local in theta], [x.copy() for x in Theta]))
    return trajectory


class Muon:
    """B = mu B + (1 - mu) G ; W = (1 - lr wd) W - 0.2 lr sqrt(max(a, b)) orthogonalize(B)

    With a Nesterov step, orthogonalize((1 - mu) G + mu B).
    Source: torch.optim.Muon, with the learning rate of arXiv 2502.16982; METHODS 7 (mu = 0.9, no Nesterov step).
    """

    def __init__(
        self, shape: tuple[int, ...], weight_decay: float, mu: float = 0.9, nesterov: bool = False
    ) -> None:
        self.shape, self.weight_decay, self.mu, self.nesterov = shape, weight_decay, mu, nesterov
        self.B = np.zeros(shape)

    def step(self, x: Vector, grad: Vector, lr: float) -> Vector:
        G = grad.reshape(self.shape)
        self.B = self.mu * self.B + (1 - self.mu) * G
        update = orthogonalize((1 - self.mu) * G + self.mu * self.B if self.nesterov else self.B)
        W = (1 - lr * self.weight_decay) * x.reshape(self.shape)
        return (W - 0.2 * lr * np.sqrt(max(self.shape)) * update).ravel()


def orthogonalize(X: Vector) -> Vector:
    """Five steps of X = a X + b (X X^T) X + c (X X^T)^2 X from X / ||X||, which bring its singular values near 1."""
    a, b, c = QUINTIC
    X = X / max(np.linalg.norm(X), 1e-7)
    for _ in range(5):
        X = a * X + (b * X @ X.T + c * (X @ X.T) @ (X @ X.T)) @ X
    return X


class AdamW:
    """m = 0.9 m + 0.1 g ; v = b v + (1 - b) g g ; x = x - lr (m / (1 - 0.9^t)) / (sqrt(v / (1 - b^t)) + 1e-8)

    Source: arXiv 1711.05101, without weight decay; METHODS 7 (b = 0.99).
    """

    def __init__(self, shape: tuple[int, ...], beta2: float = 0.99) -> None:
        n, self.beta2 = int(np.prod(shape)), beta2
        self.m, self.v, self.t = np.zeros(n), np.zeros(n), 0

    def step(self, x: Vector, grad: Vector, lr: float) -> Vector:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * grad
        self.v = self.beta2 * self.v + (1 - self.beta2) * grad * grad
        return x - lr * (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - self.beta2**self.t)) + 1e-8)
