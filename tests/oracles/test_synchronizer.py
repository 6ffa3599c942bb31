"""The Synchronizer against each method written a second time, straight from its paper, in NumPy float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hf_cocodc.parts import codecs, merges, schedules
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.fragments import whole
from hf_cocodc.parts.schedules import AgreedStats, Schedule
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.oracles.co2 import co2, slowmo
from tests.oracles.cocodc import cocodc, cocodc_static
from tests.oracles.diloco import diloco
from tests.oracles.dilocox import lowrank_delay, naive_delay
from tests.oracles.eager import eager, finished
from tests.oracles.package import TOLERANCE, assert_equal, by_region, numpy_of, trajectory
from tests.oracles.problem import distance, make_problem
from tests.oracles.streaming import streaming
from tests.toys import Blocks

SIZES = (5, 3, 4)


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_diloco_follows_its_oracle(num_regions: int, momentum: float) -> None:
    """DiLoCo's local and global params equal the nested loops of the paper at every step of four rounds."""
    problem = make_problem(num_regions, SIZES, T=28, lr=0.05, seed=num_regions)
    config = OuterConfig(method="diloco", sync_interval=7, outer_lr=0.7, outer_momentum=momentum)
    assert_equal(trajectory(problem, config), diloco(problem, 7, 0.7, momentum))


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("overlap", [0, 1, 4, 7])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_streaming_follows_its_oracle(num_regions: int, overlap: int, alpha: float) -> None:
    """Streaming DiLoCo equals its oracle at every step, with uneven offsets (8 steps, 3 fragments)."""
    problem = make_problem(num_regions, SIZES, T=40, lr=0.05, seed=num_regions)
    config = OuterConfig(
        method="streaming",
        sync_interval=8,
        num_fragments=3,
        overlap_steps=overlap,
        mixing_alpha=alpha,
        codec="fp32",
        outer_lr=0.6,
        outer_momentum=0.8,
    )
    assert_equal(trajectory(problem, config), streaming(problem, 8, 3, overlap, alpha, 0.6, 0.8))


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("staggered", [False, True])
def test_eager_follows_its_oracle(num_regions: int, staggered: bool) -> None:
    """Eager updates equal their oracle in every region, whole and fragment by fragment, from the first boundary on."""
    problem = make_problem(num_regions, SIZES, T=35, lr=0.05, seed=num_regions)
    cut = {"num_fragments": 3, "fragment_pattern": "strided"} if staggered else {}
    config = OuterConfig(method="eager", sync_interval=8, outer_lr=0.4, outer_momentum=0.8, **cut)  # type: ignore[arg-type]
    oracle = eager(problem, 8, 0.4, 0.8, staggered)
    for step, (ours, theirs) in enumerate(zip(by_region(problem, config), oracle, strict=True), start=1):
        for mine, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
            np.testing.assert_allclose(
                np.concatenate(mine), np.concatenate(other), atol=TOLERANCE, err_msg=f"{step}"
            )


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("steps", [5, 8, 13, 24, 27])
def test_eager_ends_as_its_oracle(num_regions: int, steps: int) -> None:
    """Before the first boundary, at boundaries and between them: what is in flight lands, then comes the mean."""
    problem = make_problem(num_regions, SIZES, T=steps, lr=0.05, seed=num_regions)
    config = OuterConfig(method="eager", sync_interval=8, outer_lr=0.4, outer_momentum=0.8)
    expected = finished(problem, 8, 0.4, 0.8)
    locals_, _ = by_region(problem, config, finish=True)[-1]
    for mine in locals_:
        np.testing.assert_allclose(np.concatenate(mine), expected, atol=TOLERANCE)


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize(("penalty", "given"), [("gap", "gap"), (None, "none"), (2.0, "2.0")])
@pytest.mark.parametrize("phi", [0.1, None])
def test_co2_follows_its_oracle(
    num_regions: int, penalty: str | float | None, given: str, phi: float | None
) -> None:
    """CO2 with each penalty, with clipping that clips, under a changing inner learning rate."""
    rates = [0.05 * (1 - step / 60) for step in range(40)]
    problem = make_problem(num_regions, SIZES, T=40, lr=rates, seed=num_regions)
    config = OuterConfig(
        method="co2",
        sync_interval=8,
        outer_lr=0.9,
        outer_momentum=0.3,
        staleness_penalty=given,
        clip_momentum="none" if phi is None else phi,
    )
    oracle = co2(problem, 8, 0.9, 0.3, phi, penalty)
    assert_equal(trajectory(problem, config), oracle)
    if phi is not None:
        assert distance(oracle, co2(problem, 8, 0.9, 0.3, None, penalty)) > 1000 * TOLERANCE


