"""What nobody trains on while a region is not there."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.run.journal import Journal, read
from hf_cocodc.run.unread import Attendance, Unread, attendance_of, merged, report_unread
from tests.toys import Blocks


def test_a_region_that_comes_back_has_missed_what_it_did_not_land() -> None:
    """Region 1's last landing was sent at step 20; it comes back at step 50. What it trained from 21 on was lost with it."""
    attendance = Attendance(2, (0, 1), samples=8)
    for sent_at in (10, 20):
        attendance.landed(sent_at, (0, 1))
    assert attendance.change(26, (0,)) == []
    attendance.landed(30, (0,))
    assert attendance.absent == [1]
    assert attendance.change(50, (0, 1)) == [Unread(1, 20, 50, 240)]
    assert attendance.until(60) == []


def test_a_landing_of_the_members_before_counts_for_a_lost_region() -> None:
    """A transfer that stands although one of its members was lost has its steps."""
    attendance = Attendance(3, (0, 1, 2))
    attendance.landed(10, (0, 1, 2))
    attendance.change(21, (0, 1))
    attendance.landed(20, (0, 1, 2))
    assert attendance.until(40) == [Unread(2, 20, 40, None)]


def test_a_region_that_leaves_has_read_what_it_has_trained() -> None:
    """It keeps step without training until what it has trained has landed: sends of that time read nothing more."""
    attendance = Attendance(2, (0, 1), samples=8)
    attendance.landed(10, (0, 1))
    attendance.landed(20, (0, 1), {"1": 14})
    attendance.landed(30, (0, 1), {"1": 14})
    attendance.change(32, (0,))
    assert attendance.until(40) == [Unread(1, 14, 40, 208)]


def test_parts_of_regions_that_never_came() -> None:
    """They are unread from the start; what has been reported once is not reported again."""
    attendance = Attendance(4, (0, 1), samples=2)
    assert attendance.absent == [2, 3]
    assert attendance.until(5) == [Unread(2, 0, 5, 10), Unread(3, 0, 5, 10)]
    assert attendance.change(8, (0, 1, 3)) == [Unread(3, 5, 8, 6)]
    assert attendance.until(8) == [Unread(2, 5, 8, 6)]
    assert attendance.until(8) == []


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_read_once_or_reported_once(seed: int) -> None:
    """Whatever the order of losses, returns, landings and saves: landed and reported steps of a region do not overlap."""
    rng = random.Random(seed)
    attendance, members = Attendance(4, {0, 1}, samples=1), {0, 1}
    trains_from = dict.fromkeys(members, 0)
    landed: dict[int, set[int]] = {region: set() for region in range(4)}
    reported: dict[int, list[int]] = {region: [] for region in range(4)}

    def note(found: list[Unread]) -> None:
        for each in found:
            assert each.samples == each.to_step - each.from_step
            reported[each.region] += range(each.from_step + 1, each.to_step + 1)

    for step in range(1, 200):
        change = rng.random()
        if change < 0.1 and len(members) > 1:
            members = members - {rng.choice(sorted(members))}
            note(attendance.change(step, members))
        elif change < 0.25 and len(members) < 4:
            region = rng.choice(sorted({0, 1, 2, 3} - members))
            members = members | {region}
            trains_from[region] = step
            note(attendance.change(step, members))
        elif change < 0.3:
            note(attendance.until(step))
        if step % 5 == 0:
            attendance.landed(step, members)
            for region in members:
                landed[region] |= set(range(trains_from[region] + 1, step + 1))
                trains_from[region] = step
    for region in {0, 1, 2, 3} - members:
        note(attendance.until(199))
        assert sorted([*landed[region], *reported[region]]) == list(range(1, 200))
    for region in members:
        assert sorted([*landed[region], *reported[region]]) == list(range(1, trains_from[region] + 1))


