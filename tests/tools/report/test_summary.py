"""The summary's figures: tokens, accuracy and time, from the journals alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.errors import InputError
from hf_cocodc.run.figures import data_parallel_bytes
from hf_cocodc.tools.report.runs import load, read_run
from hf_cocodc.tools.report.summary import summarize
from tests.tools.report.made import a_resumed_run, a_run

TRAINING = {"batch": 4, "data.block_size": 128}


def journal(
    path: Path, region: int = 0, training: dict[str, Any] = TRAINING, timing: str = "measured"
) -> Path:
    """Of a region that has made 10 steps in 8 s."""
    start = {
        "region": region,
        "num_regions": 2,
        "num_params": 10,
        "num_fragments": 1,
        "outer": {"method": "diloco"},
        "run": "a",
    }
    events = [
        {"kind": "start", "time_s": 0, "step": 0, **start, "training": training, "timing": timing},
        {"kind": "evaluate", "time_s": 1, "step": 0, "eval_perplexity": 100.0, "eval_accuracy": 0.01},
        {"kind": "land", "time_s": 7, "step": 10, "fragment": 0, "sent_at": 10},
        {"kind": "finish", "time_s": 8, "step": 10, "blocked_s": 1.0, "bytes_sent": 40},
        {"kind": "evaluate", "time_s": 9.5, "step": 10, "eval_perplexity": 50.0, "eval_accuracy": 0.25},
    ]
    path = path / f"{region}.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_tokens_accuracy_and_time_are_shown(tmp_path: Path) -> None:
    """Of all regions, the seconds of training for their rate, all seconds as the total."""
    summary = summarize(read_run("run", [journal(tmp_path, 0), journal(tmp_path, 1)]))
    assert (summary.tokens, summary.tokens_per_s, summary.total_s) == (10 * 512 * 2, 1280, 9.5)
    lines = summary.lines(tmp_path, [])
    assert "held-out accuracy     1.0 % before, 25.0 % after" in lines
    assert "tokens                10,240 of all regions, 1,280 a second" in lines
    assert "total time            9.5 s" in lines


def test_of_many_journals_one_is_named(tmp_path: Path) -> None:
    """64 regions would print 64 lines."""
    journals = [journal(tmp_path, region) for region in range(10)]
    for count, shown in ((2, journals[:2]), (10, [f"{journals[0]} and those of 9 other regions beside it"])):
        summary = summarize(read_run("run", journals[:count]))
        lines = summary.lines(tmp_path, journals[:count])
        assert [each[22:] for each in lines if each.startswith("journal")] == list(map(str, shown))


@pytest.mark.parametrize("training", [{}, {"batch": 4}, {"batch": 4, "data.block_size": "wide"}])
def test_unknown_tokens_are_not_shown(training: dict[str, Any], tmp_path: Path) -> None:
    """A script's journal does not say how many an inner step has."""
    summary = summarize(read_run("run", [journal(tmp_path, training=training)]))
    assert summary.tokens is None is summary.tokens_per_s
    assert not [line for line in summary.lines(tmp_path, []) if line.startswith("token")]


def test_without_times_there_is_no_rate(tmp_path: Path) -> None:
    """A simulation without a clock says how many tokens, and no more."""
    lines = summarize(read_run("run", [journal(tmp_path, timing="none")])).lines(tmp_path, [])
    assert "tokens                10,240 of all regions" in lines
    assert not [line for line in lines if "total time" in line]
    simulated = summarize(read_run("run", [journal(tmp_path, timing="simulated")]))
    assert "total time            9.5 s of simulated time" in simulated.lines(tmp_path, [])


