"""Ending together, in real processes over real sockets: whatever ends one region, the others hear of it in good time."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot import folders, manifest
from tests.processes.coordinators import CoordinatorProcess
from tests.processes.ending_worker import LATE_S, STEPS, live
from tests.processes.forks import TIMEOUT_S, Process, fork, rank_env, region_env, torch_master, wait_until
from tests.processes.launching import environment

HEARD = range(7, 11)  # what happens at step 6 rides on the transfers of step 6 or 8, which land a step later
FAR_APART = {"method": "diloco", "sync_interval": STEPS}
_kept_stores: list[TCPStore] = []


def start(
    folder: Path,
    coordinator: Any,
    *own: dict[str, Any],
    ranks: int | list[int] = 1,
    env: Mapping[str, str] = MappingProxyType({}),
    **common: Any,
) -> list[Process]:
    """Two regions; what is said of each in turn, then of both."""
    folder.mkdir(exist_ok=True)
    sizes = [ranks] * 2 if isinstance(ranks, int) else ranks
    bodies = [functools.partial(live, **common, **each) for each in (own or ({}, {}))]
    masters = [torch_master() for _ in bodies]
    _kept_stores.extend(masters)
    return [
        fork(
            body,
            str(folder),
            log=folder / "log.txt",
            **region_env(coordinator, region),
            **rank_env(masters[region], rank, sizes[region]),
            **env,
        )
        for region, body in enumerate(bodies)
        for rank in range(sizes[region])
    ]


def outcomes(folder: Path, processes: list[Process], ranks: int | list[int] = 1) -> list[dict[str, Any]]:
    """What each process came to, all being at their end."""
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, (folder / "log.txt").read_text()[-4000:]
    sizes = [ranks] * 2 if isinstance(ranks, int) else ranks
    places = [(region, rank) for region, size in enumerate(sizes) for rank in range(size)][: len(processes)]
    return [torch.load(folder / f"region{region}-rank{rank}.pt") for region, rank in places]


def run(folder: Path, *own: dict[str, Any], **common: Any) -> list[dict[str, Any]]:
    coordinator = serve_in_thread("127.0.0.1")
    return outcomes(folder, start(folder, coordinator, *own, **common))


def complete(folder: Path, region: int) -> list[int]:
    found = folders.checkpoints(folder / f"region-{region}")
    return [step for step, path in found.items() if manifest.damage(path) is None]


def has_come_to(step: int, journal: Path) -> bool:
    return journal.is_file() and any(event.get("step", 0) >= step for event in read(journal))


def assert_finished_together(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["error"] == theirs["error"] == ""
    assert ours["finished"]
    assert theirs["finished"]
    assert ours["step"] == theirs["step"]
    assert torch.equal(ours["weights"], theirs["weights"])


def test_early_stopping_in_one_region_finishes_all(tmp_path: Path) -> None:
    """Region 1 stops at step 6: a few steps later both have finished, with the same weights."""
    ours, theirs = run(tmp_path, {}, {"action": "stop"})
    assert_finished_together(ours, theirs)
    assert ours["step"] in HEARD


def test_early_stopping_in_one_region_stops_all(tmp_path: Path) -> None:
    """when_one_ends=stop: both end with RunStopped and a complete checkpoint of the same step."""
    for region, found in enumerate(run(tmp_path, {}, {"action": "stop"}, policy="stop")):
        assert found["error"].startswith(
            f"RunStopped: all regions stopped at step {found['step']}: region 1 has"
        )
        assert found["step"] in HEARD
        assert complete(tmp_path, region) == [found["step"]]


def test_early_stopping_in_one_region_stops_nobody(tmp_path: Path) -> None:
    """when_one_ends=continue: both finish after all their steps."""
    ours, theirs = run(tmp_path, {}, {"action": "stop"}, policy="continue")
    assert_finished_together(ours, theirs)
    assert ours["step"] == STEPS


ALWAYS_IN_FLIGHT = {"overlap_steps": 3, "sends_per_interval": 4, "sync_interval": 4, "num_fragments": 2}


@pytest.mark.parametrize(
    "outer",
    [
        {"method": "streaming", "sync_interval": 4, "num_fragments": 2, "overlap_steps": 1},
        {"method": "cocodc", **ALWAYS_IN_FLIGHT},
        pytest.param({"method": "eager", "sync_interval": 3}, marks=pytest.mark.slow),
    ],
    ids=lambda outer: outer["method"],
)
def test_an_error_in_one_region(outer: dict[str, Any], tmp_path: Path) -> None:
    """The other is told which region and what error, and saves; both can go on over the same coordinator, to the very end."""
    coordinator = serve_in_thread("127.0.0.1")
    ours, theirs = outcomes(tmp_path, start(tmp_path, coordinator, {}, {"action": "fail"}, outer=outer))
    assert theirs["error"] == "ValueError: the data is broken"
    assert ours["error"].startswith(f"RunStopped: all regions stopped at step {ours['step']}: region 1 was")
    assert "(ValueError at step 5: the data is broken)" in ours["error"]
    assert ours["step"] in range(6, 12)
    assert complete(tmp_path, 0) == [ours["step"]]
    assert complete(tmp_path, 1) == []
    ours, theirs = outcomes(tmp_path, start(tmp_path, coordinator, resume=True, outer=outer))
    assert_finished_together(ours, theirs)
    assert ours["step"] == STEPS


def test_a_killed_region_is_named(tmp_path: Path) -> None:
    """SIGKILL of region 1 ends region 0 as soon as it hears nothing more, not after the time-out."""
    coordinator = serve_in_thread("127.0.0.1")
    processes = start(tmp_path, coordinator, {}, {"action": "die"})
    [ours] = outcomes(tmp_path, processes[:1])
    processes[1].join(TIMEOUT_S)
    assert processes[1].exitcode == -signal.SIGKILL
    assert "region 1 closed its connection while region 0 waited for fragment" in ours["error"]


BY_DEFAULT = {"HF_COCODC_ON_LOSS": "auto"}


def test_a_killed_region_costs_the_other_nothing_by_default(tmp_path: Path) -> None:
    """As our commands start regions: the other makes all its steps, and says before and at the loss what happens."""
    coordinator = serve_in_thread("127.0.0.1")
    processes = start(tmp_path, coordinator, {}, {"action": "die"}, env=BY_DEFAULT)
    [ours] = outcomes(tmp_path, processes[:1])
    processes[1].join(TIMEOUT_S)
    assert processes[1].exitcode == -signal.SIGKILL
    assert (ours["error"], ours["step"], ours["finished"]) == ("", STEPS, True)
    said = (tmp_path / "log.txt").read_text()
    assert "if a region is lost, the others train on without it until it is back: at least 1 of 2" in said
    assert "from here on only region 0 (region 1 is lost: " in said
    assert (
        "The global batch is 2 samples an inner step (before: 4); the learning rates stay as they are."
        in said
    )


def test_a_run_that_saves_every_epoch_ends_with_a_loss_by_default(tmp_path: Path) -> None:
    """It is not refused because of what nobody has asked for."""
    coordinator = serve_in_thread("127.0.0.1")
    settings = {"env": BY_DEFAULT, "save_strategy": "epoch", "may_differ": None}
    processes = start(tmp_path, coordinator, {}, {"action": "die"}, **settings)
    [ours] = outcomes(tmp_path, processes[:1])
    processes[1].join(TIMEOUT_S)
    assert ours["error"].startswith("RegionLostError: region 1 is lost: ")
    assert complete(tmp_path, 0)[-1] == ours["step"] < STEPS
    said = (tmp_path / "log.txt").read_text()
    assert (
        "if a region is lost, the others stop at one step, with a checkpoint (regions.on_loss=stop)" in said
    )
    assert "training.save_strategy=epoch, and a region that comes back in the middle of an epoch" in said


@pytest.mark.parametrize(
    ("settings", "then"),
    [({}, {}), ({}, {"least": 1}), ({"least": 1, "outer": FAR_APART}, {})],
    ids=["fixed", "fixed, resumed as elastic", "elastic, far from a transfer"],
)
def test_sigterm_to_one_region(settings: dict[str, Any], then: dict[str, Any], tmp_path: Path) -> None:
    """Both save the same step, and go on from it to the bits of a run that nobody stopped."""
    stores = [serve_in_thread("127.0.0.1") for _ in range(2)]
    journal = tmp_path / "again" / "region-1" / "cocodc" / "journal.jsonl"
    steady = {**settings, "logging_strategy": "steps", "logging_steps": 1}
    whole = start(tmp_path / "whole", stores[0], **steady)
    again = start(tmp_path / "again", stores[1], **steady, step_s=0.05)
    wait_until(
        functools.partial(has_come_to, 8, journal),
        again[1],
        tmp_path / "again" / "log.txt",
    )
    again[1].terminate()
    ours, theirs = outcomes(tmp_path / "again", again)
    assert 8 <= ours["step"] == theirs["step"] < STEPS
    for region, found in enumerate((ours, theirs)):
        assert "region 1 was interrupted (SIGTERM)" in found["error"]
        assert complete(tmp_path / "again", region) == [ours["step"]]
    resumed = run(tmp_path / "again", **{**steady, **then}, resume=True)
    expected = outcomes(tmp_path / "whole", whole)
    for found, reference in zip(resumed, expected, strict=True):
        assert found["step"] == reference["step"] == STEPS
        assert torch.equal(found["weights"], reference["weights"])


@pytest.mark.slow
def test_sigterm_to_a_rank_that_is_not_the_leader(tmp_path: Path) -> None:
    """Long before the next transfer all ranks of both regions stop at one step; they go on from there to the same bits."""
    stores = [serve_in_thread("127.0.0.1") for _ in range(2)]
    journal = tmp_path / "again" / "region-1" / "cocodc" / "journal.jsonl"
    steady = {"ranks": 2, "outer": FAR_APART, "least": 1, "logging_strategy": "steps", "logging_steps": 1}
    whole = start(tmp_path / "whole", stores[0], **steady)
    again = start(tmp_path / "again", stores[1], **steady, step_s=0.1)
    wait_until(functools.partial(has_come_to, 5, journal), again[3], tmp_path / "again" / "log.txt")
    again[3].terminate()
    found = outcomes(tmp_path / "again", again, ranks=2)
    [step] = {each["step"] for each in found}
    assert 5 <= step < STEPS
    assert all("region 1 was interrupted (SIGTERM)" in each["error"] for each in found)
    assert [complete(tmp_path / "again", region) for region in range(2)] == [[step]] * 2
    resumed = start(tmp_path / "again", stores[1], **steady, resume=True)
    expected = outcomes(tmp_path / "whole", whole, ranks=2)
    for each, reference in zip(outcomes(tmp_path / "again", resumed, ranks=2), expected, strict=True):
        assert each["step"] == STEPS
        assert torch.equal(each["weights"], reference["weights"])


@pytest.mark.slow
def test_sigterm_to_one_rank_of_a_lone_region(tmp_path: Path) -> None:
    """No rank stops before the others."""
    coordinator, master = serve_in_thread(), torch_master()
    env, log = region_env(coordinator, 0, num_regions=1), tmp_path / "log.txt"
    body = functools.partial(live, step_s=0.1, save_strategy="steps", save_steps=4)
    processes = [fork(body, str(tmp_path), log=log, **env, **rank_env(master, rank, 2)) for rank in range(2)]
    wait_until(lambda: bool(complete(tmp_path, 0)), processes[1], log)
    processes[1].terminate()
    first, second = outcomes(tmp_path, processes, ranks=[2])
    assert first["step"] == second["step"] == max(complete(tmp_path, 0)) < STEPS
    assert all(
        each["error"].startswith("RunStopped") and "(SIGTERM)" in each["error"] for each in (first, second)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "is_away"), [(1, False), (2, True)])
def test_sigterm_to_one_rank_of_the_last_region(ranks: int, is_away: bool, tmp_path: Path) -> None:
    """Region 1 is lost, and the coordinator may be, too: all ranks of region 0 stop at one step."""
    rules = {"least": 1, "step_s": 0.1, "may_differ": "batch"}
    coordinator = serve_in_thread()
    journal = tmp_path / "region-0" / "cocodc" / "journal.jsonl"
    processes = start(tmp_path, coordinator, {}, {"action": "die"}, ranks=[ranks, 1], **rules)
    wait_until(functools.partial(has_come_to, 9, journal), processes[0], tmp_path / "log.txt")
    if is_away:
        coordinator.close()
    processes[ranks - 1].terminate()
    found = outcomes(tmp_path, processes[:ranks], ranks=[ranks, 1])
    [step] = {each["step"] for each in found}
    assert 9 <= step < STEPS
    assert all(each["error"].startswith("RunStopped") for each in found)
    assert complete(tmp_path, 0) == [step]


@pytest.mark.slow
def test_sigterm_after_the_coordinator_has_ended(tmp_path: Path) -> None:
    """The request travels with a transfer then: both regions save the same step. An evaluation due there is left out."""
    coordinator = serve_in_thread()
    journal = tmp_path / "region-1" / "cocodc" / "journal.jsonl"
    steady = {"eval_strategy": "steps", "eval_steps": 1}
    processes = start(tmp_path, coordinator, step_s=0.1, **steady)
    wait_until(functools.partial(has_come_to, 6, journal), processes[1], tmp_path / "log.txt")
    coordinator.close()
    processes[1].terminate()
    found = outcomes(tmp_path, processes)
    [step] = {each["step"] for each in found}
    assert 6 <= step < STEPS
    assert all(each["error"].startswith("RunStopped") for each in found)
    assert [complete(tmp_path, region) for region in range(2)] == [[step]] * 2
    evaluated = [event["step"] for event in read(journal) if event["kind"] == "evaluate"]
    assert max(evaluated) == step - 1


@pytest.mark.slow
def test_sigterm_while_the_coordinator_hangs(tmp_path: Path) -> None:
    """Its process is suspended. The request travels with a transfer, from a rank that is not the leader."""
    journal = tmp_path / "region-1" / "cocodc" / "journal.jsonl"
    with CoordinatorProcess(tmp_path) as coordinator:
        processes = start(tmp_path, coordinator, ranks=2, least=1, step_s=0.1)
        wait_until(functools.partial(has_come_to, 6, journal), processes[3], tmp_path / "log.txt")
        coordinator.freeze()
        processes[3].terminate()
        found = outcomes(tmp_path, processes, ranks=2)
    [step] = {each["step"] for each in found}
    assert 6 <= step < STEPS
    assert all(each["error"].startswith("RunStopped") for each in found)
    assert [complete(tmp_path, region) for region in range(2)] == [[step]] * 2


def test_sigterm_to_every_rank_of_a_region(tmp_path: Path) -> None:
    """Ranks that hear the signal at different steps leave at the same one, as do those of the other region."""
    coordinator, journal = serve_in_thread("127.0.0.1"), tmp_path / "region-1" / "cocodc" / "journal.jsonl"
    processes = start(tmp_path, coordinator, ranks=2, step_s=0.05)
    for rank, step in ((1, 6), (0, 8)):
        wait_until(functools.partial(has_come_to, step, journal), processes[2 + rank], tmp_path / "log.txt")
        processes[2 + rank].terminate()
    found = outcomes(tmp_path, processes, ranks=2)
    assert {each["step"] for each in found} == {found[0]["step"]}
    assert all(each["error"].startswith("RunStopped") for each in found)
    assert [complete(tmp_path, region) for region in range(2)] == [[found[0]["step"]]] * 2


def test_an_error_in_one_rank_of_a_region(tmp_path: Path) -> None:
    """A region that a rank has left cannot go on: nobody waits for it until the time-out."""
    coordinator = serve_in_thread("127.0.0.1")
    processes = start(tmp_path, coordinator, {}, {"action": "fail", "on_rank": 1}, ranks=2)
    ours, beside, _, failed = outcomes(tmp_path, processes, ranks=2)
    assert failed["error"] == "ValueError: the data is broken"
    for rank in (ours, beside):
        assert rank["error"].startswith("RegionLostError: region 1 is lost: ")
    [step] = {each["step"] for each in (ours, beside)}
    assert complete(tmp_path, 0) == [step], "the others save where they end"


@pytest.mark.slow
def test_a_late_region_costs_a_region_of_several_ranks_nothing(tmp_path: Path) -> None:
    """Region 1 starts late, and is late once more at a transfer, by more than the time-out of region 0's own processes."""
    hasty = {"patience_s": LATE_S - 3, "may_differ": "batch"}
    late = {"action": "dawdle", "late_s": LATE_S, "may_differ": "batch"}
    coordinator = serve_in_thread("127.0.0.1")
    processes = start(tmp_path, coordinator, hasty, late, ranks=[2, 1])
    first, second, other = outcomes(tmp_path, processes, ranks=[2, 1])
    assert_finished_together(first, other)
    assert_finished_together(second, other)


