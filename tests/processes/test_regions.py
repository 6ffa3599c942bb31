"""Real regions: several processes, real sockets, started with `accelerate launch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_cocodc.link.base import Link
from hf_cocodc.settings import OuterConfig
from hf_cocodc.training.simulation import simulate
from tests.processes import worker
from tests.processes.forks import TIMEOUT_S, fork, fork_regions
from tests.processes.launching import (
    WORKER,
    accelerate,
    environment,
    outcomes,
    run_all,
    run_regions,
)
from tests.processes.worker import STEPS, with_loop, with_trainer

CONFIG = {
    "method": "streaming",
    "sync_interval": 4,
    "num_fragments": 2,
    "overlap_steps": 1,
    "mixing_alpha": 0.5,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "codec": "bf16",
}
COMPARED = ("global_digest", "sends", "landings", "bytes_sent")
# to the other region for payloads, for control messages and one that stays silent, and to the coordinator; of the process group
# one to the other region and one to its store, to which region 0 has both ends of its own and one end of the other region's
CONNECTIONS = {0: 4 + 4, 1: 4 + 2}
# what to begin from; max_steps and the length of an epoch; at the end, whether all hold the same model
GATHERS = 3
SENDS = 4  # fragment 0 at steps 4 and 8, fragment 1 at 6 and 10; then both once more at the end


@pytest.fixture(scope="module")
def here() -> list[dict]:
    """What two regions of a plain loop come to in this process."""
    return plain_loops()


@pytest.fixture(scope="module")
def lockstep(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What they come to in a process of its own: here, models of other tests may have changed how torch computes."""
    folder = tmp_path_factory.mktemp("lockstep")
    process = fork(in_one_process, str(folder / "found.pt"), log=folder / "log.txt")
    process.join(TIMEOUT_S)
    assert process.exitcode == 0, (folder / "log.txt").read_text()
    return torch.load(folder / "found.pt", weights_only=False)


def in_one_process(path: str) -> None:
    torch.save(plain_loops(), path)


def plain_loops() -> list[dict]:
    return simulate(lambda region, link: with_loop(OuterConfig(**CONFIG), link), regions=2)


def assert_same(ours: dict, theirs: dict) -> None:
    assert torch.equal(ours["final"], theirs["final"])
    assert {k: ours[k] for k in COMPARED} == {k: theirs[k] for k in COMPARED}


def assert_promise_kept(promise: dict, world_size: int, connections: int | None, gathers: int) -> None:
    """Nothing but our link leaves the region, and it makes one mean a fragment and round.

    torch.distributed has no group beyond the region (none at all with one rank), and the process has no TCP connection but
    the link's to the other region and the one to the coordinator.
    """
    fragments = CONFIG["num_fragments"]
    assert promise["calls"] == {"mean": SENDS + fragments, "broadcast": fragments, "gather": gathers}
    assert promise["world_size"] == world_size
    if connections is not None:
        assert promise["connections"] == connections


def test_trainer_is_the_plain_loop_in_lockstep(here: list[dict], tmp_path: Path) -> None:
    """Trainer with the callback = OuterOptimizer in an Accelerate loop, bitwise, transfers and bytes included."""

    def train(region: int, link: Link) -> dict:
        return with_trainer(tmp_path, OuterConfig(**CONFIG), link)

    for ours, theirs in zip(simulate(train, regions=2), here, strict=True):
        assert_same(ours, theirs)
        assert ours["sends"] == ours["landings"] == SENDS + 2