def test_the_journal_tells_what_was_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the events of a run: when the region is back, at a save, and before the end; the log names the parts at the start."""
    journal = Journal(tmp_path / "journal.jsonl")
    until = report_unread(journal, Attendance(3, (0, 1), samples=4))
    assert "Nobody reads that of region 2 until a region of this number joins" in caplog.text
    journal.write("start", step=0)
    journal.write("land", step=10, sent_at=10, members=[0, 1])
    journal.write("void", step=11, sent_at=11, members=[0, 1])
    journal.write("epoch", step=12, members=[0])
    journal.write("land", step=20, sent_at=20, members=[0])
    until(20)
    journal.write("epoch", step=30, members=[0, 1])
    journal.write("land", step=40, sent_at=40, members=[0, 1])
    journal.write("finish", step=40)
    events = read(tmp_path / "journal.jsonl")
    found = [(e["step"], e["region"], e["from_step"], e["to_step"]) for e in events if e["kind"] == "unread"]
    assert found == [(20, 1, 10, 20), (20, 2, 0, 20), (30, 1, 20, 30), (40, 2, 20, 40)]
    assert events[-1]["kind"] == "finish"
    assert merged(events) == [Unread(1, 10, 30, 80), Unread(2, 0, 40, 160)]
    assert "nobody has read region 1's data of steps 11 to 30 (80 samples)" in caplog.text


def test_a_run_whose_regions_stay_reports_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Events of a fixed run have no members."""
    journal = Journal(tmp_path / "journal.jsonl")
    until = report_unread(journal, Attendance(2, (0, 1)))
    journal.write("land", step=10, sent_at=10)
    until(20)
    journal.write("finish", step=40)
    assert [event["kind"] for event in read(tmp_path / "journal.jsonl")] == ["land", "finish"]
    assert caplog.text == ""


def test_a_run_with_room_for_more_regions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two regions of at most three: the part of region 2 is named at the start, at a save and before the end."""

    def body(region: int, link: Link) -> None:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.ones(3)])
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        regions = RegionConfig(min=1, max=3)
        config, journal = OuterConfig(sync_interval=2), tmp_path / f"{region}.jsonl"
        with OuterOptimizer(
            accelerator, model, optimizer, config, regions, max_steps=6, link=link, journal=journal
        ) as outer:
            while outer.inner_step < 6:
                accelerator.backward(
                    sum(vector.sum() for vector in accelerator.unwrap_model(model).vectors())
                )
                optimizer.step()
                optimizer.zero_grad()
                outer.step()
                if outer.inner_step == 4:
                    accelerator.save_state(str(tmp_path / f"region-{region}"))

    run_in_lockstep(2, body)
    for region in (0, 1):
        told = read(tmp_path / f"{region}.jsonl")
        assert [event["members"] for event in told if event["kind"] == "land"] == [[0, 1]] * 3
        events = [event for event in told if event["kind"] == "unread"]
        assert [(e["region"], e["from_step"], e["to_step"], e["samples"]) for e in events] == [
            (2, 0, 4, None),
            (2, 4, 6, None),
        ]
    assert "Nobody reads that of region 2" in caplog.text
    assert "nobody has read region 2's data of steps 1 to 6." in caplog.text


def test_all_regions_know_what_one_has_trained_that_only_keeps_step(tmp_path: Path) -> None:
    """Region 1 has come to its end after step 3; its transfer of step 4 says so."""

    def body(region: int, link: Link) -> None:
        accelerator = Accelerator(cpu=True)
        model = Blocks([torch.ones(3)])
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        config, journal = OuterConfig(sync_interval=2), tmp_path / f"{region}.jsonl"
        with OuterOptimizer(accelerator, model, optimizer, config, link=link, journal=journal) as outer:
            while outer.inner_step < (3 if region else 6) and not outer.should_stop:
                accelerator.backward(model.vectors()[0].sum())
                optimizer.step()
                optimizer.zero_grad()
                outer.step()

    run_in_lockstep(2, body)
    for region in (0, 1):
        landings = [event for event in read(tmp_path / f"{region}.jsonl") if event["kind"] == "land"]
        assert [(event["sent_at"], event.get("coasted")) for event in landings] == [(2, None), (4, {"1": 3})]


def test_a_region_that_joins_misses_nobody_before_it_knows_the_members(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its link has only itself until then. Whoever is away is away from its base on."""
    link: Any = SimpleNamespace(is_elastic=True, members=(1,), num_regions=1)
    about: Any = SimpleNamespace(facts={})
    journal = Journal(tmp_path / "journal.jsonl")
    report_unread(journal, attendance_of(link, RegionConfig(count=4), about, 413, is_new=True))
    journal.write("land", step=421, sent_at=420, members=[0, 2])
    journal.write("epoch", step=425, members=[0, 1, 2])
    assert caplog.text == ""
    journal.write("finish", step=430)
    events = [event for event in read(tmp_path / "journal.jsonl") if event["kind"] == "unread"]
    assert merged(events) == [Unread(3, 413, 430, None)]
