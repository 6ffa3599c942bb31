"""The Synchronizer against the newer methods, each written a second time, straight from its paper, in NumPy float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_cocodc.parts.codecs.codebook import Codebook
from hf_cocodc.settings import OuterConfig
from tests.oracles.diloco import diloco
from tests.oracles.package import TOLERANCE, assert_equal, trajectory
from tests.oracles.problem import distance, make_problem
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


def test_two_bits_are_their_oracle() -> None:
    """Sign and magnitude of every value, block by block, a short one at the end."""
    values = torch.randn(3 * 64 + 10, generator=torch.Generator().manual_seed(0))
    coder = Codebook(64)
    decoded = coder.decode(coder.encode(values), values.numel())
    expected = np.concatenate([two_bits(block.double().numpy()) for block in values.split(64)])
    np.testing.assert_allclose(decoded.numpy(), expected, rtol=1e-6)
