"""DiLoCoX with everything on, int4 and the rank that follows the spectrum included, against its oracle.

A rounding error that pushes a value over the border between two int4 codes, or an effective rank over the next, grows to a
step that no tolerance covers. So the problems here are such that it does not happen, and that is tested, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from hf_cocodc.link.lockstep import VirtualLink
from hf_cocodc.methods import Method
from hf_cocodc.parts import codecs
from hf_cocodc.parts.codecs.block import Integers
from hf_cocodc.parts.fragments import whole
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.oracles.dilocox import lowrank_delay
from tests.oracles.dilocox_full import (
    Compression,
    Disturb,
    Round,
    dilocox,
    interval,
    next_rank,
    spectrum_share,
)
from tests.oracles.package import TOLERANCE, assert_equal, numpy_of, trajectory
from tests.oracles.problem import Problem, Trajectory, Vector, distance, make_problem
from tests.toys import Blocks, Region

OUTER_LR, MU = 0.3, 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem with a vector, two matrices sent at low rank (one of them a convolution) and one too small for it.

    Attributes:
        shapes: of the parameters.
        T: inner steps.
        H: first interval.
        decay: ratio of neighboring singular values of what separates a region's optimum from the start.
        noise: of the gradients.
        given: what is sent.
    """

    shapes: tuple[tuple[int, ...], ...]
    T: int
    H: int
    decay: float
    noise: float
    given: Compression

    def problem(self, M: int, seed: int) -> Problem:
        """The problem of M regions, drawn anew by each seed."""
        drawn = make_problem(M, [math.prod(shape) for shape in self.shapes], self.T, 0.05, seed)
        optima = []
        for c in drawn.c:
            steep = []
            for start, draw, shape in zip(drawn.start(), drawn.split(c), self.shapes, strict=True):
                U, s, V = np.linalg.svd(draw.reshape(shape[0], -1), full_matrices=False)
                steep.append(start + (U * 6 * self.decay ** np.arange(len(s)) @ V).ravel())
            optima.append(np.concatenate(steep))
        return dataclasses.replace(drawn, c=np.array(optima), noise=self.noise)

    def method(self) -> Method:
        """The package's DiLoCoX; its codec is built by hand where it has other than the method's own settings."""
        given = self.given
        config = OuterConfig(
            method="dilocox",
            sync_interval=self.H,
            outer_lr=OUTER_LR,
            outer_momentum=MU,
            rank=given.rank,
        )
        method = from_config(config)
        if given == Compression(rank=given.rank):
            return method
        assert given.block is not None
        codec = codecs.lowrank(
            given.rank,
            Integers(4, given.block),
            rank_min=given.rank_min,
            energy=given.energy,
            window=given.window,
        )
        return dataclasses.replace(method, codec=codecs.feedback(codec))

    def oracle(
        self, M: int, seed: int, hides_in: int = 0, disturb: Disturb = lambda values: values
    ) -> tuple[Trajectory, list[Round]]:
        """The oracle's run, from the first Q that the package draws."""
        given, Q = self.given, first_Q(self.shapes, self.given.rank)
        return dilocox(self.problem(M, seed), self.shapes, self.H, OUTER_LR, MU, Q, given, hides_in, disturb)


def first_Q(shapes: tuple[tuple[int, ...], ...], rank: int) -> list[Vector]:
    """The Q (b, r_1) of each matrix that the package starts from, which no paper gives: an input of the oracle."""
    [fragment] = whole()(Blocks(torch.zeros(shape) for shape in shapes))
    flat = numpy_of(codecs.lowrank(rank).init(fragment)["q"])
    sides = [(shape[0], math.prod(shape[1:])) for shape in shapes if len(shape) > 1]
    widths = [b for a, b in sides if rank * (a + b) < a * b]
    cuts = np.cumsum([rank * b for b in widths])[:-1]
    return [q.reshape(rank, b).T for q, b in zip(np.split(flat, cuts), widths, strict=True)]


DEFAULTS = Case(
    shapes=((5,), (13, 12), (4, 6), (12, 3, 4)),
    T=80,
    H=8,
    decay=0.3,
    noise=0.02,
    given=Compression(rank=5),
)
"""The method's own settings: blocks of 256 that span columns and matrices, 95 % of the energy, 5 rounds."""

SMALL_BLOCKS = Case(
    shapes=((12, 10), (5,), (9, 3, 4), (4, 6)),
    T=60,
    H=7,
    decay=0.6,
    noise=0.1,
    given=Compression(rank=4, block=16, rank_min=3, energy=0.9, window=2),
)
"""Blocks as long as a column or two, many of them for three regions to share; the rank falls to its floor."""

DEFAULTS_SEEDS, SMALL_SEEDS = (1, 19, 4), (7, 64, 30)
"""For one, two and three regions."""

CASES = [
    pytest.param(case, M, seed, id=f"{name}-{M}")
    for name, case, seeds in (
        ("defaults", DEFAULTS, DEFAULTS_SEEDS),
        ("small_blocks", SMALL_BLOCKS, SMALL_SEEDS),
    )
    for M, seed in enumerate(seeds, start=1)
]