def test_gradient_accumulation_counts_optimizer_steps(here: list[dict]) -> None:
    """Two micro-batches of half the size make the same rounds: H counts optimizer steps, not batches."""
    halves = simulate(lambda region, link: with_loop(OuterConfig(**CONFIG), link, accumulate=2), regions=2)
    for ours, theirs in zip(halves, here, strict=True):
        assert (ours["sends"], ours["bytes_sent"]) == (theirs["sends"], theirs["bytes_sent"])
        torch.testing.assert_close(ours["final"], theirs["final"], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("kind", "is_launched"),
    [("trainer", False), ("loop", False), pytest.param("trainer", True, marks=pytest.mark.slow)],
)
def test_two_regions_of_one_rank_equal_lockstep(
    kind: str, is_launched: bool, lockstep: list[dict], tmp_path: Path
) -> None:
    """gloo processes = lockstep, bitwise, and every region ends with the same model."""
    arguments = [kind, str(tmp_path), json.dumps(CONFIG)]
    found = (
        run_regions(2, 1, arguments, tmp_path)
        if is_launched
        else fork_regions(worker.main, 1, arguments, tmp_path)
    )
    assert sorted(found) == ["region0-rank0", "region1-rank0"]
    for name, theirs in zip(sorted(found), lockstep, strict=True):
        assert_same(found[name], theirs)
    assert torch.equal(found["region0-rank0"]["final"], found["region1-rank0"]["final"])
    if kind == "trainer":
        for region, each in enumerate(found[name] for name in sorted(found)):
            assert_promise_kept(each["promise"], 0, CONNECTIONS[region], GATHERS)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "region-1")
        assert torch.equal(
            torch.cat([p.detach().reshape(-1) for p in saved.parameters()]), lockstep[0]["final"]
        )


def test_two_regions_of_two_ranks(tmp_path: Path) -> None:
    """2 regions x 2 ranks (DDP inside): global params and the final model are bit-identical on all four ranks."""
    found = fork_regions(worker.main, 2, ["trainer", str(tmp_path), json.dumps(CONFIG)], tmp_path)
    assert_all_ranks_equal(found)
    first = found["region0-rank0"]
    assert_promise_kept(first["promise"], world_size=2, connections=None, gathers=GATHERS)
    assert not found["region0-rank1"]["promise"]["calls"], "only the leader talks"
    for region in (0, 1):  # all ranks know what their leader has sent
        sent = [found[f"region{region}-rank{rank}"]["bytes_sent"] for rank in (0, 1)]
        assert sent[0] == sent[1] > 0


def assert_all_ranks_equal(found: dict[str, dict]) -> None:
    assert sorted(found) == [f"region{region}-rank{rank}" for region in (0, 1) for rank in (0, 1)]
    assert len({each["global_digest"] for each in found.values()}) == 1
    assert all(torch.equal(each["final"], found["region0-rank0"]["final"]) for each in found.values())


@pytest.mark.slow
def test_a_codec_with_memory_in_regions_of_two_ranks(tmp_path: Path) -> None:
    """Low rank with error feedback and rounds that follow the rank: only the leader has the codec's state, all follow."""
    config = {"method": "dilocox", "sync_interval": 3, "rank": 2, "outer_lr": 0.3}
    arguments = ["trainer", str(tmp_path), json.dumps(config)]
    assert_all_ranks_equal(fork_regions(worker.main, 2, arguments, tmp_path))


@pytest.mark.slow
def test_regions_of_unequal_size(tmp_path: Path) -> None:
    """One rank here, two there (DDP): the leaders talk, and all three ranks end with the same global params."""
    found = fork_regions(worker.main, [1, 2], ["trainer", str(tmp_path), json.dumps(CONFIG)], tmp_path)
    assert sorted(found) == ["region0-rank0", "region1-rank0", "region1-rank1"]
    assert len({each["global_digest"] for each in found.values()}) == 1
    assert all(torch.equal(each["final"], found["region0-rank0"]["final"]) for each in found.values())


@pytest.mark.slow
def test_one_launch_is_as_good_as_two(lockstep: list[dict], tmp_path: Path) -> None:
    """One launch of two processes that split_world(2) makes regions = two launches = lockstep, bitwise."""
    run_all([([*accelerate(2), WORKER, "loop", str(tmp_path), json.dumps(CONFIG), "split"], environment())])
    found = outcomes(tmp_path)
    assert sorted(found) == ["region0-rank0", "region1-rank0"]
    for name, theirs in zip(sorted(found), lockstep, strict=True):
        assert_same(found[name], theirs)


def test_steps_of_the_tests_hold_whole_rounds_and_a_rest() -> None:
    """The runs above end between two sends, so that finish() has something to do."""
    assert STEPS % CONFIG["sync_interval"] != 0
