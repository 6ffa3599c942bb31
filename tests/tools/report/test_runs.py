"""Journals of runs, put together: one axis of time, who waited for whom, and what cannot be one run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_cocodc.errors import InputError
from hf_cocodc.tools.report.charts import AXES, draw_losses, losses, utilization
from hf_cocodc.tools.report.journals import read_journal
from hf_cocodc.tools.report.page import page
from hf_cocodc.tools.report.runs import load, read_run
from hf_cocodc.tools.report.spending import GIVEN_UP, NOT_THERE, shares, spent
from hf_cocodc.tools.report.summary import summarize
from hf_cocodc.tools.report.timeline import windows
from hf_cocodc.tools.report.waits import Activity
from tests.tools.report.made import a_cut_run, a_resumed_run, a_run, write


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("dated", [True, False], ids=["clocks apart", "no clocks"])
def test_regions_are_on_one_axis_whatever_their_clocks_say(dated: bool, tmp_path: Path) -> None:
    """The mean of a transfer was here at the same moment in all regions."""
    paths = a_run(tmp_path, regions=3, skew_s=-500.0)
    for path in paths[1:]:
        events = [{**event, "time_s": event["time_s"] + 7} for event in events_of(path)]
        if not dated:
            del events[0]["at"]
        write(path.parent.parent, events)
    [run] = load([tmp_path])
    first, *others = ({f.key: f.arrived for f in story.flights} for story in run.stories)
    assert len(first) > 4
    for other in others:
        assert other == pytest.approx(first, abs=2e-3)
    assert min(story.there[0][0] for story in run.stories) == 0
    assert run.end < 150, "the clocks are 500 s apart"


def test_waits_are_blamed_on_the_region_that_was_late(tmp_path: Path) -> None:
    """All that the others were blocked for, in a run whose link takes next to no time; and seconds add up to those of the run."""
    paths = a_run(tmp_path, regions=3, late=2, link_s=1e-3, overlap=1)
    [run] = load([tmp_path])
    rows = dict(spent(run))
    for region in (0, 1):
        told = sum(event["blocked_s"] for event in events_of(paths[region]) if event["kind"] == "land")
        assert rows["waiting for region 2"][region] == pytest.approx(told, abs=0.02) != 0
    assert rows["waiting for region 2"][2] == 0
    assert rows[Activity.EVALUATING.value] == [3.0] * 3
    assert rows[Activity.SAVING.value] == pytest.approx([1.0] * 3)
    for region, story in enumerate(run.stories):
        assert sum(row[region] for row in rows.values()) == pytest.approx(story.end, abs=0.1)
    *_, flight = run.stories[0].flights
    assert flight.sent <= flight.began <= flight.arrived <= flight.landed  # type: ignore[operator]


def test_a_wait_for_a_slow_link_is_for_the_link(tmp_path: Path) -> None:
    """No region is late: they make their steps in equal times."""
    a_run(tmp_path, regions=2, late=-1, link_s=5.0, overlap=1)
    [run] = load([tmp_path])
    rows = dict(spent(run))
    waited = [sum(row[r] for name, row in rows.items() if "region" in name) for r in (0, 1)]
    assert all(link > 5 * late for link, late in zip(rows["waiting for the link"], waited, strict=True))


def test_a_run_that_trains_has_transfers_on_their_way(tmp_path: Path) -> None:
    """A line that is being written is no damage."""
    paths = a_run(tmp_path, until=21)
    with paths[0].open("a") as file:
        file.write('{"kind": "lo')
    [run] = load([tmp_path])
    assert not run.has_finished and run.step == 20
    assert [flight.landed for flight in run.stories[0].flights[:1]] != [None]
    assert any(flight.landed is None for flight in run.stories[1].flights)
    assert run.journals[0].damaged == []
    assert NOT_THERE not in dict(spent(run)), "its last line is only older than that of the other"


def test_a_lost_region_is_not_there_from_then_on(tmp_path: Path) -> None:
    """If the others went on without it."""
    paths = a_run(tmp_path)
    first, second = map(events_of, paths)
    second = [event for event in second if event["step"] <= 40]
    for events in (first, second):
        events.insert(1, {**events[0], "kind": "epoch", "epoch": 0, "members": [0, 1]})
    at = next(place for place, event in enumerate(first) if event["step"] > 40)
    first.insert(at, {"kind": "epoch", "time_s": first[at]["time_s"], "step": 41, "epoch": 1, "members": [0]})
    write(tmp_path / "region-0", first)
    write(tmp_path / "region-1", second)
    [run] = load([tmp_path])
    lasted = [events[-1]["time_s"] for events in (first, second)]
    assert dict(spent(run))[NOT_THERE] == [0.0, pytest.approx(lasted[0] - lasted[1], abs=0.01)]


def test_steps_that_were_made_again_are_lost(tmp_path: Path) -> None:
    """But not those of an earlier run in the same folder."""
    path = a_run(tmp_path)[0]
    start, *events = events_of(path)
    begun = {**start, "journal": "ours"}
    at = next(place for place, event in enumerate(events) if event["step"] > 30)
    first, rest = events[:at], events[at:]
    tail = [{"kind": "log", "time_s": 10.0 + step, "step": step, "loss": 2.0} for step in (31, 33)]
    again = {**begun, "kind": "resume", "step": 30, "time_s": first[-1]["time_s"]}
    theirs = [{**start, "journal": "theirs"}, *events, {**again, "journal": "theirs"}]
    write(path.parent.parent, [*theirs, begun, *first, again, *rest])
    assert GIVEN_UP not in dict(spent(load([tmp_path])[0]))
    write(path.parent.parent, [*theirs, begun, *first, *tail, again, *rest])
    assert dict(spent(load([tmp_path])[0]))[GIVEN_UP] == [2.0, 0.0]


def test_regions_of_one_run_are_one_run_wherever_they_lie(tmp_path: Path) -> None:
    """As where each machine has kept its own folder; another run stays another run."""
    paths = a_run(tmp_path / "a")
    a_run(tmp_path / "b", seed=1)
    machines = [
        path.parent.parent.rename(tmp_path / f"machine-{number}") for number, path in enumerate(paths)
    ]
    runs = load([machines[1], tmp_path / "b", machines[0]])
    assert [run.regions for run in runs] == [[0, 1], [0, 1]]
    assert [run.name for run in runs] == ["machine-1", "b"]


def test_two_runs_in_one_folder_are_two_runs(tmp_path: Path) -> None:
    """By their numbers, which every journal has; and what is there twice is no second region."""
    kept, other = a_run(tmp_path / "a"), a_run(tmp_path / "b", seed=1)
    kept[1].write_bytes(other[1].read_bytes())
    assert [(run.name, run.regions) for run in load([tmp_path / "a"])] == [("a (1)", [0]), ("a (2)", [1])]
    kept[1].write_bytes(kept[0].read_bytes())
    assert [run.regions for run in load([tmp_path / "a"])] == [[0], [0]]


def test_regions_that_met_again_without_one_are_of_one_run(tmp_path: Path) -> None:
    """They have agreed on another name then, which the one that was not there does not know."""
    paths = a_resumed_run(tmp_path / "whole", 3, 2)
    [run] = load([tmp_path / "whole"])
    assert run.regions == [0, 1, 2]
    assert dict(spent(run))[NOT_THERE] == [0.0, 0.0, pytest.approx(40.2 - 20.1 - 3.5, abs=0.1)]
    folders = [path.parent.parent.rename(tmp_path / f"machine-{number}") for number, path in enumerate(paths)]
    assert [run.regions for run in load(folders)] == [[0, 1, 2]]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    """In words that name it, and the way out."""
    a_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for folders, words in (
        ([tmp_path / "none"], "none is not there"),
        ([tmp_path / "b"], "b has no journal"),
        ([tmp_path / "a", tmp_path / "a" / "region-1"], "is named twice"),
    ):
        with pytest.raises(InputError, match=words):
            load(folders)
    write(tmp_path / "b", [])
    with pytest.raises(InputError, match="no start of a run that can be read"):
        load([tmp_path / "b"])


def test_damaged_lines_are_named_and_left_out(tmp_path: Path) -> None:
    """Whatever is wrong with them; the others are used."""
    path = a_run(tmp_path)[0]
    good = path.read_text().splitlines()
    deep = "[" * 100_000
    bad = [
        '{"kind": "log"',
        "[1]",
        '{"kind": "send", "time_s": 1, "step": 2, "fragment": -1}',
        deep,
        "1" * 5000,
    ]
    bad += [
        '{"kind": "land", "time_s": 1e999, "step": 2, "fragment": 0, "sent_at": 1}',
        "\\xff",
        '{"kind": 3}',
    ]
    bad += ['{"kind": "log", "time_s": NaN, "step": 1}']
    path.write_text("\n".join([good[0], *bad, *good[1:]]) + "\n", encoding="utf-8")
    journal = read_journal(path)
    assert journal is not None and journal.events == [json.loads(line) for line in good]
    assert [int(said.split(", line ")[1].split(":")[0]) for said in journal.damaged] == list(
        range(2, 2 + len(bad))
    )
    assert "Expected `int` >= 0 - at `$.fragment`" in journal.damaged[2]
    path.write_text("\n".join(good[1:]))
    assert read_journal(path) is None, "nothing says of which run and region these lines are"


def test_no_journal_ends_in_a_traceback(tmp_path: Path) -> None:
    """Fields of a journal replaced by what somebody may have put there: it is read, or refused in words."""
    chance = random.Random(5)
    paths = a_run(tmp_path, steps=40)
    path = paths[1]
    good = events_of(path)
    values = [
        None,
        -1,
        0,
        1e308,
        2**70,
        "x",
        "",
        [],
        [[]],
        {},
        {"method": 3},
        True,
        0.5,
        99_999,
        ["a"],
        float("nan"),
    ]
    good += [{"kind": "sit_out", "time_s": 1.0, "step": 3, "fragment": 1}] * 3
    for _ in range(300):
        events = [dict(event) for event in good[chance.random() < 0.3 :]]
        for event in chance.sample(events, 3):
            event[chance.choice(list(event))] = chance.choice(values)
            event.setdefault(
                chance.choice(["members", "norms", "at", "took_s", "epoch"]), chance.choice(values)
            )
        chance.shuffle(events) if chance.random() < 0.2 else None
        write(path.parent.parent, events)
        try:
            [run] = load([tmp_path])
        except InputError:
            continue
        (
            spent(run),
            run.attendance,
            run.tokens(run.step),
            summarize(read_run("run", paths)).lines(tmp_path, paths),
        )


def test_a_run_without_time_has_losses_and_no_timeline(tmp_path: Path) -> None:
    """A simulation that counts no seconds."""
    path = a_run(tmp_path, regions=1)[0]
    events = [{**event, "time_s": 0.0} for event in events_of(path)]
    events[0]["timing"] = "none"
    write(path.parent.parent, events)
    [run] = load([tmp_path])
    assert not run.has_times and run.step == 80
    assert [each.alt.split(":")[0].split(" against ")[1] for each in losses([run])] == list(AXES[:3])
    text = page([run])
    assert "Staleness" in text and "Who waited for whom" not in text


def test_transfers_that_leave_at_one_moment_have_a_window(tmp_path: Path) -> None:
    """However many they are: it does not become narrower for ever."""
    for path in a_run(tmp_path, regions=8, fragments=60, steps=6, interval=1, overlap=1):
        events = [{**event, "time_s": float(event["step"])} for event in events_of(path)]
        write(path.parent.parent, events)
    [run] = load([tmp_path])
    found = windows(run)
    assert found and all(0 <= each.begin < each.end <= 6.1 for each in found)


def test_a_region_that_is_cut_off_is_not_there(tmp_path: Path) -> None:
    """From when it last trained until it is a member again: it neither trains, nor lands what it follows."""
    a_cut_run(tmp_path)
    [run] = load([tmp_path])
    assert run.stories[1].there == [pytest.approx((0, 50)), pytest.approx((150, 200.6))]
    assert dict(spent(run))[NOT_THERE] == [0.0, pytest.approx(100, abs=0.1)]
    assert run.attendance[1] == [(0, 60), (150, 201)], "the others notice it at step 60"
    assert run.trained[1] == [(0, 50), (150, 201)], "and it says itself that it has not trained since 50"
    assert not [flight for flight in run.stories[1].flights if 51 < (flight.landed or 100) < 150]
    by_activity = shares(run.stories[1], np.linspace(0.0, run.end, 21))
    assert [share[8] for share in by_activity.values()] == pytest.approx([0.0] * len(by_activity))


def test_the_wait_of_a_region_that_is_cut_off_blocks_nothing(tmp_path: Path) -> None:
    """Its process counts the wait; the time that a region was in the run, of which it is a share, does not."""
    path = a_cut_run(tmp_path)[1]
    [held_s] = [event["held_s"] for event in events_of(path) if event["kind"] == "away"]
    events = [
        {**event, "blocked_s": event["blocked_s"] + held_s} if event["kind"] == "finish" else event
        for event in events_of(path)
    ]
    write(path.parent.parent, events)
    [run] = load([tmp_path / "region-1"])
    assert summarize(run).blocked_s == pytest.approx(4.0) and held_s > 90


def test_a_region_that_joins_is_there_from_its_membership_on(tmp_path: Path) -> None:
    """Not while it loads a base and follows the others."""
    path = a_cut_run(tmp_path)[1]
    events = events_of(path)
    at = next(place for place, event in enumerate(events) if event["kind"] == "away")
    later = [{**event, "time_s": event["time_s"] - 60} for event in events[at + 1 :]]
    came = {
        **events[0],
        "kind": "resume",
        "step": 140,
        "time_s": 80.0,
        "at": 1.79e9 + 140,
        "from_region": 0,
        "joins": True,
    }
    write(path.parent.parent, [*events[:at], came, *later])
    [run] = load([tmp_path])
    assert [end - begin for begin, end in run.stories[1].there] == pytest.approx([50.5, 50.6], abs=0.2)


def test_lines_of_loss_have_a_gap_where_a_region_was_not_there(tmp_path: Path) -> None:
    """On every axis; and the axis of tokens is only there if they are known."""
    a_cut_run(tmp_path, tokens=False)
    [run] = load([tmp_path])
    for which in (0, 2, 3):
        axis = Figure().subplots()
        draw_losses(axis, [run], which)
        xs = next(line for line in axis.lines if line.get_label() == "region 1").get_xdata()
        ys = next(line for line in axis.lines if line.get_label() == "region 1").get_ydata()
        assert np.isnan(ys).sum() == 1 and len(xs) == 2 * 10 + 1 + 1
        assert not np.isnan(
            next(line for line in axis.lines if line.get_label() == "region 0").get_ydata()
        ).any()
    assert ["tokens" in each.alt for each in losses([run])] == [False] * 3


def test_the_utilization_of_the_report_is_that_of_the_log(tmp_path: Path) -> None:
    """All that a send or a landing holds is not used, whether it waits or computes."""
    a_cut_run(tmp_path)
    [run] = load([tmp_path])
    [whole] = utilization(run.stories[0], np.array([0.0, 200.6]))
    held_s = sum(event.get("took_s", 0.0) for event in run.journals[0].events if event["kind"] == "land")
    waited_s = sum(event.get("blocked_s", 0.0) for event in run.journals[0].events if event["kind"] == "land")
    assert whole == pytest.approx(100 * (1 - held_s / 200.6)) and held_s > waited_s > 0


def test_rounding_is_no_wait(tmp_path: Path) -> None:
    """Both regions came to every transfer at one time: nobody waited for another region, not for a moment."""
    a_cut_run(tmp_path)
    [run] = load([tmp_path])
    waited = [
        span.end - span.begin
        for story in run.stories
        for span in story.spans
        if span.activity is Activity.FOR_A_REGION
    ]
    assert all(seconds > 1e-6 for seconds in waited), waited