@pytest.mark.parametrize("num_regions", [1, 2, 3])
def test_co2_without_delay_is_slowmo(num_regions: int) -> None:
    """No penalty, no clipping, no delay: SlowMo."""
    rates = [0.05 * (1 - step / 60) for step in range(40)]
    problem = make_problem(num_regions, SIZES, T=40, lr=rates, seed=num_regions)
    config = OuterConfig(method="co2", outer_lr=0.9, outer_momentum=0.3, staleness_penalty="none")
    method = dataclasses.replace(from_config(config), schedule=schedules.every(8))
    assert_equal(trajectory(problem, method), slowmo(problem, 8, 0.9, 0.3))


@pytest.mark.parametrize("num_regions", [1, 2, 3])
def test_dilocox_without_compression_is_the_naive_delay(num_regions: int) -> None:
    """DiLoCoX with an exact codec equals the oracle of the one-round delay."""
    problem = make_problem(num_regions, SIZES, T=40, lr=0.05, seed=num_regions)
    config = OuterConfig(
        method="dilocox",
        sync_interval=8,
        outer_lr=0.3,
        outer_momentum=0.5,
        codec="fp32",
        error_feedback=False,
    )
    assert_equal(trajectory(problem, config), naive_delay(problem, 8, 0.3, 0.5))


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("mode", ["fixed", "lr_normalized", "adaptive", "additive"])
@pytest.mark.parametrize("overlap", [0, 1, 4, 7])
def test_delay_compensation_follows_its_oracle(num_regions: int, mode: str, overlap: int) -> None:
    """Every mode of the compensation, on the static schedule, with several fragments in flight at once (tau 4, 7)."""
    problem = make_problem(num_regions, SIZES, T=40, lr=0.05, seed=num_regions)
    streaming_fp32 = OuterConfig(
        method="streaming",
        sync_interval=8,
        num_fragments=3,
        overlap_steps=overlap,
        codec="fp32",
        outer_lr=0.6,
        outer_momentum=0.8,
    )
    method = dataclasses.replace(from_config(streaming_fp32), merge=merges.compensate_delay(mode, 0.4))
    assert_equal(trajectory(problem, method), cocodc_static(problem, 8, overlap, mode, 0.4, 0.6, 0.8))


class KnownTimes:
    """A schedule that is told the same measured times at every step, from the start."""

    back_to_back = False
    overlaps = True

    def __init__(self, schedule: Schedule, step_time_s: float, sync_time_s: float) -> None:
        self.schedule, self.times = schedule, {"step_time_s": step_time_s, "sync_time_s": sync_time_s}

    def init(self, num_fragments: int, inner_step: int = 0) -> dict:
        spacing = self.schedule._spacing(num_fragments, AgreedStats(**self.times))  # type: ignore[attr-defined]
        return {**self.schedule.init(num_fragments), "next": spacing}

    def events(self, inner_step: int, stats: AgreedStats, state: dict) -> tuple:
        return self.schedule.events(inner_step, stats._replace(**self.times), state)

    def next_event(self, inner_step: int, state: dict) -> int:
        return self.schedule.next_event(inner_step, state)


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("times", [(1.0, 0.5), (1.0, 1.5), (1.0, 3.0)])
def test_cocodc_follows_its_oracle(num_regions: int, times: tuple[float, float]) -> None:
    """CoCoDC whole: measured times, priorities by change rate, compensation; the times are known from the start here."""
    problem = make_problem(num_regions, SIZES, T=60, lr=0.05, seed=num_regions)
    config = OuterConfig(
        method="cocodc",
        sync_interval=12,
        num_fragments=3,
        utilization=0.8,
        compensation_strength=0.3,
        outer_lr=0.6,
        outer_momentum=0.8,
    )
    method = from_config(config)
    known = dataclasses.replace(method, schedule=KnownTimes(method.schedule, *times))
    oracle = cocodc(problem, 12, 3, *times, 0.8, "adaptive", 0.3, 0.6, 0.8)
    assert_equal(trajectory(problem, known), oracle)


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_with_error_feedback_follows_its_oracle(num_regions: int, rank: int) -> None:
    """DiLoCoX's delay, low rank, warm start and error feedback together, on a model that is one matrix (no int4)."""
    rows, cols = 6, 5
    problem = make_problem(num_regions, (rows * cols,), T=48, lr=0.05, seed=num_regions)
    lossless = codecs.lowrank(rank, Cast(torch.float32))
    method = dataclasses.replace(
        from_config(OuterConfig(method="dilocox", sync_interval=8, outer_lr=0.3, outer_momentum=0.5)),
        codec=codecs.feedback(lossless),
    )
    [fragment] = whole()(Blocks([torch.zeros(rows, cols)]))
    first_q = numpy_of(lossless.init(fragment)["q"]).reshape(rank, cols).T
    oracle = lowrank_delay(problem, (rows, cols), 8, 0.3, 0.5, first_q)
    assert_equal(trajectory(problem, method, [(rows, cols)]), oracle)
