"""The oracles against each other (METHODS 8) and against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from . import codecs
from .co2 import co2, slowmo
from .cocodc import (
    Mode,
    adaptive_schedule,
    cocodc,
    cocodc_static,
    cocodc_with_sends,
    compensate,
    rhythm,
)
from .diloco import diloco
from .dilocox import lowrank_delay, lowrank_mean, naive_delay, orthonormalize
from .eager import eager, finished, mean_of
from .problem import Problem, RegionTrajectory, Trajectory, Vector, distance, make_problem
from .streaming import streaming

BITWISE = 0.0
ROUNDING = 1e-12
SIZES = (3, 1, 4)
MODES: tuple[Mode, ...] = ("fixed", "lr_normalized", "adaptive", "additive")


def example(M: int = 3, sizes: Sequence[int] = SIZES, T: int = 43, seed: int = 0) -> Problem:
    """A problem whose T is no multiple of the H = 6 used below, with a learning rate that decays."""
    return make_problem(M, sizes, T, [0.06 - 0.02 * t / T for t in range(T)], seed)


def tiny(h: list[float], c: list[float], T: int) -> Problem:
    """One parameter starting at 1, lr 0.1, no noise: a problem for pencil and paper."""
    h_, c_ = np.array(h)[:, None], np.array(c)[:, None]
    return Problem(len(h), (1,), T, (0.1,) * T, h_, c_, np.ones(1), noise=0.0)


def only_region(trajectory: RegionTrajectory) -> Trajectory:
    """The trajectory of a single region, its Theta taken as the common one."""
    return [(theta, Theta[0]) for theta, Theta in trajectory]


def local_sgd(problem: Problem) -> list[list[Vector]]:
    """Regions that never talk: [step][region], concatenated."""
    x = [problem.theta0.copy() for _ in range(problem.M)]
    steps = []
    for t in range(1, problem.T + 1):
        x = [x[m] - problem.eta(t) * problem.gradient(m, t, x[m]) for m in range(problem.M)]
        steps.append(x)
    return steps


def values(trajectory: Trajectory) -> list[float]:
    """Theta of a one-parameter model after each step."""
    return [float(Theta[0][0]) for _, Theta in trajectory]


# -- by hand


def test_diloco_by_hand_one_step_rounds() -> None:
    """H = 1: Delta = (0.1, -0.2), then (0.10375, -0.1925); Nesterov with outer lr 0.5, mu 0.5."""
    run = diloco(tiny([1, 2], [0, 2], 2), H=1, outer_lr=0.5, mu=0.5)
    # g = -0.05, buf = -0.05:         1 + 0.5 (0.05 + 0.025)
    # g = -0.044375, buf = -0.069375: 1.0375 + 0.5 (0.044375 + 0.0346875)
    assert values(run) == pytest.approx([1.0375, 1.07703125], abs=1e-15)
    assert [theta[0][0] for theta in run[1][0]] == pytest.approx([1.07703125] * 2, abs=1e-15)


def test_diloco_by_hand_one_round_of_two_steps() -> None:
    """H = 2: locals (0.9, 1.2), then (0.81, 1.36); g = -0.085; Theta = 1 + 0.5 * 1.5 * 0.085."""
    (first, Theta_1), (second, Theta_2) = diloco(tiny([1, 2], [0, 2], 2), H=2, outer_lr=0.5, mu=0.5)
    assert [theta[0][0] for theta in first] == pytest.approx([0.9, 1.2], abs=1e-15)
    assert Theta_1[0][0] == 1.0
    assert Theta_2[0][0] == pytest.approx(1.06375, abs=1e-15)
    assert second[0][0] == second[1][0] == Theta_2[0]


@pytest.mark.parametrize("staggered", [False, True])
def test_eager_by_hand(staggered: bool) -> None:
    """H = 1, plain outer SGD with lr 1: g = Delta_m / 2, then -0.05 + (fresh own - stale own) / 2."""
    run = eager(tiny([1, 2], [0, 2], 2), H=1, outer_lr=1, mu=0, staggered=staggered)
    # Delta = (0.1, -0.2): g = (0.05, -0.1). Then Delta = (0.095, -0.18): g = (-0.0525, -0.04)
    assert [Theta[0][0] for Theta in run[0][1]] == pytest.approx([0.95, 1.1], abs=1e-15)
    assert [Theta[0][0] for Theta in run[1][1]] == pytest.approx([1.0025, 1.14], abs=1e-15)
    assert mean_of(run[1][1])[0][0] == pytest.approx(1.07125, abs=1e-15)
    # the end: Dbar = -0.0425, less the own halves 0.0475 and -0.09: g = (-0.09, 0.0475)
    assert finished(tiny([1, 2], [0, 2], 2), 1, 1, 0)[0] == pytest.approx((1.0925 + 1.0925) / 2, abs=1e-15)


def test_co2_gap_by_hand() -> None:
    """H = 1, one region: Lambda is 1 (d = 0, which no mean counts), 1 + 0.1/0.1 = 2, then 1 + 0.045/0.0725."""
    run = co2(tiny([1], [0], 4), H=1, alpha=1, beta=0, phi=None, penalty="gap")
    third = 0.9 - (0.9 - 0.81) / 2  # the second outer gradient holds the second step only
    fourth = third - 0.09 / (1 + 0.045 / ((0.1 + 0.045) / 2))
    assert values(run) == pytest.approx([1.0, 0.9, third, fourth], abs=1e-15)
    assert run[0][0][0][0][0] == pytest.approx(0.9, abs=1e-15)  # nothing has landed: local goes on


def test_co2_clip_is_kept() -> None:
    """With phi = 1, m is clip(0.1/0.1) = 1, then clip(0.5 * 1 + 0.9) = 1: steps of exactly alpha gamma."""
    run = co2(tiny([1], [0], 3), H=1, alpha=1, beta=0.5, phi=1.0, penalty=None)
    assert values(run) == pytest.approx([1.0, 0.9, 0.8], abs=1e-15)


def test_co2_clip_counts_in_rounds() -> None:
    """H = 2: phi = 0.5 bounds m by one inner learning rate; unclipped it is 0.19 / 0.1."""
    run = co2(tiny([1], [0], 4), H=2, alpha=1, beta=0, phi=0.5, penalty=None)
    assert values(run) == pytest.approx([1.0, 1.0, 1.0, 0.9], abs=1e-15)
    assert values(co2(tiny([1], [0], 4), 2, 1, 0, phi=1.0, penalty=None))[-1] == pytest.approx(0.81)


def test_co2_constant_penalty_divides() -> None:
    """A constant penalty of 2 halves the landed mean: with beta = 0, the run at half of alpha."""
    halved = co2(example(), 6, 0.8, 0.0, None, penalty=2.0)
    assert distance(halved, co2(example(), 6, 0.4, 0.0, None, penalty=None)) <= ROUNDING


def test_co2_refuses_a_round_without_learning_rate() -> None:
    """gamma = 0 has no meaning; a round with one zero rate has."""
    dead = make_problem(2, SIZES, 4, [0.05, 0.05, 0.0, 0.0], 1)
    with pytest.raises(ValueError, match="step 4"):
        co2(dead, 2, 1.0, 0.0, delay=False)
    co2(make_problem(2, SIZES, 4, [0.05, 0.05, 0.05, 0.0], 1), 2, 1.0, 0.0, delay=False)


# -- METHODS 8


@pytest.mark.parametrize("H", [1, 4, 7])
def test_one_region_with_outer_sgd_is_the_inner_optimizer(H: int) -> None:
    """M = 1, outer lr 1, no momentum: Theta - (Theta - theta) is theta, up to rounding."""
    problem = example(M=1)
    for (theta, _), (x,) in zip(diloco(problem, H, 1.0, 0.0), local_sgd(problem), strict=True):
        np.testing.assert_allclose(np.concatenate(theta[0]), x, atol=ROUNDING)


def test_every_step_with_outer_sgd_is_data_parallel_sgd() -> None:
    """H = 1, outer lr 1, no momentum: SGD on the mean of the regions' gradients."""
    problem = example()
    x = problem.theta0
    for t, (_, Theta) in enumerate(diloco(problem, 1, 1.0, 0.0), start=1):
        x = x - problem.eta(t) * np.mean([problem.gradient(m, t, x) for m in range(problem.M)], axis=0)
        np.testing.assert_allclose(np.concatenate(Theta), x, atol=ROUNDING)


