"""What `hf-cocodc train` says of regions that end before the run does, with other processes in their place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.cli import train
from hf_cocodc.run.status import LEFT
from hf_cocodc.settings import RegionConfig
from hf_cocodc.training import launch


def a_region(folder: Path, region: int, **told: Any) -> launch.RegionProcess:
    """A region that has ended; like accelerate's, its launcher ends with exit code 1 whatever its ranks ended with."""
    status = folder / f"{region}.json"
    status.write_text(json.dumps({"doing": "training", "step": 3, **told}))
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait()
    with (folder / f"{region}.txt").open("wb") as log:
        pass
    return launch.RegionProcess(region, folder / f"region-{region}", process, log, 0, status)


def test_a_region_that_was_lost_hides_no_checkpoint_of_those_that_have_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped = [a_region(tmp_path, region, error="stopped", exit_code=3) for region in (0, 1)]
    lost = a_region(tmp_path, 2)
    steps = {"region-0": (20, 40), "region-1": (20, 40), "region-2": (10,)}
    monkeypatch.setattr(
        "hf_cocodc.run.checkpoint.checkpoints", lambda region: dict.fromkeys(steps[region.name], region)
    )
    monkeypatch.setattr("hf_cocodc.run.checkpoint.unusable", lambda path, hashes: None)
    for name in steps:
        (tmp_path / name).mkdir()
    said = train._saved(tmp_path, [*stopped, lost])
    assert said.startswith("checkpoint-40 is complete in every region that was left")
    assert [each.has_stopped for each in (*stopped, lost)] == [True, True, False]


def test_a_region_says_that_it_has_left(tmp_path: Path) -> None:
    assert a_region(tmp_path, 0, doing=LEFT).has_left
    assert not a_region(tmp_path, 1).has_left


@pytest.mark.parametrize(
    ("settings", "regions", "said"),
    [
        ({}, [0, 1], "stopping: all regions agree on an inner step"),
        ({"min": 1}, [0, 1], "stopping: all regions hear of it with the next transfer"),
        (
            {"min": 1, "when_one_ends": "continue"},
            [2],
            "leaving: region 2 sends what it has trained, and ends; other regions train on.",
        ),
        (
            {"min": 1, "when_one_ends": "continue"},
            [0, 1],
            "leaving: the regions of this command send what they have trained, and end; other regions train on.",
        ),
        ({"when_one_ends": "continue"}, [0, 1], "stopping: all regions agree on an inner step"),
    ],
)
def test_an_interrupt_says_who_stops(settings: dict[str, Any], regions: list[int], said: str) -> None:
    assert train._in_words(RegionConfig(**settings), regions).startswith(said)
    joining = RegionConfig(**settings, join=True) if "min" in settings else None
    if joining is not None:
        assert train._in_words(joining, regions, is_in=False).endswith(
            "is not in the run yet. The others train on."
        )
