"""Runs that end with a lost region: the others save a checkpoint of one step, from which all go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from hf_cocodc.snapshot import manifest
from hf_cocodc.snapshot.checkpoint import read
from hf_cocodc.snapshot.folders import usable
from tests.processes.coming_worker import events, loop, trainer
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


@pytest.mark.slow
def test_a_region_that_is_frozen_for_too_long_hears_that_the_run_has_ended(tmp_path: Path) -> None:
    """The other saves in a loop of its own."""
    run = Run(tmp_path, 2, loop, 400, 0.02, "streaming", ALONE, saves=1000, timeout_s=2.0)
    run.wait_for_step(1, 9)
    run.send(1, signal.SIGSTOP)
    [output] = ends(run, 0)
    assert "region 1 is lost: it has given no heartbeat for" in output
    assert manifest.damage(tmp_path / "saved-0") is None and "This region has saved checkpoint-" in output
    run.send(1, signal.SIGCONT)
    [output] = ends(run, 1)
    assert "LeftBehind: the other regions have ended without region 1: " in output
    assert not (tmp_path / "saved-1").exists()


@pytest.mark.slow
def test_a_region_that_is_lost_in_the_last_round_lets_the_others_finish(tmp_path: Path) -> None:
    """From a checkpoint of the last step nobody could go on."""
    run = Run(tmp_path, 3, trainer, 24, 0.05, "diloco", ALONE)
    run.wait_for_step(1, 22)
    run.kill(1)
    found = run.results(0, 2)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    for region in (0, 2):
        assert "region 1 is lost: " in run.log(region).read_text()
        home = tmp_path / "out" / f"region-{region}"
        assert read(usable(home)[24], with_values=False).facts.finished
