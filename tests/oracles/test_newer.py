"""The Synchronizer against the newer methods, each written a second time, straight from its paper, in NumPy float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_cocodc.parts.codecs.tiles import Codebook
from hf_cocodc.run.muon import muon
from hf_cocodc.settings import OuterConfig
from tests.oracles.diloco import diloco
from tests.oracles.muloco import muloco
from tests.oracles.package import TOLERANCE, assert_equal, trajectory
from tests.oracles.problem import distance, make_problem
from tests.oracles.radial import radial_diloco
from tests.oracles.sparseloco import sparseloco, two_bits

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
def test_muloco_follows_its_oracle(num_regions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuLoCo's local and global params equal the nested loops of the paper at every step of three rounds.

    torch's Muon orthogonalizes in bf16, in which no two machines need agree: here it is left in fp32.
    """
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # of torch 2.13 and older
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    shapes = [(6, 9), (8, 3), (5,)]
    rates = [0.05 * (1 - step / 40) for step in range(21)]
    problem = make_problem(num_regions, [54, 24, 5], T=21, lr=rates, seed=num_regions)
    config = OuterConfig(method="muloco", sync_interval=7, outer_lr=0.7, outer_momentum=0.6, codec="fp32")
    oracle = muloco(problem, shapes, 7, 0.7, 0.6)
    assert_equal(trajectory(problem, config, shapes, inner=lambda model, lr: muon(model, lr=lr)), oracle)
    assert distance(oracle, diloco(problem, 7, 0.7, 0.6)) > 1000 * TOLERANCE


def test_muloco_sends_four_bits() -> None:
    """Its codec is the one of the block coders' oracle, and with it the run ends near the one without."""
    problem = make_problem(2, [54, 24, 5], T=21, lr=0.05, seed=0)
    shapes = [(6, 9), (8, 3), (5,)]
    [fp32, int4] = [
        trajectory(
            problem,
            OuterConfig(method="muloco", sync_interval=7, **settings),  # type: ignore[arg-type]
            shapes,
            inner=lambda model, lr: muon(model, lr=lr),
        )
        for settings in ({"codec": "fp32"}, {})
    ]
    assert 0 < distance(fp32, int4) < 0.2


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
