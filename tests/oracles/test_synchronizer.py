"""The Synchronizer against each method written a second time, straight from its paper, in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.config import OuterConfig
from tests.oracles.diloco import diloco
from tests.oracles.problem import Problem, Trajectory, make_problem
from tests.oracles.streaming import streaming
from tests.toys import Blocks, Region, run

SIZES = (5, 3, 4)


def trajectory(problem: Problem, config: OuterConfig) -> Trajectory:
    """The package's own run of the problem: (theta of every region, Theta of region 0) after every inner step."""

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(torch.tensor(vector, dtype=torch.float32) for vector in problem.start())
        return model, torch.optim.SGD(model.parameters(), lr=problem.eta(1))

    def live(region: Region) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
        states = []
        for step in range(1, problem.T + 1):
            region.optimizer.param_groups[0]["lr"] = problem.eta(step)
            vectors = list(region.model.parameters())
            gradients = problem.gradient(region.index, step, [numpy_of(v) for v in vectors])
            for vector, gradient in zip(vectors, gradients, strict=True):
                vector.grad = torch.tensor(gradient, dtype=torch.float32)
            region.step()
            whole = torch.cat([state.global_params for state in region.synchronizer.fragments])
            states.append(([numpy_of(v) for v in vectors], problem.split(numpy_of(whole))))
        return states

    regions = run(problem.M, config, build, live)
    for others in zip(*regions, strict=True):
        for _, theta in others[1:]:
            assert all((a == b).all() for a, b in zip(theta, others[0][1], strict=True)), (
                "Theta differs between regions"
            )
    return [([local for local, _ in states], states[0][1]) for states in zip(*regions, strict=True)]


def numpy_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def assert_equal(ours: Trajectory, oracle: Trajectory) -> None:
    for step, ((locals_, theta), (their_locals, their_theta)) in enumerate(
        zip(ours, oracle, strict=True), start=1
    ):
        np.testing.assert_allclose(
            np.concatenate(theta), np.concatenate(their_theta), atol=2e-5, err_msg=f"{step}"
        )
        for mine, theirs in zip(locals_, their_locals, strict=True):
            np.testing.assert_allclose(
                np.concatenate(mine), np.concatenate(theirs), atol=2e-5, err_msg=f"{step}"
            )


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
