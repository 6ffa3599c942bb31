"""CoCoDC: delay compensation in place of the mix, and adaptive transmission."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

import numpy as np

from .problem import Problem, Trajectory, Vector

Mode = Literal["fixed", "lr_normalized", "adaptive", "additive"]


EPSILON = 1e-30
"""METHODS writes 1e-8; at the scale of weights that would switch the term off, so only the division by zero is kept out."""


def compensate(
    theta_now: Vector,
    snapshot: Vector,
    Theta_new: Vector,
    tau: int,
    mode: Mode,
    strength: float,
    eta: float,
    cap: float | None = None,
) -> Vector:
    """The merge of one tensor: the tau local steps in flight, redone from Theta_new to first order.

    u = (snapshot - theta_now) / tau ; D = Theta_new - snapshot ; theta = Theta_new - tau (u + lambda u*u*D)

    fixed: lambda = strength. lr_normalized: g = u / eta ; theta = Theta_new - tau eta (g + strength g*g*D).
    adaptive: lambda = strength ||u|| / (||u*u*D|| + EPSILON), then lowered, if need be, so that
    ||lambda u*u*D|| <= cap ||u|| (cap None: no cap; it acts in this mode only).
    additive: theta = Theta_new + (theta_now - snapshot). tau = 0: theta = Theta_new, in every mode.
    Norms are of the whole tensor given. `eta` only serves lr_normalized, and must not be 0 there.
    Source: arXiv 2504.17672; METHODS 6 (scale after DC-S3GD, arXiv 1911.02516).
    """
    if tau == 0:
        return Theta_new.copy()
    if mode == "additive":
        return Theta_new + (theta_now - snapshot)
    u = (snapshot - theta_now) / tau
    D = Theta_new - snapshot
    if mode == "lr_normalized":
        g = u / eta
        return Theta_new - tau * eta * (g + strength * g * g * D)
    if mode == "fixed":
        return Theta_new - tau * (u + strength * u * u * D)
    if mode != "adaptive":
        raise ValueError(f"unknown mode {mode!r}")
    norm_u = float(np.linalg.norm(u))
    norm_uuD = float(np.linalg.norm(u * u * D))
    lambda_ = strength * norm_u / (norm_uuD + EPSILON)
    if cap is not None and lambda_ * norm_uuD > cap * norm_u:
        lambda_ = cap * norm_u / norm_uuD
    return Theta_new - tau * (u + lambda_ * u * u * D)


def cocodc_static(
    problem: Problem,
    H: int,
    tau: int,
    mode: Mode,
    strength: float,
    outer_lr: float,
    mu: float,
    cap: float | None = None,
) -> Trajectory:
    """The staggered schedule of streaming (t_p = p H // K, first send at H + t_p) merged by `compensate`.

    at t = k H + t_p:        snapshot_m = theta_m,p ; Dbar = mean_m (Theta_p - snapshot_m)
    at t = k H + t_p + tau:  Theta_p = Nesterov(Theta_p, Dbar)
                             theta_m,p = compensate(theta_m,p, snapshot_m, Theta_p, tau)

    K is the number of fragments; one fragment is one tensor (the norms). eta is the mean of lr over the tau
    steps in flight, send + 1 .. landing. Send before land at equal steps; 0 <= tau < H.
    Source: arXiv 2504.17672; METHODS 0, 2 and 6.
    """
    if not 0 <= tau < H:
        raise ValueError(f"tau={tau} must be in 0..{H - 1}")
    K = len(problem.sizes)
    Theta = problem.start()
    theta = [problem.start() for _ in range(problem.M)]
    buf: dict[int, Vector] = {}
    sent: dict[tuple[int, int], list[Vector]] = {}  # (fragment, k) -> every region's snapshot, then Dbar
    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(problem.M):
            grad = problem.gradient(m, t, theta[m])
            theta[m] = [x - problem.eta(t) * g for x, g in zip(theta[m], grad, strict=True)]
        for p in range(K):
            k, rest = divmod(t - p * H // K, H)
            if rest == 0 and k >= 1:
                snapshots = [theta[m][p].copy() for m in range(problem.M)]
                total = np.zeros_like(Theta[p])
                for snapshot in snapshots:
                    total = total + (Theta[p] - snapshot)
                sent[p, k] = [*snapshots, total / problem.M]
        for p in range(K):
            k, rest = divmod(t - tau - p * H // K, H)
            if rest == 0 and k >= 1:
                *snapshots, Dbar = sent.pop((p, k))
                buf[p] = mu * buf[p] + Dbar if p in buf else Dbar
                Theta[p] = Theta[p] - outer_lr * (Dbar + mu * buf[p])
                eta = _mean_eta(problem, t - tau, t)
                for m in range(problem.M):
                    theta[m][p] = compensate(
                        theta[m][p], snapshots[m], Theta[p], tau, mode, strength, eta, cap
                    )
        trajectory.append(([[x.copy() for x in local] for local in theta], [x.copy() for x in Theta]))
    return trajectory


def _mean_eta(problem: Problem, sent_at: int, land_at: int) -> float:
    """Mean inner learning rate of the steps sent_at + 1 .. land_at; 0 if there are none."""
    rates = [problem.eta(step) for step in range(sent_at + 1, land_at + 1)]
    return sum(rates) / len(rates) if rates else 0.0


def rhythm(K: int, H: int, T_c: float, T_s: float, gamma: float) -> tuple[int, int, int]:
    """How often and how late: (N sends in H steps, h steps between two sends, tau steps in flight).

    N = min(H, max(K, floor(gamma H T_c / T_s))) ; h = max(1, floor(H / N)) ; tau = max(1, ceil(T_s / T_c))

    Exact on the decimal numbers that T_c, T_s, gamma print as: 0.4 * 100 * 0.1 / 0.5 is 8, never 7.999...
    Source: arXiv 2504.17672; METHODS 6.
    """
    step, transfer, share = (Fraction(repr(float(x))) for x in (T_c, T_s, gamma))
    N = min(H, max(K, math.floor(share * H * step / transfer)))
    return N, max(1, H // N), max(1, math.ceil(transfer / step))


def _choose(
    t: int, K: int, H: int, tau: int, sends: list[tuple[int, int]], rate: Callable[[int, int, int], float]
) -> int | None:
    """The fragment to send at step t, given all (step, fragment) before it; None where all are in flight.

    See `adaptive_schedule` for the rules.
    """
    times = {p: [0] + [step for step, q in sends if q == p] for p in range(K)}  # 0: the start of training
    free = [p for p in range(K) if len(times[p]) == 1 or times[p][-1] + tau < t]
    overdue = [p for p in free if t - times[p][-1] >= H]
    if overdue:
        return min(overdue, key=lambda p: (times[p][-1], p))
    never = [p for p in free if len(times[p]) == 1]
    if never:
        return never[0]
    if not free:
        return None
    return min(free, key=lambda p: (-rate(p, times[p][-1], times[p][-1] - times[p][-2]), p))


def adaptive_schedule(
    K: int,
    H: int,
    T: int,
    T_c: float,
    T_s: float,
    gamma: float,
    change_rate_fn: Callable[[int, int, int], float],
) -> list[tuple[int, int]]:
    """Every (step, fragment) sent in 1..T: at t = h, 2h, 3h, ... one fragment that is not in flight.

    1. one not sent for >= H steps, the oldest; 2. else one never sent; 3. else the largest R_p; ties by p.

    In flight at t: sent at s with s < t <= s + tau, so one landing at t is not free at t (send before land).
    "Not sent for >= H steps": t - last send >= H; for one never sent, t >= H (counted from step 0), so it is
    the oldest. The opportunities h, 2h, ... do not restart at multiples of H; one that finds every fragment
    in flight is lost. change_rate_fn(p, sent_at, interval) is R_p of the last transfer of p, sent at
    `sent_at` and landed before t; `interval` is I_p, the steps between its last two sends (first: from 0).
    Source: arXiv 2504.17672; METHODS 6.
    """
    _, h, tau = rhythm(K, H, T_c, T_s, gamma)
    sends: list[tuple[int, int]] = []
    for t in range(h, T + 1, h):
        p = _choose(t, K, H, tau, sends, change_rate_fn)
        if p is not None:
            sends.append((t, p))
    return sends


def cocodc_with_sends(
    problem: Problem,
    H: int,
    K: int,
    T_c: float,
    T_s: float,
    gamma: float,
    mode: Mode,
    strength: float,
    outer_lr: float,
    mu: float,
    cap: float | None = None,
) -> tuple[Trajectory, list[tuple[int, int]]]:
    """`cocodc`, and the (step, fragment) of its sends."""
    if len(problem.sizes) != K:
        raise ValueError(f"K={K} must be the number of fragments {len(problem.sizes)}")
    _, h, tau = rhythm(K, H, T_c, T_s, gamma)
    Theta = problem.start()
    theta = [problem.start() for _ in range(problem.M)]
    buf: dict[int, Vector] = {}
    snapshots: dict[int, list[Vector]] = {}  # by fragment: never two transfers of one in flight
    Dbar: dict[int, Vector] = {}
    sends: list[tuple[int, int]] = []

    def change_rate(p: int, sent_at: int, interval: int) -> float:
        return float(np.linalg.norm(Dbar[p])) / (problem.sizes[p] * interval)

    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(problem.M):
            grad = problem.gradient(m, t, theta[m])
            theta[m] = [x - problem.eta(t) * g for x, g in zip(theta[m], grad, strict=True)]
        if t % h == 0:
            choice = _choose(t, K, H, tau, sends, change_rate)
            if choice is not None:
                sends.append((t, choice))
                snapshots[choice] = [theta[m][choice].copy() for m in range(problem.M)]
                Dbar[choice] = np.mean(np.stack([Theta[choice] - x for x in snapshots[choice]]), axis=0)
        for p in [q for step, q in sends if step + tau == t]:
            buf[p] = mu * buf[p] + Dbar[p] if p in buf else Dbar[p]
            Theta[p] = Theta[p] - outer_lr * (Dbar[p] + mu * buf[p])
            eta = _mean_eta(problem, t - tau, t)
            for m in range(problem.M):
                theta[m][p] = compensate(
                    theta[m][p], snapshots[p][m], Theta[p], tau, mode, strength, eta, cap
                )
        trajectory.append(([[x.copy() for x in local] for local in theta], [x.copy() for x in Theta]))
    return trajectory, sends


def cocodc(
    problem: Problem,
    H: int,
    K: int,
    T_c: float,
    T_s: float,
    gamma: float,
    mode: Mode,
    strength: float,
    outer_lr: float,
    mu: float,
    cap: float | None = None,
) -> Trajectory:
    """Adaptive transmission with delay compensation, the measured times constant from the first step.

    N, h, tau = rhythm(K, H, T_c, T_s, gamma) ; sends: `adaptive_schedule` ; landings tau later: `compensate`
    R_p = ||Dbar_p||_2 / (n_p I_p), n_p the number of values of fragment p, Dbar_p of its last landing

    Source: arXiv 2504.17672; METHODS 0 and 6.
    """
    return cocodc_with_sends(problem, H, K, T_c, T_s, gamma, mode, strength, outer_lr, mu, cap)[0]
