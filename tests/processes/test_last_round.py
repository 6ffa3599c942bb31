"""Regions that leave in the last round of a run, join it there, or come when it has ended: processes of their own."""

from __future__ import annotations

import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_cocodc.coordinator.client import status
from tests.processes.coming_worker import events, loop
from tests.processes.forks import wait_until
from tests.processes.test_coming_and_going import TIMEOUT_S, Run

STEPS = 30

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "how"), [("diloco, 10 steps", "command"), ("streaming, 10 steps", "signal")]
)
def test_a_region_that_leaves_in_the_last_round(method: str, how: str, tmp_path: Path) -> None:
    """Before its leave counts, it may have come to the end with the others: then it has finished, as they have."""
    body = partial(loop, when_one_ends="continue", hears_signals=True)
    run = Run(tmp_path, 3, body, STEPS, 0.1, method, 1)
    run.wait_for_step(2, 22)
    if how == "command":
        run.ask_to_leave(2)
    else:
        run.send(2, signal.SIGTERM)
    first, second, third = run.results(0, 1, 2)
    assert first["inner_step"] == second["inner_step"] == STEPS
    assert first["verdict"] == second["verdict"] is None
    assert torch.equal(first["weights"], second["weights"])
    assert third["inner_step"] <= STEPS
    if third["verdict"] != "leave":
        assert third["inner_step"] == STEPS
        assert torch.equal(first["weights"], third["weights"])
    assert max(event["step"] for event in events(tmp_path, 2, "send", "land", "note")) <= STEPS


def has_come_too_late(run: Run, region: int) -> bool:
    """Whether a region has ended because its run has."""
    run.processes[region].join(TIMEOUT_S)
    said = run.log(region).read_text()
    assert run.processes[region].exitcode == 0, said[-4000:]
    return (
        re.search(r"has finished (before this region|at step \d+: )|ends before this region", said)
        is not None
    )


@pytest.mark.parametrize("before", [1, 8])
def test_a_region_joins_a_run_that_is_about_to_end(before: int, tmp_path: Path) -> None:
    """It comes in and ends with the others, or says that it is too late. It waits for nobody."""
    run = Run(tmp_path, 2, partial(loop, max=3), 16, 0.1, "diloco", 1)
    run.wait_for_step(0, 16 - before)
    run.start(2, join=True)
    for region in (0, 1):
        run.processes[region].join(TIMEOUT_S)
    if not has_come_too_late(run, 2):
        first, second, third = run.results(0, 1, 2)
        assert torch.equal(first["weights"], second["weights"])
        assert torch.equal(first["weights"], third["weights"])


def test_a_newcomer_that_catches_up_while_its_run_ends(tmp_path: Path) -> None:
    """The others hurry to their end as soon as it is there."""
    run = Run(tmp_path, 2, partial(loop, max=3), 400, 0.2, "diloco", 1)
    run.wait_for_step(0, 5)
    run.start(2, join=True)
    wait_until(
        lambda: bool(status(run.coordinator.address, None, "elastic")[0]["newcomers"]),
        *(run.processes[2], run.log(2)),
    )
    first, second = run.results(0, 1)
    assert torch.equal(first["weights"], second["weights"])
    if not has_come_too_late(run, 2):
        [third] = run.results(2)
        assert torch.equal(first["weights"], third["weights"])


def test_a_region_joins_a_run_that_has_ended(tmp_path: Path) -> None:
    """It says so at once, and where the model is."""
    run = Run(tmp_path, 2, partial(loop, max=3), 12, 0.0, "diloco", 1)
    run.results(0, 1)
    begun = time.monotonic()
    run.start(2, join=True)
    assert has_come_too_late(run, 2)
    assert time.monotonic() < begun + TIMEOUT_S
    assert "run 'elastic' has finished at step 12: there is nothing to join" in run.log(2).read_text()


def test_a_region_is_started_again_after_the_end(tmp_path: Path) -> None:
    """By the command of its first start, as a supervisor does. All regions may have been started anew: it waits for them, and
    says at once that the run has ended."""
    run = Run(tmp_path, 2, partial(loop, max=3), 12, 0.0, "diloco", 1)
    run.results(0, 1)
    run.start(1)
    wait_until(
        lambda: "Run 'elastic' has ended at step 12 (finished)" in run.log(1).read_text(),
        run.processes[1],
        run.log(1),
    )
    run.start(0)
    first, second = run.results(0, 1)
    assert torch.equal(first["weights"], second["weights"])