@pytest.mark.parametrize("policy", ["auto", "continue"])
def test_an_iterable_that_runs_dry_in_one_region(policy: str, tmp_path: Path) -> None:
    """Region 1 has data for 5 steps: both finish soon after, or region 0 goes on to the end."""
    ours, theirs = run(tmp_path, {}, {"dry": True, "rows": 10}, policy=policy)
    assert_finished_together(ours, theirs)
    assert ours["step"] in HEARD if policy == "auto" else ours["step"] == STEPS


def test_epochs_of_unequal_shards(tmp_path: Path) -> None:
    """Two epochs of 12 and of 16 rows in batches of 2: both make the fewer steps."""
    ours, theirs = run(tmp_path, {"rows": 16}, {"rows": 12}, max_steps=-1, num_train_epochs=2)
    assert_finished_together(ours, theirs)
    assert ours["step"] == 12


@pytest.mark.slow
def test_a_second_signal_is_heard_of_while_the_process_lives_on(tmp_path: Path) -> None:
    """A notebook survives its KeyboardInterrupt: the other region still learns of it, and why."""
    coordinator = serve_in_thread("127.0.0.1")
    first, second = start(
        tmp_path, coordinator, {}, {"action": "interrupt twice", "lingers": True}, timeout_s=8.0
    )
    [ours] = outcomes(tmp_path, [first])
    assert second.is_alive()
    second.kill()
    assert ours["error"].startswith("RegionLostError: region 1 is lost: ")
    assert "KeyboardInterrupt at step 5" in ours["error"]


@pytest.mark.slow
def test_a_second_signal_is_heard_of_at_once(tmp_path: Path) -> None:
    """KeyboardInterrupt in region 1 ends its script; region 0's ends soon after and names it."""
    coordinator = serve_in_thread("127.0.0.1")
    scripts = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.ending_worker", str(tmp_path), json.dumps(arguments)],
            env=environment(**region_env(coordinator, region)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for region, arguments in enumerate([{}, {"action": "interrupt twice"}])
    ]
    try:
        _, interrupted = scripts[1].communicate(timeout=TIMEOUT_S)
        _, said = scripts[0].communicate(timeout=TIMEOUT_S)
    finally:
        for script in scripts:
            script.kill()
            script.wait()
    assert scripts[1].returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert "SIGINT: region 1 trains on until the others have heard of it" in interrupted
    assert scripts[0].returncode == 0, said[-4000:]
    found = torch.load(tmp_path / "region0-rank0.pt")
    assert found["error"].startswith("RegionLostError: region 1 is lost: ")
    assert "KeyboardInterrupt at step 5" in found["error"]
