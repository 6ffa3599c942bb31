"""Regions that die, freeze, come back or join, and a coordinator that dies, while the others train on: real processes."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.emulation.privileges import obstacle
from tests.benchmarks.emulation.wan import Wan
from tests.processes.faults import Regions
from tests.processes.faults_worker import POINTS, Task

METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_interval": 10},
    "streaming": {"method": "streaming", "sync_interval": 12, "num_fragments": 2, "overlap_steps": 3},
}
TIMES = {"in finish": 1, "between its haves": 3}
"""At which time a region dies: it says to each of the two others that it has a result."""
WITH_NEWCOMERS = {"while it gives its base", "before it connects to a newcomer"}
OVERLAPPED = {"in a transfer", "between its haves"}
OF_MEMBERS = [point for point in POINTS if point not in WITH_NEWCOMERS]

pytestmark = pytest.mark.slow


def task(folder: Path, steps: int = 100, outer: str = "diloco", **more: Any) -> Task:
    """A run of regions of which two must be there."""
    regions = {"min": 2, "timeout_s": 20.0, **more.pop("regions", {})}
    return Task(str(folder), steps, outer=METHODS[outer], regions=regions, **more)


def lost_steps(regions: Regions, region: int) -> list[int]:
    """Steps of a region's run at which a transfer that it sent did not land."""
    journal = regions.journal(region)
    sent = {event["step"] for event in journal if event["kind"] == "send"}
    return sorted(sent - {event["sent_at"] for event in journal if event["kind"] == "land"})


@pytest.mark.parametrize(
    ("point", "outer"),
    [(point, "streaming" if point in OVERLAPPED else "diloco") for point in OF_MEMBERS],
)
def test_a_region_that_dies_costs_the_others_nothing_they_have_trained(
    point: str, outer: str, tmp_path: Path
) -> None:
    """SIGKILL of region 2 of three at this point: every transfer of the others lands, with equal params, and they finish."""
    saves = 15 if point == "in a save" else 0
    with Regions(3, task(tmp_path, 60, outer, pace_s=0.02, save_every=saves)) as regions:
        regions.start([0, 1])
        regions.start([2], fault=f"{point}:{TIMES.get(point, 2)}")
        regions.end([0, 1])
        regions.check()
        assert regions.processes[2].exitcode == -9, "it has come to the point"
        assert regions.members(0) == regions.members(1) == [0, 1]
        for region in (0, 1):
            assert lost_steps(regions, region) == []


def test_a_freeze_shorter_than_grace_changes_nothing(tmp_path: Path) -> None:
    """The others wait."""
    with Regions(3, task(tmp_path, 80, regions={"grace_s": 15.0})) as regions:
        regions.start()
        regions.until_step(15)
        regions.freeze(2)
        time.sleep(2)
        regions.thaw(2)
        regions.end([0, 1, 2])
        regions.check()
        assert len([event for event in regions.journal(0) if event["kind"] == "epoch"]) == 1


def test_two_regions_join_at_once(tmp_path: Path) -> None:
    """Regions 2 and 3 enter a run of two."""
    with Regions(2, task(tmp_path, 400, pace_s=0.1, regions={"max": 4})) as regions:
        regions.start()
        regions.until_step(15)
        regions.start([2, 3], join=True)
        regions.until_members([0, 1, 2, 3], [0, 1])
        regions.end([0, 1, 2, 3])
        regions.check()


def test_a_donor_that_dies_while_it_gives_its_base(tmp_path: Path) -> None:
    """The newcomer asks another member."""
    with Regions(3, task(tmp_path, 300, pace_s=0.1)) as regions:
        regions.start([0], fault="while it gives its base:1")
        regions.start([1, 2])
        regions.until_step(15)
        regions.kill(2)
        regions.until_members([0, 1], [0, 1])
        regions.start([2])
        regions.until(lambda: regions.processes[0].exitcode == -9, "the donor dies")
        regions.until_members([1, 2], [1])
        regions.end([1, 2])
        regions.check()


