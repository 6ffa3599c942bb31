"""Runs that end with a lost region: the others save a checkpoint of one step, from which all go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_cocodc.snapshot.folders import usable
from tests.processes.coming_worker import events, trainer
from tests.processes.test_coming_and_going import TIMEOUT_S, Run

ALONE = None
"""`regions.min` of a run that ends with a lost region."""


def ends(run: Run, *regions: int) -> list[str]:
    """The outputs of regions that end with an error."""
    for region in regions:
        process = run.processes[region]
        process.join(TIMEOUT_S)
        assert process.exitcode == 1, run.log(region).read_text()[-6000:]
    return [run.log(region).read_text() for region in regions]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["streaming", "eager"])
def test_a_region_that_is_killed_ends_the_run_with_checkpoints(method: str, tmp_path: Path) -> None:
    run = Run(tmp_path, 3, trainer, 40, 0.05, method, ALONE)
    run.wait_for_step(1, 14)
    run.kill(1)
    outputs = ends(run, 0, 2)
    folders = [tmp_path / "out" / f"region-{region}" for region in range(3)]
    [step] = {max(usable(folder)) for folder in (folders[0], folders[2])}
    assert step > 10 and step not in usable(folders[1])
    for output in outputs:
        assert "RegionLostError: region 1 is lost: " in output, output
        assert f"This region has saved checkpoint-{step}" in output and "--resume" in output
    [error] = events(tmp_path, 0, "error")
    assert error["exit_code"] == 1 and error["step"] == step
    again = Run(tmp_path, 3, trainer, 40, 0.0, method, ALONE, resume=True)
    found = again.results(0, 1, 2)
    assert {each["began_at"] for each in found} == {step}
    assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found)
