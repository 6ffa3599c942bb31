"""DiLoCoX whole: one-round delay, low rank in int4 with error feedback, a rank and an interval that follow the spectrum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .codecs import int4_roundtrip
from .dilocox import orthonormalize
from .problem import Fragments, Problem, Trajectory, Vector

LAG = 2
"""How many sends old the rank is that an interval follows [D]."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What is sent; the defaults are the method's but for `rank`.

    Attributes:
        rank: r_1, the first and the largest rank.
        block: values that share an int4 scale; None sends exact numbers.
        rank_min: the lowest rank; `rank` fixes it.
        energy: share of the squared singular values that the effective rank's directions hold.
        window: c, outer steps that a rank is the mean of.
    """

    rank: int
    block: int | None = 256
    rank_min: int = 1
    energy: float = 0.95
    window: int = 5


class Round(NamedTuple):
    """What was sent at the end of a round: after inner step `sent_at`, at `rank`; what its Q says of the spectrum."""

    sent_at: int
    rank: int
    effective_rank: int


Disturb = Callable[[Vector], Vector]
"""What rounding errors do to the values of a message, or to its mean, before they are coded: here nothing."""


def matrices(shapes: Sequence[tuple[int, ...]], rank: int) -> dict[int, tuple[int, int]]:
    """Rows a and columns b of the parameters sent at low rank: those with r_1 (a + b) < a b; (out, everything else)."""
    sides = {i: (shape[0], math.prod(shape[1:])) for i, shape in enumerate(shapes) if len(shape) > 1}
    return {i: (a, b) for i, (a, b) in sides.items() if rank * (a + b) < a * b}


def spectrum_share(Qs: Sequence[Vector]) -> Vector:
    """Entry r - 1: the share of all squared singular values that the leading r of each matrix hold, together."""
    squares = np.sum([np.linalg.svd(Q, compute_uv=False) ** 2 for Q in Qs], axis=0)
    return np.asarray(np.cumsum(squares) / np.sum(squares))


def next_rank(found: Sequence[int], given: Compression) -> int:
    """r_{t+1}: the mean of the last c effective ranks, rounded up, in r_min .. r_1; r_1 until there are c."""
    if len(found) < given.window:
        return given.rank
    mean = Fraction(sum(found[-given.window :]), given.window)
    return min(max(math.ceil(mean), given.rank_min), given.rank)


def interval(H: int, ranks: Sequence[int], hides_in: int = 0) -> int:
    """Inner steps between send k = len(ranks) and the next: H_1 r / r_1 to the nearest integer, the r of send k - 2.

    Decided when send k leaves, before transfer k - 1 lands there: what all regions hold is transfer k - 2. A tie goes to
    the even integer. A transfer takes `hides_in` steps: measured at the first landing, known two landings later.
    """
    if len(ranks) <= LAG:
        return H
    at_least = hides_in if len(ranks) > 2 * LAG else 0
    return min(max(round(Fraction(H * ranks[-1 - LAG], ranks[0])), at_least, 1), H)


def transfer(
    meant: Sequence[Fragments],
    sides: Mapping[int, tuple[int, int]],
    Q: Mapping[int, Vector],
    rank: int,
    block: int | None,
    disturb: Disturb,
) -> tuple[Fragments, list[Fragments], dict[int, Vector]]:
    """One PowerSGD iteration on the fragments `meant` by each region: (Dbar, what each sent, mean Q).

    P = orthonormalize(mean_m Delta_m Q) ; Q_m = Delta_m^T P ; Q = mean_m Q_m ; Dbar = P Q^T ; sent_m = P Q_m^T

    Both means are of int4 numbers, in one message each: the factors' columns, one after the other, matrix by matrix,
    and on the first message behind them all other parameters as they are.
    """
    rest = [i for i in range(len(meant[0])) if i not in sides]
    deltas = [{i: fragments[i].reshape(shape) for i, shape in sides.items()} for fragments in meant]
    sketches = [
        [(delta[i] @ Q[i][:, :rank]).T for i in sides] + [fragments[i] for i in rest]
        for delta, fragments in zip(deltas, meant, strict=True)
    ]
    mean, own = averaged(sketches, block, disturb)
    P = {i: orthonormalize(sketch.T) for i, sketch in zip(sides, mean, strict=False)}
    mean_Q, own_Q = averaged([[(delta[i].T @ P[i]).T for i in sides] for delta in deltas], block, disturb)

    def whole(factors: Sequence[Vector], first: Sequence[Vector]) -> Fragments:
        parts = {i: (P[i] @ factor).ravel() for i, factor in zip(sides, factors, strict=True)}
        parts.update(zip(rest, first[len(sides) :], strict=True))
        return [parts[i] for i in sorted(parts)]

    sent = [whole(factors, first) for factors, first in zip(own_Q, own, strict=True)]
    return whole(mean_Q, mean), sent, {i: factor.T for i, factor in zip(sides, mean_Q, strict=True)}


def averaged(
    messages: Sequence[Sequence[Vector]], block: int | None, disturb: Disturb
) -> tuple[list[Vector], list[list[Vector]]]:
    """The mean of the regions' messages as all get it, and each message as its receivers read it.

    Blocks count from the start of a message. Between more than two regions the mean travels in int4, too.
    """

    def through(values: Vector) -> Vector:
        values = disturb(values)
        return values if block is None else int4_roundtrip(values, block)

    shapes = [part.shape for part in messages[0]]
    cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def parts(values: Vector) -> list[Vector]:
        return [part.reshape(shape) for part, shape in zip(np.split(values, cuts), shapes, strict=True)]

    own = [through(np.concatenate([part.ravel() for part in message])) for message in messages]
    mean = np.mean(own, axis=0)
    return parts(through(mean) if len(own) > 2 else mean), [parts(values) for values in own]


def warm_start(Q: Vector, before: Vector) -> Vector:
    """The Q of the next transfer: each new column with 1 as its largest magnitude [D].

    That length does not matter to the exact P, but to int4 where a block spans columns. A column of zeros, and those
    beyond the rank, stay what they were.
    """
    kept = before.copy()
    for column in range(Q.shape[1]):
        top = np.max(np.abs(Q[:, column]))
        if top > 0:
            kept[:, column] = Q[:, column] / top
    return kept


def dilocox(
    problem: Problem,
    shapes: Sequence[tuple[int, ...]],
    H: int,
    outer_lr: float,
    mu: float,
    first_Q: Sequence[Vector],
    given: Compression,
    hides_in: int = 0,
    disturb: Disturb = lambda values: values,
) -> tuple[Trajectory, list[Round]]:
    """A model of parameters of these shapes, sent as one fragment.

    At the end of round t, with residual e_m and rank r_t:
    meant_m = x_m - theta_m + e_m ; Dbar_t, sent_m, Q = transfer(meant, Q) ; e_m = meant_m - sent_m
    Theta_t = Nesterov(Theta_{t-1}, Dbar_{t-1}) ; theta_m = Theta_t     (nothing lands after round 1)
    x_m is theta_m where round t began

    `first_Q` holds a Q (b, r_1) for each matrix; `problem.sizes` are the numbers of values of `shapes`.
    Source: arXiv 2506.21263; METHODS 0 and 5.
    """
    if problem.sizes != tuple(math.prod(shape) for shape in shapes):
        raise ValueError(f"sizes={problem.sizes} must be the numbers of values of {shapes}")
    sides = matrices(shapes, given.rank)
    Q = dict(zip(sides, first_Q, strict=True))
    Theta = problem.theta0.copy()
    theta = [Theta.copy() for _ in range(problem.M)]
    began = [Theta.copy() for _ in range(problem.M)]
    e = [np.zeros_like(Theta) for _ in range(problem.M)]
    buf = Dbar_before = None
    rank, send_at, rounds = given.rank, H, list[Round]()
    trajectory: Trajectory = []
    for t in range(1, problem.T + 1):
        for m in range(problem.M):
            theta[m] = theta[m] - problem.eta(t) * problem.gradient(m, t, theta[m])
        if t == send_at:
            meant = [began[m] - theta[m] + e[m] for m in range(problem.M)]
            split = [problem.split(x) for x in meant]
            Dbar, sent, Q_mean = transfer(split, sides, Q, rank, given.block, disturb)
            e = [x - np.concatenate(own) for x, own in zip(meant, sent, strict=True)]
            if Dbar_before is not None:
                buf = Dbar_before if buf is None else mu * buf + Dbar_before
                Theta = Theta - outer_lr * (Dbar_before + mu * buf)
                theta = [Theta.copy() for _ in range(problem.M)]
            began = [x.copy() for x in theta]
            Dbar_before = np.concatenate(Dbar)
            share = spectrum_share(list(Q_mean.values()))
            rounds.append(Round(t, rank, int(np.argmax(share >= given.energy)) + 1))
            send_at = t + interval(H, [r.rank for r in rounds], hides_in)
            Q = {i: warm_start(Q_mean[i], Q[i]) for i in sides}
            rank = next_rank([r.effective_rank for r in rounds], given)
        trajectory.append(([problem.split(x) for x in theta], problem.split(Theta)))
    return trajectory, rounds
