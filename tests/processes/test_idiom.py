"""`get_last_checkpoint(output_dir)` in real regions, before the Trainer is built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hf_cocodc.run.journal import read
from hf_cocodc.snapshot.folders import point
from tests.processes import idiom_worker
from tests.processes.forks import fork_regions
from tests.processes.idiom_worker import SAVED, STEPS


def trained(folder: Path, log: Path) -> dict[str, dict]:
    found = fork_regions(idiom_worker.main, 1, [folder], log)
    assert not found
    return {path.stem: torch.load(path) for path in sorted(folder.glob("region*-rank0.pt"))}


@pytest.mark.slow
def test_regions_resume_from_what_the_idiom_finds(tmp_path: Path) -> None:
    """As after a crash when region 0 had saved step 6 and region 1 had not: both resume from step 3, to the same bits."""
    folder = tmp_path / "run"
    whole = trained(folder, tmp_path)
    for region, kept in ((0, 2 * SAVED), (1, SAVED)):
        for step in range(kept + SAVED, STEPS + 1, SAVED):
            shutil.rmtree(folder / f"region-{region}" / f"checkpoint-{step}")
    point(folder / "region-0")
    again = trained(folder, tmp_path)
    for region in (0, 1):
        name = f"region{region}-rank0"
        assert whole[name]["last"] is None
        assert again[name]["last"] == str(folder / f"checkpoint-{2 * SAVED}")
        assert torch.equal(again[name]["final"], whole[name]["final"])
        journal = read(folder / f"region-{region}" / "cocodc" / "journal.jsonl")
        assert [event["step"] for event in journal if event["kind"] == "resume"] == [SAVED]
