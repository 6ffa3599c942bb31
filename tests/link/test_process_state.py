"""Random numbers of CUDA in regions that take turns in one process. Generators on the host stand for those of two GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_cocodc.link.lockstep import LockstepLink, run_in_lockstep
from hf_cocodc.link.process_state import random_state_kept

Steps = list[str | int]
"""What a region does: "start" and "draw" on its GPUs, "wait" for the others, or give torch this seed."""


class Cuda:
    """CUDA as a process has it: before it starts, it keeps only the last seed; afterwards a state for each GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seed: int | None = None
        self.generators: list[torch.Generator] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(self.generators))
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.give)
        monkeypatch.setattr(
            torch.cuda, "get_rng_state_all", lambda: [each.get_state() for each in self.generators]
        )
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", self.go_back)

    def give(self, seed: int) -> None:
        self.seed = seed
        for each in self.generators:
            each.manual_seed(seed)

    def go_back(self, states: list[torch.Tensor]) -> None:
        for each, state in zip(self.generators, states, strict=True):
            each.set_state(state)

    def start(self) -> None:
        if not self.generators:
            self.generators = [torch.Generator() for _ in range(2)]
            for each in self.generators:
                each.seed() if self.seed is None else each.manual_seed(self.seed)

    def draw(self) -> float:
        self.start()
        return sum(torch.rand((), generator=each).item() for each in self.generators)


def drawn(cuda: Cuda, steps: Steps, wait: Callable[[], object]) -> list[float]:
    """What a region draws."""
    found = []
    for step in steps:
        if isinstance(step, int):
            torch.manual_seed(step)
        elif step == "draw":
            found.append(cuda.draw())
        else:
            {"start": cuda.start, "wait": wait}[step]()
    return found


@pytest.mark.parametrize(
    "regions",
    [
        [["draw", "wait", "draw"], ["draw", "wait", "draw"]],  # it starts before region 1 has its first turn
        [["start", "wait", "draw"], ["wait", "draw", "draw"]],
        [["wait", "draw", "wait", "draw"], ["wait", "wait", "draw"]],  # region 1 has waited before
        [
            [7, "wait", "draw"],
            [8, "wait", "draw", "wait"],
            ["wait", 9, "wait", "draw"],
        ],  # seeds before it starts
        [["draw", 7, "wait", "draw", "wait"], ["draw", "wait", "wait", "draw"]],
    ],
)
def test_each_region_draws_what_it_would_draw_in_a_process_of_its_own(
    regions: list[Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever region CUDA starts in, and however often it has drawn by then."""
    waits = max(steps.count("wait") for steps in regions)
    regions = [[*steps, *["wait"] * (waits - steps.count("wait"))] for steps in regions]
    alone = []
    for steps in regions:
        cuda = Cuda(monkeypatch)
        torch.manual_seed(5)
        alone.append(drawn(cuda, steps, lambda: None))
    cuda = Cuda(monkeypatch)
    torch.manual_seed(5)

    def live(region: int, link: LockstepLink) -> list[float]:
        return drawn(cuda, regions[region], lambda: link.gather({}, "a turn"))

    assert run_in_lockstep(len(regions), live) == alone
    assert cuda.draw() == drawn(Cuda(monkeypatch), [5, "draw"], lambda: None)[0]


def test_a_block_in_which_cuda_starts_leaves_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    torch.manual_seed(5)
    with random_state_kept():
        first = cuda.draw()
    assert cuda.draw() == first