def test_streaming_of_one_fragment_is_diloco() -> None:
    """P = 1, tau = 0, alpha = 0."""
    problem = example(sizes=(8,))
    assert distance(streaming(problem, 6, 1, 0, 0.0, 0.7, 0.9), diloco(problem, 6, 0.7, 0.9)) == BITWISE


def test_streaming_of_fragments_sent_together_is_diloco() -> None:
    """P = 3 with every offset 0, tau = 0, alpha = 0."""
    run = streaming(example(), 6, 3, 0, 0.0, 0.7, 0.9, offsets=[0, 0, 0])
    assert distance(run, diloco(example(), 6, 0.7, 0.9)) == BITWISE


def test_streaming_in_turn_is_not_diloco() -> None:
    """The offsets do something: staggered sends give other numbers."""
    assert distance(streaming(example(), 6, 3, 0, 0.0, 0.7, 0.9), diloco(example(), 6, 0.7, 0.9)) > 1e-3


@pytest.mark.parametrize("tau", [0, 2, 6])
def test_mixing_with_alpha_one_is_no_communication(tau: int) -> None:
    """alpha = 1 keeps the local parameters."""
    problem = example()
    for (theta, _), x in zip(streaming(problem, 6, 3, tau, 1.0, 0.7, 0.9), local_sgd(problem), strict=True):
        for m in range(problem.M):
            np.testing.assert_array_equal(np.concatenate(theta[m]), x[m])


