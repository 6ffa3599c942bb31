"""The weights of regions that have several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import weights_worker
from tests.processes.forks import fork_regions
from tests.processes.weights_worker import STEPS, TRAINED


@pytest.mark.slow
def test_the_tokens_of_all_ranks_of_a_region_are_its_weight(tmp_path: Path) -> None:
    """Against the mean by hand: DDP means the gradients of a region, and its tokens are the sum over its ranks."""
    found = fork_regions(weights_worker.main, 2, [str(tmp_path)], tmp_path)
    gradients = [(TRAINED[region, 0][0] + TRAINED[region, 1][0]) / 2 for region in (0, 1)]
    tokens = [TRAINED[region, 0][1] + TRAINED[region, 1][1] for region in (0, 1)]
    mean = sum(g * t for g, t in zip(gradients, tokens, strict=True)) / sum(tokens)
    for rank in found.values():
        torch.testing.assert_close(rank["weight"], torch.full((1, 3), -STEPS * mean))
