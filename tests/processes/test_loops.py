"""Saving mid-round and loading in a new launch, with one or two ranks a region: plain loops and Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_cocodc.run.journal import read
from hf_cocodc.snapshot import checkpoint as state
from tests.processes import forks
from tests.processes.loop_worker import SAVED_AT, go_back, main, poisoned, stop_twice


def fork_regions(ranks: int, arguments: list[str], folder: Path) -> dict[str, dict]:
    return forks.fork_regions(main, ranks, arguments, folder)


@pytest.mark.parametrize(("kind", "ranks"), [("loop", 1), ("loop", 2), ("trainer", 2)])
def test_a_new_launch_goes_on_bit_for_bit(kind: str, ranks: int, tmp_path: Path) -> None:
    """Two regions save with a transfer in flight and train on; another launch loads that and comes to the same end."""
    whole = fork_regions(ranks, [kind, str(tmp_path), "save"], tmp_path)
    for region in range(2):
        folder = tmp_path / f"region-{region}"
        saved = state.read(folder / f"checkpoint-{SAVED_AT}" if kind == "trainer" else folder)
        assert (saved.facts.step, saved.facts.region) == (SAVED_AT, region)
        assert [len(fragment["in_flight"]) for fragment in saved.state["fragments"]] == [1, 0]
    for mode in ("load", "load first") if (kind, ranks) == ("loop", 2) else ("load",):
        for path in tmp_path.glob("*.pt"):
            path.unlink()
        again = fork_regions(ranks, [kind, str(tmp_path), mode], tmp_path)
        assert len(again) == len(whole) == 2 * ranks
        for name, found in again.items():
            assert torch.equal(found["weights"], whole[name]["weights"]), (mode, name)


@pytest.mark.parametrize(
    ("settings", "sharded"),
    [
        ({"codec": "lowrank", "rank": 4, "error_feedback": True}, False),
        pytest.param({"codec": "int8", "error_feedback": True}, False, marks=pytest.mark.slow),
        pytest.param({"codec": "int8", "error_feedback": True}, True, marks=pytest.mark.slow),
    ],
)
def test_a_region_of_two_ranks_goes_back_while_it_runs(settings: dict, sharded: bool, tmp_path: Path) -> None:
    """`load_state` in a running loop, with a codec that remembers: the steps after it are made again, bit for bit."""
    settings = {"method": "streaming", **settings}
    found = forks.fork_regions(go_back, 2, [str(tmp_path), settings, sharded], tmp_path)
    for name, each in found.items():
        (params, digest), (again, same) = each["seen"]
        assert torch.equal(params, again), name
        assert digest == same, name


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_after_a_stop_can_be_stopped_again(ranks: int, tmp_path: Path) -> None:
    """`load_state` in the same processes after `ask_to_stop`: the request counts no longer, and a new one does."""
    found = forks.fork_regions(stop_twice, ranks, [str(tmp_path)], tmp_path)
    first, second = next(iter(found.values()))["stops"]
    assert all(each["stops"] == [first, second] for each in found.values())
    for (step, verdict, why), asked_at in ((first, 20), (second, 60)):
        assert asked_at <= step < 500
        assert (verdict, why) == ("stop", f"region 1 was interrupted (asked at {asked_at})")


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_of_a_region_begin_anew(sharded: bool, tmp_path: Path) -> None:
    """One step of one rank is not finite: its region comes back, and all ranks end with finite weights that agree."""
    found = forks.fork_regions(poisoned, 2, [str(tmp_path), sharded], tmp_path)
    ours, theirs = (read(tmp_path / f"region-{region}.jsonl") for region in range(2))
    [anew] = [event["step"] for event in theirs if event["kind"] == "begin_anew"]
    late = [event["regions"] for event in ours if event["kind"] == "land" and event["sent_at"] > anew]
    assert late
    assert set(late) == {2}
    for rank in range(2):
        weights = found[f"region0-rank{rank}"]["weights"]
        assert torch.isfinite(weights).all()
        assert torch.equal(weights, found[f"region1-rank{rank}"]["weights"])
