"""The Synchronizer against the newer methods, each written a second time, straight from its paper, in NumPy float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_cocodc.parts.codecs.codebook import Codebook
from hf_cocodc.run.muon import muon
from hf_cocodc.settings import OuterConfig
from tests.oracles.codecs import int4_roundtrip
from tests.oracles.diloco import diloco
from tests.oracles.muloco import muloco
from tests.oracles.package import TOLERANCE, assert_equal, trajectory
from tests.oracles.problem import Problem, Vector, distance, make_problem
from tests.oracles.quantized import Quantize, by_block, quantized
from tests.oracles.radial import radial_diloco
from tests.oracles.sparseloco import message, sparseloco, two_bits

SHAPES = [(70, 66), (9,), (3, 4, 5)]
"""A matrix with tiles at its edges, a vector shorter than k, and a convolution."""


def sizes() -> list[int]:
    return [math.prod(shape) for shape in SHAPES]


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize(("k", "decay"), [(16, 0.95), (16, 0.0), (300, 1.0)])
def test_sparseloco_follows_its_oracle(num_regions: int, k: int, decay: float) -> None:
    """SparseLoCo's local and global params equal the nested loops of the paper at every step of four rounds."""
    problem = make_problem(num_regions, sizes(), T=28, lr=0.05, seed=num_regions)
    config = OuterConfig(method="sparseloco", sync_interval=7, outer_lr=0.8, top_k=k, feedback_decay=decay)
    oracle = sparseloco(problem, SHAPES, 7, 0.8, k, decay)
    assert_equal(trajectory(problem, config, SHAPES), oracle)
    assert distance(oracle, diloco(problem, 7, 0.8, 0.0)) > 1000 * TOLERANCE


@pytest.mark.parametrize("num_regions", [1, 3])
@pytest.mark.parametrize(
    "given", [{}, {"momentum": 0.95, "nesterov": True, "betas": (0.9, 0.95)}], ids=["authors", "ours before"]
)
def test_muloco_follows_its_oracle(
    num_regions: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MuLoCo's local and global params equal the nested loops of the paper at every step of three rounds.

    torch's Muon orthogonalizes in bf16, in which no two machines need agree: here it is left in fp32.
    """
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # of torch 2.13 and older
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    shapes = [(6, 9), (8, 3), (5,)]
    rates = [0.05 * (1 - step / 40) for step in range(21)]
    problem = make_problem(num_regions, [54, 24, 5], T=21, lr=rates, seed=num_regions)
    config = OuterConfig(
        **{"method": "muloco", "sync_interval": 7, "outer_lr": 0.7, "outer_momentum": 0.6},
        **{"codec": "fp32", "error_feedback": False},
    )
    changed = {name: value for name, value in given.items() if name != "betas"}
    if given:
        changed["beta2"] = given["betas"][1]
    oracle = muloco(problem, shapes, 7, 0.7, 0.6, **changed)
    ours = trajectory(problem, config, shapes, inner=lambda model, lr: muon(model, lr=lr, **given))
    assert_equal(ours, oracle)
    others = {} if given else {"momentum": 0.95, "nesterov": True, "beta2": 0.95}
    assert distance(oracle, muloco(problem, shapes, 7, 0.7, 0.6, **others)) > 100 * TOLERANCE
    assert distance(oracle, diloco(problem, 7, 0.7, 0.6)) > 1000 * TOLERANCE


FEW = [(30, 20), (9,), (3, 4, 5)]
"""More than one block of 256 values and than the 64 of top-k, and few enough that none comes near a border between two codes."""


def tiles(values: Vector) -> Vector:
    """Top-k of a model of FEW, tile by tile."""
    cut = np.split(values, np.cumsum([math.prod(shape) for shape in FEW])[:-1])
    return np.concatenate(
        [message(part.reshape(shape), 64).ravel() for part, shape in zip(cut, FEW, strict=True)]
    )


def few(num_regions: int) -> Problem:
    return make_problem(num_regions, [math.prod(shape) for shape in FEW], T=28, lr=0.05, seed=num_regions)


QUANTIZED: dict[str, Quantize] = {
    "int4": lambda values: int4_roundtrip(values, 256),
    "codebook_2bit": by_block(256, two_bits),
    "topk_2bit": tiles,
}


@pytest.mark.parametrize("num_regions", [1, 2, 3])
@pytest.mark.parametrize("codec", QUANTIZED)
def test_the_mean_is_quantized_a_second_time(codec: str, num_regions: int) -> None:
    """Between more than two regions, of 4 and of 2 bits; top-k once, and two regions once. The error feedback is 0.9."""
    problem = few(num_regions)
    config = OuterConfig(
        method="muloco", sync_interval=7, outer_lr=0.7, outer_momentum=0.6, codec=codec, feedback_decay=0.9
    )
    settings = problem, 7, 0.7, 0.6, QUANTIZED[codec]
    again = num_regions > 2 and codec != "topk_2bit"
    oracle = quantized(*settings, beta=0.9, again=again)
    assert_equal(trajectory(problem, config, FEW), oracle)
    assert num_regions == 1 or distance(oracle, quantized(*settings, 0.9, not again)) > 1000 * TOLERANCE
    assert distance(oracle, quantized(*settings, beta=0.0, again=again)) > 1000 * TOLERANCE


@pytest.mark.parametrize("num_regions", [2, 3])
@pytest.mark.parametrize("codec", QUANTIZED)
def test_rounding_errors_decide_no_code_here(codec: str, num_regions: int) -> None:
    """Errors of many fp32 roundings in all that is quantized stay as small: no value is that close to a border."""
    problem = few(num_regions)
    quantize, again = QUANTIZED[codec], num_regions > 2 and codec != "topk_2bit"
    exact = quantized(problem, 7, 0.7, 0.6, quantize, 0.9, again)
    for draw in range(3):
        rng = np.random.default_rng(draw)

        def disturbed(values: Vector, rng: np.random.Generator = rng) -> Vector:
            return quantize(values + 1e-6 * np.max(np.abs(values)) * rng.uniform(-1, 1, values.shape))

        assert distance(quantized(problem, 7, 0.7, 0.6, disturbed, 0.9, again), exact) < TOLERANCE


@pytest.mark.parametrize("num_regions", [1, 2, 3])
def test_radial_means_follow_their_oracle(num_regions: int) -> None:
    """DiLoCo with mean=radial: norms and directions of each parameter apart, at every step of four rounds."""
    problem = make_problem(num_regions, [12, 7, 5], T=28, lr=0.05, seed=num_regions)
    config = OuterConfig(method="diloco", sync_interval=7, outer_lr=0.6, outer_momentum=0.8, mean="radial")
    oracle = radial_diloco(problem, 7, 0.6, 0.8)
    assert_equal(trajectory(problem, config), oracle)
    assert num_regions == 1 or distance(oracle, diloco(problem, 7, 0.6, 0.8)) > 1000 * TOLERANCE


def test_two_bits_are_their_oracle() -> None:
    """Sign and magnitude of every value, block by block, a short one at the end."""
    values = torch.randn(3 * 64 + 10, generator=torch.Generator().manual_seed(0))
    coder = Codebook(64)
    decoded = coder.decode(coder.encode(values), values.numel())
    expected = np.concatenate([two_bits(block.double().numpy()) for block in values.split(64)])
    np.testing.assert_allclose(decoded.numpy(), expected, rtol=1e-6)
