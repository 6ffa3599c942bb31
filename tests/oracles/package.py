"""The package's own run of an oracle's problem, and how near to the oracle it has to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hf_cocodc.link.lockstep import VirtualLink
from hf_cocodc.methods import Method
from hf_cocodc.settings import OuterConfig
from tests.oracles.problem import Problem, RegionTrajectory, Trajectory
from tests.toys import Blocks, Region, run

TOLERANCE = 2e-5
"""Largest difference between fp32 here and float64 there, of parameters of magnitude 1 over 60 steps or so."""


Inner = Callable[[nn.Module, float], torch.optim.Optimizer]


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The inner optimizer of most oracles."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def by_region(
    problem: Problem,
    config: OuterConfig | Method,
    shapes: Sequence[tuple[int, ...]] | None = None,
    observe: Callable[[Region], None] | None = None,
    virtual: VirtualLink | None = None,
    finish: bool = False,
    inner: Inner = sgd,
) -> RegionTrajectory:
    """The package's own run of the problem: (theta, Theta) of every region after every inner step.

    Args:
        problem: each of its fragments becomes a block of the model.
        config: the method.
        shapes: of the blocks; by default they are vectors.
        observe: called in every region after every inner step.
        virtual: the link, where simulated time matters.
        finish: whether the run is finished, and the last entry is what that leaves.
        inner: makes the inner optimizer of a model, with a learning rate.
    """
    shapes = shapes or [(-1,)] * len(problem.sizes)

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        pieces = zip(problem.start(), shapes, strict=True)
        model = Blocks(torch.tensor(vector, dtype=torch.float32).view(shape) for vector, shape in pieces)
        return model, inner(model, problem.eta(1))

    def live(region: Region) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
        states = []
        for step in range(1, problem.T + 1):
            for group in region.optimizer.param_groups:
                group["lr"] = problem.eta(step)
            vectors = list(region.model.parameters())
            gradients = problem.gradient(region.index, step, [numpy_of(v).ravel() for v in vectors])
            for vector, gradient in zip(vectors, gradients, strict=True):
                vector.grad = torch.tensor(gradient, dtype=torch.float32).view_as(vector)
            region.step()
            if observe is not None:
                observe(region)
            states.append(state_of(region))
        if finish:
            region.synchronizer.finish()
            states.append(state_of(region))
        return states

    def state_of(region: Region) -> tuple[list[np.ndarray], list[np.ndarray]]:
        whole = torch.cat([state.global_params for state in region.synchronizer.fragments])
        return [numpy_of(v).ravel() for v in region.model.parameters()], problem.split(numpy_of(whole))

    return [
        ([local for local, _ in states], [theta for _, theta in states])
        for states in zip(*run(problem.M, config, build, live, virtual), strict=True)
    ]


def trajectory(
    problem: Problem,
    config: OuterConfig | Method,
    shapes: Sequence[tuple[int, ...]] | None = None,
    observe: Callable[[Region], None] | None = None,
    virtual: VirtualLink | None = None,
    inner: Inner = sgd,
) -> Trajectory:
    """`by_region` for methods whose Theta is common: it has to be equal in all regions, bit for bit."""
    found = []
    for locals_, thetas in by_region(problem, config, shapes, observe, virtual, inner=inner):
        for theta in thetas[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(theta, thetas[0], strict=True)), "Theta differs"
        found.append((locals_, thetas[0]))
    return found


def numpy_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def assert_equal(ours: Trajectory, oracle: Trajectory) -> None:
    for step, ((locals_, theta), (their_locals, their_theta)) in enumerate(
        zip(ours, oracle, strict=True), start=1
    ):
        np.testing.assert_allclose(
            np.concatenate(theta), np.concatenate(their_theta), atol=TOLERANCE, err_msg=f"{step}"
        )
        for mine, theirs in zip(locals_, their_locals, strict=True):
            np.testing.assert_allclose(
                np.concatenate(mine), np.concatenate(theirs), atol=TOLERANCE, err_msg=f"{step}"
            )
