"""The summary's figures: tokens, accuracy and time, from the journals alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc.views.summary import summarise

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
    }
    events = [
        {"kind": "start", "time_s": 0, "step": 0, **start, "training": training, "timing": timing},
        {"kind": "evaluate", "time_s": 1, "step": 0, "eval_perplexity": 100.0, "eval_accuracy": 0.01},
        {"kind": "land", "time_s": 7, "step": 10, "fragment": 0},
        {"kind": "finish", "time_s": 8, "step": 10, "blocked_s": 1.0, "bytes_sent": 40},
        {"kind": "evaluate", "time_s": 9.5, "step": 10, "eval_perplexity": 50.0, "eval_accuracy": 0.25},
    ]
    path = path / f"{region}.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_tokens_accuracy_and_time_are_shown(tmp_path: Path) -> None:
    """Of all regions, the seconds of training for their rate, all seconds as the total."""
    summary = summarise([journal(tmp_path, 0), journal(tmp_path, 1)])
    assert (summary.tokens, summary.tokens_per_s, summary.total_s) == (10 * 512 * 2, 1280, 9.5)
    lines = summary.lines(tmp_path, [])
    assert "held-out accuracy     1.0 % before, 25.0 % after" in lines
    assert "tokens                10,240 of all regions, 1,280 a second" in lines
    assert "total time            9.5 s" in lines


@pytest.mark.parametrize("training", [{}, {"batch": 4}, {"batch": 4, "data.block_size": "wide"}])
def test_unknown_tokens_are_not_shown(training: dict[str, Any], tmp_path: Path) -> None:
    """A script's journal does not say how many an inner step has."""
    summary = summarise([journal(tmp_path, training=training)])
    assert summary.tokens is None is summary.tokens_per_s
    assert not [line for line in summary.lines(tmp_path, []) if line.startswith("token")]


def test_without_times_there_is_no_rate(tmp_path: Path) -> None:
    """A simulation without a clock says how many tokens, and no more."""
    lines = summarise([journal(tmp_path, timing="none")]).lines(tmp_path, [])
    assert "tokens                10,240 of all regions" in lines
    assert not [line for line in lines if "total time" in line]
    assert "total time            9.5 s of simulated time" in summarise(
        [journal(tmp_path, timing="simulated")]
    ).lines(tmp_path, [])