def test_streaming_a_whole_round_late_is_naive_delay() -> None:
    """P = 1, tau = H, alpha = 0: the send of a step comes before the landing of that step."""
    problem = example(sizes=(8,))
    assert distance(streaming(problem, 6, 1, 6, 0.0, 0.4, 0.6), naive_delay(problem, 6, 0.4, 0.6)) == BITWISE


@pytest.mark.parametrize("staggered", [False, True])
def test_eager_of_one_region_is_diloco(staggered: bool) -> None:
    """M = 1: the stale part cancels; D0 + (D1 - D0), in the printed order of terms, is D1 up to rounding."""
    problem = example(M=1, sizes=(8,))
    run = only_region(eager(problem, 6, 0.7, 0.9, staggered))
    assert distance(run, diloco(problem, 6, 0.7, 0.9)) <= ROUNDING


def test_eager_staggered_of_one_region_is_streaming() -> None:
    """M = 1, three fragments in turn: streaming with tau = 0, alpha = 0."""
    run = only_region(eager(example(M=1), 6, 0.7, 0.9, staggered=True))
    assert distance(run, streaming(example(M=1), 6, 3, 0, 0.0, 0.7, 0.9)) <= ROUNDING


def test_eager_regions_differ_and_stay_together() -> None:
    """Theta_m differ, by a bounded amount; staggered with one fragment is the whole-model form."""
    problem = example(sizes=(8,), T=240)
    run = eager(problem, 6, 0.4, 0.5)
    other = eager(problem, 6, 0.4, 0.5, staggered=True)
    spread = [max(float(np.ptp([Theta[m][0][i] for m in range(3)])) for i in range(8)) for _, Theta in run]
    assert 1e-3 < max(spread) < 5
    for (_, left), (_, right) in zip(run, other, strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), atol=ROUNDING)


def test_co2_without_its_additions_is_slowmo() -> None:
    """No penalty, no clip, no delay."""
    run = co2(example(), 6, 0.9, 0.5, phi=None, penalty=None, delay=False)
    assert distance(run, slowmo(example(), 6, 0.9, 0.5)) <= ROUNDING