def test_a_member_that_dies_while_a_newcomer_connects_to_it(tmp_path: Path) -> None:
    """The newcomer comes in with those that are left."""
    with Regions(3, task(tmp_path, 400, pace_s=0.1, regions={"max": 4})) as regions:
        regions.start([0, 1])
        regions.start([2], fault="before it connects to a newcomer:1")
        regions.until_step(15)
        regions.start([3], join=True)
        regions.until_members([0, 1, 3], [0, 1, 3])
        assert regions.processes[2].exitcode == -9, "it has come to the point"
        regions.end([0, 1, 3])
        regions.check()


def test_a_region_finds_its_run_though_all_members_were_frozen(tmp_path: Path) -> None:
    """It waits, and comes in once they go on."""
    with Regions(3, task(tmp_path, 300, pace_s=0.1, regions={"timeout_s": 60.0, "grace_s": 60.0})) as regions:
        regions.start()
        regions.until_step(15)
        regions.kill(2)
        regions.until_members([0, 1], [0, 1])
        for region in (0, 1):
            regions.freeze(region)
        regions.start([2])
        time.sleep(6)
        for region in (0, 1):
            regions.thaw(region)
        regions.until_members([0, 1, 2], [0, 1])
        regions.end([0, 1, 2])
        regions.check()


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_a_region_that_is_cut_off(tmp_path: Path) -> None:
    """It reaches neither the others nor the coordinator: the others go on, it trains into no other run, and it comes back."""
    with (
        Wan(4) as wan,
        Regions(3, task(tmp_path, 500, pace_s=0.1, regions={"timeout_s": 4.0}), wan) as regions,
    ):
        regions.start()
        regions.until_step(15)
        regions.cut_off(2, [0, 1, 3])
        regions.until_members([0, 1], [0, 1])
        before = regions.step(0)
        regions.until_step(before + 15, [0, 1])
        regions.cut_off(2, [0, 1, 3], cut=False)
        regions.until_members([0, 1, 2], [0, 1, 2])
        regions.end([0, 1, 2])
        regions.check()


def churn(regions: Regions, events: int, seed: int) -> int:
    """Kill, start and freeze regions at random, but never so many that fewer than two are well; the number of events."""
    rng, well, dead, frozen, done = random.Random(seed), {0, 1, 2, 3}, set[int](), set[int](), 0
    while done < events and regions.step(min(well)) < regions.task.steps - 50:
        time.sleep(rng.uniform(0.3, 1.2))
        assert all(regions.processes[region].is_alive() for region in well), regions.words()
        what = rng.choice(["kill", "freeze", "back", "back"])
        if what == "back" and dead | frozen:
            region = rng.choice(sorted(dead | frozen))
            regions.start([region]) if region in dead else regions.thaw(region)
            dead.discard(region)
            frozen.discard(region)
            well.add(region)
        elif what != "back" and len(well) > 2:
            region = rng.choice(sorted(well - {0}))
            regions.kill(region) if what == "kill" else regions.freeze(region)
            well.discard(region)
            (dead if what == "kill" else frozen).add(region)
        else:
            continue
        done += 1
    for region in frozen:
        regions.thaw(region)
    if dead:
        regions.start(sorted(dead))
    return done


def test_twenty_events(tmp_path: Path) -> None:
    """Four regions, twenty losses, freezes and returns: all journals agree, and the loss is that of a run without them."""
    found = []
    for events in (0, 20):
        folder = tmp_path / str(events)
        folder.mkdir()
        with Regions(4, task(folder, 260, pace_s=0.08, lr=3e-3, regions={"grace_s": 1.0})) as regions:
            regions.start()
            regions.until_step(10)
            assert churn(regions, events, seed=1) >= min(events, 12)
            found.append(regions.end([0], within_s=240)[0]["loss"])
            regions.check()
    assert abs(found[1] - found[0]) < 0.02 * found[0]
