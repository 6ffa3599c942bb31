"""Every method in every kind of region that the documentation's matrix names: two ranks, DDP or FSDP2, Trainer or plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.matrix import SETTINGS
from tests.processes import matrix_worker
from tests.processes.forks import fork_regions


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_method_in_regions_of_two_ranks(kind: str, tmp_path: Path) -> None:
    """All four ranks end with the same global weights; DiLoCoX's low rank over shards is refused with the reason."""
    found = fork_regions(matrix_worker.main, 2, [kind, tmp_path], tmp_path)
    assert sorted(found) == [f"region{region}-rank{rank}" for region in (0, 1) for rank in (0, 1)]
    first = found["region0-rank0"]
    assert set(first) == {f"{method}, {loop}" for method in SETTINGS for loop in ("Trainer", "plain loop")}
    for cell, outcome in first.items():
        if kind == "fsdp" and cell.startswith("dilocox"):
            assert "outer.codec=lowrank with FSDP2" in outcome
            continue
        weights, landings = outcome
        assert landings >= 2, cell
        assert torch.isfinite(weights).all(), cell
        for name, other in found.items():
            assert torch.equal(other[cell][0], weights), f"{cell}: {name} differs"
