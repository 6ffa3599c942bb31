"""Regions of one cluster, real processes whose payloads travel over gloo: the same bits as over TCP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_cocodc.methods import METHODS
from tests.processes.cluster_worker import main
from tests.processes.forks import fork_regions

SOME = ["streaming", "cocodc"]


@pytest.mark.parametrize(
    ("ranks", "names", "sharded"),
    [
        (1, list(METHODS), False),
        pytest.param(2, SOME, False, marks=pytest.mark.slow, id="ddp"),
        pytest.param(2, SOME, True, marks=pytest.mark.slow, id="fsdp2"),
    ],
)
def test_every_method_ends_with_the_bits_of_tcp(
    ranks: int, names: list[str], sharded: bool, tmp_path: Path
) -> None:
    """With ranks that share a model, and with shards: then every rank has a group of its own with its like."""
    found = {}
    for link in ("gloo", "tcp"):
        folder = tmp_path / link
        folder.mkdir()
        found[link] = fork_regions(main, ranks, [str(folder), link, names, sharded], folder)
    assert len(found["gloo"]) == 2 * ranks
    for process, methods in found["gloo"].items():
        for name in names:
            other = found["tcp"][process][name]
            assert torch.equal(methods[name]["weights"], other["weights"]), (process, name)
            assert methods[name]["bytes"] == other["bytes"] > 0
            assert methods[name].get("link", ["gloo"]) == ["gloo"]
            assert not other.get("link")
