"""The summary and the picture of a run that went on without a lost region, from journals written by hand."""

from __future__ import annotations

import math
from pathlib import Path

from hf_cocodc.run.journal import Journal
from hf_cocodc.tools.report.runs import read_run
from hf_cocodc.tools.report.summary import summarize

STEPS = 800


def a_journal(folder: Path, region: int, dies: bool) -> Path:
    """Four regions for 800 steps. Region 1 is away from 310 to 480; region 3, if it `dies`, from 600 on."""
    journal = Journal(folder / f"{region}.jsonl")
    start = {
        "region": region,
        "num_regions": 4,
        "num_params": 1000,
        "num_fragments": 2,
        "max_steps": STEPS,
        "run": "a",
    }
    outer = {"method": "streaming", "sync_interval": 20, "digest_interval": 10}
    journal.write("start", step=0, **start, outer=outer)
    journal.write("epoch", step=0, epoch=0, members=[0, 1, 2, 3], why="")
    epochs: dict[int, list[int]] = {310: [0, 2, 3], 480: [0, 1, 2, 3], **({600: [0, 1, 2]} if dies else {})}
    for step in range(10, STEPS + 1, 10):
        if region == 3 and dies and step > 600:
            return folder / f"{region}.jsonl"
        if region == 1 and 310 < step < 480:
            continue
        if region == 1 and step == 480:
            journal.write("resume", step=470, **start, outer=outer)
            journal.write("join", step=480, epoch=2, region=1, donor=0, base=470)
        if step in epochs and not (region == 1 and step == 310):
            number = list(epochs).index(step) + 1
            journal.write("epoch", step=step, epoch=number, members=epochs[step], why="words")
        loss = 2 + 3 * math.exp(-step / 150) + 0.05 * region + 0.02 * math.sin(step + region)
        journal.write("log", step=step, loss=loss)
        if step % 20 == 0:
            fragment = step // 20 % 2
            journal.write(
                "land", step=step, fragment=fragment, sent_at=step - 5, blocked_s=0.0, bytes_sent=10
            )
    if region == 0:
        journal.write("evaluate", step=STEPS, eval_loss=2.0, eval_perplexity=7.389)
    journal.write("finish", step=STEPS, blocked_s=1.0 + region, bytes_sent=400 + region)
    return folder / f"{region}.jsonl"


def test_the_summary_says_who_was_there(tmp_path: Path) -> None:
    """And takes its figures from the regions that have finished."""
    paths = [a_journal(tmp_path, region, dies=True) for region in range(4)]
    summary = summarize(read_run("run", paths))
    lines = summary.lines(tmp_path, paths)
    assert "inner steps           800" in lines
    assert (
        "regions               4, 3 from step 310 to 480 (region 1 lost), 4 from step 480 to 600 (region 1 back), "
        "3 from step 600 (region 3 lost)"
    ) in lines
    assert (summary.bytes_sent, summary.perplexity_after) == (402, 7.389)