def observed(
    case: Case, M: int, seed: int, virtual: VirtualLink | None = None
) -> tuple[Trajectory, list[tuple[int, int, list[int]]]]:
    """The package's run, and of each send: its step, its rank, the effective ranks in the window before it."""
    sends: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(M)]

    def look(region: Region) -> None:
        [fragment] = region.synchronizer.fragments
        if fragment.sent_at == region.synchronizer.inner_step:
            state = fragment.codec["codec"]
            sends[region.index].append((fragment.sent_at, state["rank"], state["effective_ranks"]))

    ours = trajectory(case.problem(M, seed), case.method(), case.shapes, look, virtual)
    assert all(others == sends[0] for others in sends)
    return ours, sends[0]


def expected(rounds: list[Round], window: int) -> list[tuple[int, int, list[int]]]:
    """What `observed` has to see of these rounds."""
    found = [r.effective_rank for r in rounds]
    return [(r.sent_at, r.rank, found[:k][-window:]) for k, r in enumerate(rounds)]


@pytest.mark.parametrize(("case", "M", "seed"), CASES)
def test_dilocox_follows_its_oracle(case: Case, M: int, seed: int) -> None:
    """Every param at every step, and every rank, effective rank and send step exactly, while rank and interval change."""
    theirs, rounds = case.oracle(M, seed)
    ours, sends = observed(case, M, seed)
    assert sends == expected(rounds, case.given.window)
    assert_equal(ours, theirs)
    ranks, steps = [r.rank for r in rounds], [r.sent_at for r in rounds]
    assert min(ranks) < ranks[0] == case.given.rank
    assert len(set(np.diff(steps))) > 1, "the interval changes"
    if case is DEFAULTS:
        assert any(later > earlier for earlier, later in itertools.pairwise(ranks)), (
            "the rank rises again, too"
        )


@pytest.mark.parametrize(("case", "M", "seed"), CASES)
def test_rounding_errors_decide_nothing_here(case: Case, M: int, seed: int) -> None:
    """Errors of many fp32 roundings in all that is sent change no integer and no param beyond the tolerance; int4 does."""
    exact, rounds = case.oracle(M, seed)
    for draw in range(5):
        rng = np.random.default_rng(draw)

        def disturb(values: Vector, rng: np.random.Generator = rng) -> Vector:
            return values + 2e-6 * np.max(np.abs(values)) * rng.uniform(-1, 1, values.shape)

        disturbed, same = case.oracle(M, seed, disturb=disturb)
        assert same == rounds
        assert distance(disturbed, exact) < TOLERANCE
    unquantized = dataclasses.replace(case, given=dataclasses.replace(case.given, block=None))
    assert distance(unquantized.oracle(M, seed)[0], exact) > 1000 * TOLERANCE


@pytest.mark.parametrize(("M", "seed"), list(enumerate(SMALL_SEEDS, start=1)))
def test_a_round_stays_as_long_as_its_transfer(M: int, seed: int) -> None:
    """A transfer of 5.5 simulated steps keeps rounds at 6 where the rank asks for 5."""
    theirs, rounds = SMALL_BLOCKS.oracle(M, seed, hides_in=6)
    assert [r.sent_at for r in rounds] != [r.sent_at for r in SMALL_BLOCKS.oracle(M, seed)[1]]
    trips = 1 if M <= 2 else 2
    slow = VirtualLink(step_time_s=1.0, latency_s=5.5 / trips, bandwidth=1e9)
    ours, sends = observed(SMALL_BLOCKS, M, seed, slow)
    assert sends == expected(rounds, SMALL_BLOCKS.given.window)
    assert_equal(ours, theirs)


def test_without_int4_and_at_a_fixed_rank_it_is_the_older_oracle() -> None:
    """One matrix, exact factors, rank_min = rank: `lowrank_delay`, which keeps Q at another length."""
    problem = make_problem(3, (30,), T=45, lr=0.05, seed=1)
    Q = np.random.default_rng(2).uniform(-1, 1, (5, 2))
    given = Compression(rank=2, block=None, rank_min=2)
    run, rounds = dilocox(problem, [(6, 5)], 8, OUTER_LR, MU, [Q], given)
    assert [(r.sent_at, r.rank) for r in rounds] == [(8 * k, 2) for k in range(1, 6)]
    assert distance(run, lowrank_delay(problem, (6, 5), 8, OUTER_LR, MU, Q)) < 1e-9


def test_rank_and_interval_by_hand() -> None:
    """Means rounded up within their limits once the window is full; intervals two sends later, and not below a transfer."""
    given = Compression(rank=6, rank_min=2, window=3)
    found = [([1, 1], 6), ([1, 1, 1], 2), ([9, 4, 3, 3], 4), ([3, 3, 3], 3), ([7, 7, 7], 6)]
    assert [next_rank(ranks, given) for ranks, _ in found] == [rank for _, rank in found]
    assert [interval(10, [6, 4, 1, 1, 1][:k]) for k in range(1, 6)] == [10, 10, 10, 7, 2]
    assert [interval(10, [6, 4, 1, 1, 1][:k], hides_in=8) for k in range(1, 6)] == [10, 10, 10, 7, 8]
    assert interval(10, [6, 1, 1, 1], hides_in=20) == 2 and interval(10, [6, 1, 1, 1, 1], hides_in=20) == 10
    share = spectrum_share([np.diag([8.0, 4.0, 2.0]), np.diag([2.0, 2.0, 4.0])])  # squares 80, 20, 8
    np.testing.assert_allclose(share, [80 / 108, 100 / 108, 1])