def test_co2_without_momentum_is_naive_delay() -> None:
    """beta = 0, no penalty, no clip: gamma cancels and the outer step is plain SGD, one round late."""
    run = co2(example(), 6, 0.5, 0.0, phi=None, penalty=None)
    assert distance(run, naive_delay(example(), 6, 0.5, 0.0)) <= ROUNDING


def test_slowmo_without_momentum_is_diloco() -> None:
    """beta = 0 is DiLoCo with a plain outer step."""
    assert distance(slowmo(example(), 6, 0.9, 0.0), diloco(example(), 6, 0.9, 0.0)) <= ROUNDING


def test_gap_penalty_without_delay_is_one() -> None:
    """What lands where it is sent is not stale."""
    left = co2(example(), 6, 0.9, 0.5, penalty="gap", delay=False)
    assert distance(left, co2(example(), 6, 0.9, 0.5, penalty=None, delay=False)) == BITWISE


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("feedback", ["own", "mean", None])
def test_full_rank_is_naive_delay(shape: tuple[int, int], feedback: str | None) -> None:
    """At rank min(rows, cols) the estimate is the mean itself; whatever own messages miss cancels in it."""
    problem = example(sizes=(shape[0] * shape[1],))
    Q0 = np.random.default_rng(5).standard_normal((shape[1], min(shape)))
    run = lowrank_delay(problem, shape, 6, 0.4, 0.6, Q0, feedback)  # type: ignore[arg-type]
    assert distance(run, naive_delay(problem, 6, 0.4, 0.6)) <= 1e-9


def test_lowrank_messages() -> None:
    """The mean of the messages is the estimate, of the rank asked for; rank 1 is exact on a rank-1 matrix."""
    rng = np.random.default_rng(2)
    deltas = [rng.standard_normal((5, 4)) for _ in range(3)]
    estimate, Q, sent = lowrank_mean(deltas, rng.standard_normal((4, 2)))
    np.testing.assert_allclose(np.mean(sent, axis=0), estimate, atol=ROUNDING)
    assert Q.shape == (4, 2)
    assert np.linalg.matrix_rank(estimate) == 2
    outer = np.outer(rng.standard_normal(5), rng.standard_normal(4))
    exact, _, _ = lowrank_mean([outer, outer], rng.standard_normal((4, 1)))
    np.testing.assert_allclose(exact, outer, atol=ROUNDING)


def test_orthonormalize_sign() -> None:
    """Orthonormal columns with diag(Q^T A) >= 0; a rank-deficient matrix too."""
    A = np.random.default_rng(3).standard_normal((6, 3))
    Q = orthonormalize(A)
    np.testing.assert_allclose(Q.T @ Q, np.eye(3), atol=ROUNDING)
    assert np.all(np.diagonal(Q.T @ A) > 0)
    flat = orthonormalize(np.ones((6, 3)))
    np.testing.assert_allclose(flat.T @ flat, np.eye(3), atol=ROUNDING)


def test_error_feedback_returns_what_rank_one_drops() -> None:
    """Rank 1 with feedback ends nearer the uncompressed run than rank 1 without."""
    problem = example(sizes=(12,), T=240)
    Q0 = np.ones((4, 1))
    exact = naive_delay(problem, 6, 0.3, 0.3)[-1][1][0]

    def error(run: Trajectory) -> float:
        return float(np.linalg.norm(run[-1][1][0] - exact))

    without = error(lowrank_delay(problem, (3, 4), 6, 0.3, 0.3, Q0, None))
    assert error(lowrank_delay(problem, (3, 4), 6, 0.3, 0.3, Q0, "own")) < 0.5 * without


# -- CoCoDC


