"""CO2 and the SlowMo it delays."""

from __future__ import annotations

from typing import Literal

import numpy as np

from .problem import Problem, Trajectory, Vector


def co2(
    problem: Problem,
    H: int,
    alpha: float,
    beta: float,
    phi: float | None = None,
    penalty: Literal["gap"] | float | None = "gap",
    delay: bool = True,
) -> Trajectory:
    """A SlowMo step on the mean of the round before, shrunk by its staleness, clipped, then replace.

    at boundary t = H, 2H, ...:   send Delta_m(t) = x_m - theta_m(t), x_m: theta_m where its round began
    at the landing:               m = beta m + Dbar(t-H) / (gamma Lambda) ; m = clip(m, -phi H, phi H)
                                  Theta = Theta - alpha gamma m ; theta_m = Theta

    gamma: the mean of lr over the H steps of the round in which the landing Dbar was made; gamma = 0 is
    refused. m starts at 0 and keeps its clipped value; phi None: no clip.
    Lambda, "gap": clip(1 + d / C, 1, 10), d = ||Theta - Theta_sent||_2 of the whole model, Theta before this
    update, Theta_sent the Theta when the landing transfer was sent; C = mean of the d > 0 of all landings so
    far, this one included; Lambda = 1 where d = 0. A float: that constant, unclamped.
    First boundary with delay: nothing lands, Theta, m and theta_m stay; x_m is then theta_m(H), and every step
    is in exactly one Delta_m. delay False: the transfer lands where it is sent (d is then 0).
    Source: arXiv 2401.16265; METHODS 0 and 4.
    """
    M, T = problem.M, problem.T
    Theta = problem.theta0.copy()
    theta = [Theta.copy() for _ in range(M)]
    began = [Theta.copy() for _ in range(M)]
    momentum = np.zeros_like(Theta)
    gaps: list[float] = []
    in_flight: tuple[Vector, Vector, float] | None = None  # (Dbar, Theta at the send, gamma)
    trajectory: Trajectory = []
    for round_start in range(0, T, H):
        for t in range(round_start + 1, min(round_start + H, T) + 1):
            for m in range(M):
                theta[m] = theta[m] - problem.eta(t) * problem.gradient(m, t, theta[m])
            if t == round_start + H:
                eta = float(np.mean([problem.eta(s) for s in range(t - H + 1, t + 1)]))
                Delta = [x - local for x, local in zip(began, theta, strict=True)]
                sent = (np.mean(np.stack(Delta), axis=0), Theta.copy(), eta)
                landing, in_flight = (in_flight, sent) if delay else (sent, None)
                if landing is not None:
                    Dbar, Theta_sent, gamma = landing
                    if gamma == 0:
                        raise ValueError(f"the mean inner learning rate of the round ending at step {t} is 0")
                    gaps.append(float(np.linalg.norm(Theta - Theta_sent)))
                    Lambda = _penalty(penalty, gaps)
                    momentum = beta * momentum + Dbar / (gamma * Lambda)
                    if phi is not None:
                        momentum = np.clip(momentum, -phi * H, phi * H)
                    Theta = Theta - alpha * gamma * momentum
                    theta = [Theta.copy() for _ in range(M)]
                began = [local.copy() for local in theta]
            trajectory.append(([problem.split(x) for x in theta], problem.split(Theta)))
    return trajectory


def _penalty(penalty: Literal["gap"] | float | None, gaps: list[float]) -> float:
    """Lambda of the landing whose gap is the last of `gaps`."""
    if penalty is None:
        return 1.0
    if penalty != "gap":
        return float(penalty)
    if gaps[-1] == 0:
        return 1.0
    moved = [gap for gap in gaps if gap > 0]
    C = sum(moved) / len(moved)
    return min(max(1 + gaps[-1] / C, 1.0), 10.0)


def slowmo(problem: Problem, H: int, alpha: float, beta: float) -> Trajectory:
    """Slow momentum over blocking rounds of H local SGD steps.

    m_{k+1} = beta m_k + (x_{k,0} - mean_m x_{k,H}) / gamma_k ; x_{k+1,0} = x_{k,0} - alpha gamma_k m_{k+1}

    gamma_k: mean of lr over the H steps of round k. Theta of the trajectory is the last x_{k,0}.
    Source: SlowMo, arXiv 1910.00643; METHODS 4.
    """
    x_start = problem.theta0.copy()
    slow = np.zeros_like(x_start)
    trajectory: Trajectory = []
    t = 0
    while t < problem.T:
        x = [x_start.copy() for _ in range(problem.M)]
        rates: list[float] = []
        while t < problem.T and len(rates) < H:
            t += 1
            rates.append(problem.eta(t))
            x = [x[m] - rates[-1] * problem.gradient(m, t, x[m]) for m in range(problem.M)]
            if len(rates) == H:
                gamma = sum(rates) / H
                slow = beta * slow + (x_start - sum(x, np.zeros_like(x_start)) / problem.M) / gamma
                x_start = x_start - alpha * gamma * slow
                x = [x_start.copy() for _ in range(problem.M)]
            trajectory.append(([problem.split(one) for one in x], problem.split(x_start)))
    return trajectory