@pytest.mark.parametrize(
    ("first", "then", "words"), [(2, 3, "2, 3 from step 40"), (2, 1, "2, 1 from step 40"), (2, 2, "")]
)
def test_a_run_that_is_resumed_with_another_number_of_regions(
    first: int, then: int, words: str, tmp_path: Path
) -> None:
    """Each region counts as long as it took part, in the summary and in the report."""
    paths = a_resumed_run(tmp_path, first, then)
    summary, [run] = summarize(read_run("run", paths[:then])), load([tmp_path])
    tokens = 40 * first * 512 + 40 * then * 512
    assert (summary.tokens, run.tokens(80)) == (tokens, tokens)
    assert summary.num_regions == run.num_regions == then
    sent = data_parallel_bytes(1000, 40, first) + data_parallel_bytes(1000, 40, then)
    assert summary.data_parallel_bytes == sent > 0
    plural = "s" * (then > 1)
    assert summary.members == (f"{words} (resumed with {then} region{plural})" if words else "")
    assert run.attendance[0] == [(0, 80)]
    assert run.attendance[max(first, then) - 1] == [(40 * (then > first), 80 - 40 * (first > then))]
    others = [line for line in summary.lines(tmp_path, []) if "data-parallel training" in line]
    assert len(others) == 1, "as long as there were others to send to"


def test_the_regions_of_a_run_that_goes_on_without_lost_ones_only_since_a_resume(tmp_path: Path) -> None:
    """What it trained on before that counts, too."""
    for region, path in enumerate(a_resumed_run(tmp_path, 2, 2)):
        lines = path.read_text().splitlines()
        at = next(place for place, line in enumerate(lines) if json.loads(line)["kind"] == "resume")
        epoch = {"kind": "epoch", "time_s": 20.0, "step": 40, "epoch": 0, "members": [0, 1], "why": ""}
        lost = {**epoch, "time_s": 35.0, "step": 70, "epoch": 1, "members": [0]}
        lines.insert(at + 1, json.dumps(epoch))
        if region == 0:
            lines.insert(-1, json.dumps(lost))
        path.write_text("\n".join(lines) + "\n")
    [run] = load([tmp_path])
    assert run.attendance == {0: [(0, 80)], 1: [(0, 70)]}
    summary = summarize(read_run("run", [journal.path for journal in run.journals]))
    assert (summary.tokens, summary.members) == (512 * (80 + 70), "2, 1 from step 70 (region 1 lost)")


def test_the_summary_and_the_report_leave_out_the_same_lines(tmp_path: Path) -> None:
    """Those that cannot be read: all others count, also those behind them."""
    path = a_run(tmp_path, regions=1)[0]
    whole = summarize(read_run("run", [path]))
    lines = path.read_text().splitlines()
    at = next(place for place, line in enumerate(lines) if json.loads(line)["kind"] == "land")
    path.write_text("\n".join([*lines[:at], lines[at][:-9], *lines[at + 1 :]]) + "\n")
    summary, [run] = summarize(read_run("run", [path])), load([tmp_path])
    assert sum(summary.outer_steps) == sum(whole.outer_steps) - 1
    assert sum(flight.landed is not None for flight in run.stories[0].flights) == sum(summary.outer_steps)
    assert summary.inner_steps == run.step == 80
    path.write_text("\n".join([lines[0][:-9], *lines[1:]]) + "\n")
    with pytest.raises(InputError, match="no start of a run can be read"):
        read_run("run", [path])


def test_a_run_that_has_diverged_has_a_perplexity(tmp_path: Path) -> None:
    """However large it is, and the norms: a number that cannot be drawn damages no line."""
    path = a_run(tmp_path, regions=1)[0]
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["kind"] == "evaluate":
            event |= {"eval_loss": 460.0, "eval_perplexity": 1e200}
        if event["kind"] in ("send", "land"):
            event |= {name: 1e37 for name in ("norm", "outer_grad_norm") if name in event}
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    [run] = load([tmp_path])
    assert run.journals[0].damaged == []
    assert "after (global weights)" in (line := summarize(read_run("run", [path])).lines(tmp_path, [])[0])
    assert "1e+200" in line