def tensors(seed: int = 4) -> tuple[Vector, Vector, Vector]:
    """theta_now, snapshot, Theta_new of magnitude 1."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(9), rng.standard_normal(9), rng.standard_normal(9)


def test_adaptive_lambda_norm() -> None:
    """||lambda u*u*D|| = strength ||u||, and cap ||u|| where the cap is lower."""
    now, snapshot, new = tensors()
    u = (snapshot - now) / 3
    for cap, ratio in ((None, 0.3), (1.0, 0.3), (0.1, 0.1)):
        merged = compensate(now, snapshot, new, 3, "adaptive", 0.3, 0.05, cap)
        correction = (new - merged) / 3 - u
        assert float(np.linalg.norm(correction) / np.linalg.norm(u)) == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("mode", ["fixed", "lr_normalized", "adaptive"])
def test_strength_zero_is_the_additive_merge(mode: Mode) -> None:
    """lambda = 0 leaves Theta_new + (theta_now - snapshot), in one merge and in a whole run."""
    now, snapshot, new = tensors()
    np.testing.assert_allclose(
        compensate(now, snapshot, new, 3, mode, 0.0, 0.05), new + (now - snapshot), atol=ROUNDING
    )
    left = cocodc_static(example(), 6, 3, mode, 0.0, 0.7, 0.6)
    assert distance(left, cocodc_static(example(), 6, 3, "additive", 9.9, 0.7, 0.6)) <= ROUNDING


def test_compensation_sign_on_a_quadratic() -> None:
    """tau = 1, loss 0.5 h x^2: with strength g*g = h the merge is the step redone from Theta_new, exactly."""
    h, eta = 1.3, 0.05
    snapshot, new = np.array([0.8]), np.array([0.3])
    g = h * snapshot
    merged = compensate(snapshot - eta * g, snapshot, new, 1, "lr_normalized", float(h / g[0] ** 2), eta)
    np.testing.assert_allclose(merged, new - eta * h * new, atol=ROUNDING)


def test_compensation_by_hand() -> None:
    """u = 0.1, D = 0.5, tau = 2: lambda u*u*D is 0.5 * 0.005 (fixed), 0.3 * 0.1 (adaptive), 0.02 (capped)."""
    now, snapshot, new = np.array([0.8]), np.array([1.0]), np.array([1.5])
    cases: list[tuple[Mode, float, float | None, float]] = [
        ("additive", 0.5, None, 1.3),
        ("fixed", 0.5, None, 1.5 - 2 * (0.1 + 0.0025)),
        ("lr_normalized", 0.5, None, 1.5 - 2 * 0.05 * (2 + 0.5 * 4 * 0.5)),
        ("adaptive", 0.3, None, 1.5 - 2 * (0.1 + 0.03)),
        ("adaptive", 0.3, 0.2, 1.5 - 2 * (0.1 + 0.02)),
    ]
    for mode, strength, cap, expected in cases:
        merged = compensate(now, snapshot, new, 2, mode, strength, 0.05, cap)
        assert merged[0] == pytest.approx(expected, abs=1e-6)


def test_lr_normalized_takes_the_rates_in_flight() -> None:
    """Sent after step 2, landed after step 3 at lr 0.2: u = 0.162, g = 0.81, whatever the rates before."""
    one = np.ones((1, 1))
    problem = Problem(1, (1,), 3, (0.1, 0.1, 0.2), one, 0 * one, np.ones(1), noise=0.0)
    theta, Theta = cocodc_static(problem, 2, 1, "lr_normalized", 0.5, 0.5, 0.0)[-1]
    assert Theta[0][0] == pytest.approx(0.905, abs=ROUNDING)
    assert theta[0][0][0] == pytest.approx(0.905 - 0.2 * (0.81 + 0.5 * 0.81**2 * 0.095), abs=ROUNDING)


@pytest.mark.parametrize("mode", MODES)
def test_static_cocodc_without_delay_is_streaming(mode: Mode) -> None:
    """tau = 0 is streaming with tau = 0, alpha = 0, on the same schedule."""
    run = cocodc_static(example(), 6, 0, mode, 0.5, 0.7, 0.6)
    assert distance(run, streaming(example(), 6, 3, 0, 0.0, 0.7, 0.6)) == BITWISE


@pytest.mark.parametrize("tau", [1, 4, 5])
def test_static_cocodc_shares_its_first_landing_with_streaming(tau: int) -> None:
    """Up to the second send of a fragment the global parameters do not see the merge."""
    left = cocodc_static(example(), 6, tau, "adaptive", 0.5, 0.7, 0.6)
    right = streaming(example(), 6, 3, tau, 0.5, 0.7, 0.6)
    for (_, a), (_, b) in list(zip(left, right, strict=True))[: 6 + tau]:
        np.testing.assert_array_equal(np.concatenate(a), np.concatenate(b))


def test_rhythm() -> None:
    """The published set-up (H = 100, K = 4, N = 8, tau = 5), the limits, and exact decimals."""
    assert rhythm(4, 100, 0.1, 0.5, 0.4) == (8, 12, 5)
    assert rhythm(4, 100, 0.1, 50.0, 0.4) == (4, 25, 500)  # floor(0.08) < K
    assert rhythm(4, 10, 1.0, 0.01, 1.0) == (10, 1, 1)  # N <= H, h >= 1, tau >= 1
    assert rhythm(1, 10, 0.3, 0.9, 1.0) == (3, 3, 3)  # 0.9 / 0.3 is 3.0000000000000004 in floats


def table(rates: list[float]) -> Callable[[int, int, int], float]:
    """A change rate that depends on the fragment only."""
    return lambda p, sent_at, interval: rates[p]


def test_adaptive_schedule_at_the_floor_is_round_robin() -> None:
    """N = K: every fragment is overdue exactly when its turn comes."""
    sends = adaptive_schedule(3, 12, 30, 1.0, 2.0, 0.5, table([1, 5, 3]))
    assert sends == [(4, 0), (8, 1), (12, 2), (16, 0), (20, 1), (24, 2), (28, 0)]


def test_adaptive_schedule_by_hand() -> None:
    """h = tau = 2: the one just sent is in flight; new ones first, then by rate; 0 overdue at 14 and 26."""
    sends = adaptive_schedule(3, 12, 26, 1.0, 2.0, 1.0, table([1, 5, 3]))
    assert [p for _, p in sends] == [0, 1, 2, 1, 2, 1, 0, 1, 2, 1, 2, 1, 0]
    assert [t for t, _ in sends] == list(range(2, 27, 2))


def test_adaptive_schedule_ties_and_lost_turns() -> None:
    """Equal rates go to the lowest index; with one fragment, turns while it is in flight are lost."""
    sends = adaptive_schedule(3, 12, 12, 1.0, 1.0, 0.5, table([2, 2, 2]))
    assert sends == [(2, 0), (4, 1), (6, 2), (8, 0), (10, 0), (12, 0)]
    assert adaptive_schedule(1, 4, 12, 1.0, 6.0, 1.0, table([1])) == [(4, 0), (12, 0)]


@pytest.mark.parametrize("T_s", [1.0, 2.0, 2.5, 40.0])
def test_cocodc_sends_follow_the_schedule(T_s: float) -> None:
    """Never two of one in flight, nobody starves; the R_p read off the trajectory give the same sends."""
    problem = example(T=90)
    run, sends = cocodc_with_sends(problem, 12, 3, 1.0, T_s, 1.0, "adaptive", 0.3, 0.7, 0.6)
    N, h, tau = rhythm(3, 12, 1.0, T_s, 1.0)
    assert N >= 3
    for p in range(3):
        at = [t for t, q in sends if q == p]
        gaps = np.diff([0, *at])
        assert np.all(gaps[1:] > tau)
        assert gaps.max() <= max(12, tau) + 3 * h
    assert all(t % h == 0 for t, _ in sends)

    def change_rate(p: int, sent_at: int, interval: int) -> float:
        theta, Theta = run[sent_at - 1]  # p does not land at the step of its send: both are still as sent
        Dbar = np.mean([Theta[p] - local[p] for local in theta], axis=0)
        return float(np.sqrt(np.sum(Dbar**2))) / (SIZES[p] * interval)

    assert adaptive_schedule(3, 12, 90, 1.0, T_s, 1.0, change_rate) == sends


def test_cocodc_at_the_floor_is_the_static_schedule_begun_early() -> None:
    """N = K and tau = 2, T < H + h: three first sends at 4, 8, 12, by hand."""
    problem = example(T=14)
    run, sends = cocodc_with_sends(problem, 12, 3, 1.0, 2.0, 0.5, "additive", 0.0, 0.7, 0.6)
    assert sends == [(4, 0), (8, 1), (12, 2)]
    x = local_sgd(problem)
    start = problem.start()
    mean = [problem.split(np.mean(x[t - 1], axis=0)) for t, _ in sends]
    for p in range(3):
        expected = start[p] - 0.7 * 1.6 * (start[p] - mean[p][p])  # first call: buf = g
        np.testing.assert_allclose(run[-1][1][p], expected, atol=ROUNDING)
        landed, sent = sends[p][0] + 2, sends[p][0]
        for m in range(problem.M):
            moved = problem.split(x[landed - 1][m] - x[sent - 1][m])[p]
            np.testing.assert_allclose(run[landed - 1][0][m][p], expected + moved, atol=ROUNDING)


def test_cocodc_of_one_fragment_is_the_static_schedule() -> None:
    """K = 1, h = H, tau < H: the same sends, the same numbers."""
    problem = example(sizes=(8,))
    run = cocodc(problem, 6, 1, 1.0, 4.0, 0.5, "adaptive", 0.3, 0.7, 0.6, cap=0.2)
    static = cocodc_static(problem, 6, 4, "adaptive", 0.3, 0.7, 0.6, cap=0.2)
    assert distance(run, static) <= ROUNDING


# -- codecs


def test_integer_codecs_by_hand() -> None:
    """Scale 1 and 0.5; 2.5 rounds to even; a block of zeros stays zero; the shape is kept."""
    x = np.array([[127.0, 2.5, 3.5], [-0.4, 0.0, 0.0]])
    np.testing.assert_array_equal(codecs.int8_roundtrip(x, 4), [[127, 2, 4], [0, 0, 0]])
    y = np.array([-3.5, 1.25, 0.3, 0.2, 0.0, 0.0])
    np.testing.assert_array_equal(codecs.int4_roundtrip(y, 4), [-3.5, 1.0, 0.5, 0.0, 0.0, 0.0])


def test_e3m0_by_hand() -> None:
    """absmax 8: 8, 4, ..., 1/8 and 0; ties (6, 1/16) go to the smaller; each block by itself."""
    x = np.array([8.0, -6.0, 6.01, 0.0625, -0.07, 2.9, 3.1, 0.0])
    np.testing.assert_array_equal(codecs.e3m0_roundtrip(x, 8), [8, -4, 8, 0, -0.125, 2, 4, 0])
    np.testing.assert_array_equal(codecs.e3m0_roundtrip(np.array([8.0, 0.001, 0.001]), 2), [8, 0, 0.001])


@pytest.mark.parametrize(
    ("roundtrip", "bound"),
    [(codecs.int8_roundtrip, 0.5 / 127), (codecs.int4_roundtrip, 0.5 / 7), (codecs.e3m0_roundtrip, 0.25)],
)
def test_codec_error_bound_and_idempotence(roundtrip: Callable[[Vector, int], Vector], bound: float) -> None:
    """The error is at most half the widest step of the block, and a decoded vector survives unchanged."""
    x = np.random.default_rng(6).standard_normal(1000)
    once = roundtrip(x, 64)
    for start in range(0, 1000, 64):
        part = slice(start, start + 64)
        assert np.max(np.abs(once[part] - x[part])) <= bound * np.max(np.abs(x[part])) * (1 + 1e-12)
    np.testing.assert_allclose(roundtrip(once, 64), once, rtol=1e-14)


# -- the problem


def test_problem_is_deterministic_and_takes_both_forms() -> None:
    """The gradient depends on (region, step) only, and comes back in the form theta came in."""
    problem = example()
    whole = problem.gradient(1, 7, problem.theta0)
    np.testing.assert_array_equal(whole, np.concatenate(problem.gradient(1, 7, problem.start())))
    np.testing.assert_array_equal(whole, example().gradient(1, 7, problem.theta0))
    assert np.any(problem.perturbation(1, 7) != problem.perturbation(2, 7))
    assert np.any(problem.perturbation(1, 7) != problem.perturbation(1, 8))
