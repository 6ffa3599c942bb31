"""What regions of different speed get done together: `python -m tests.benchmarks.balance` (eight minutes).

Regions are processes on this machine with an ordinary Accelerate loop. A micro-batch sleeps for as long as its region's speed
says, as a processor does that waits for an accelerator. First each trains alone: the sum of their speeds is the ideal. Then
all train together: with equal batches, with `regions.balance: auto`, and with a straggler that the others do not wait for
(`regions.grace_s`). It prints samples per second after the first deal, and their share of the ideal.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.processes.forks import fork, region_env
from tests.toys import llama

SPEEDS: tuple[tuple[float, ...], ...] = ((3, 1), (4, 2, 1, 1))
"""Of the regions of each table."""
FASTEST_S = 0.03
"""Seconds of a micro-batch in the fastest region."""
ACCUMULATE, INTERVAL, ROUNDS, WARM_UP = 8, 5, 8, 2
GRACE_S = 0.5
WAYS: dict[str, dict[str, Any]] = {
    "equal batches": {},
    "equal batches, grace_s": {"min": 1, "grace_s": GRACE_S},
    "balance: auto": {"balance": "auto"},
}
PATIENCE_S = 300.0


def train(folder: str, pauses_s: Sequence[float], options: dict[str, Any]) -> None:
    """One region: writes when each inner step has ended, and its micro-batches."""
    region = int(os.environ["HF_COCODC_REGION"])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = llama(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.arange(16).view(1, 16)
    config, steps = OuterConfig(sync_interval=INTERVAL), INTERVAL * ROUNDS
    regions = RegionConfig(run="balance", **options)
    lines: list[tuple[float, int]] = []
    with OuterOptimizer(accelerator, model, optimizer, config, regions, max_steps=steps) as outer:
        while not outer.should_stop:
            count = 0
            before = outer.inner_step
            while outer.inner_step == before and not outer.should_stop:
                with accelerator.accumulate(model):
                    time.sleep(pauses_s[region])
                    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    count += 1
                    outer.step()
            lines.append((time.time(), count))
    Path(folder, f"region-{region}.json").write_text(json.dumps(lines))


def together(speeds: Sequence[float], members: Sequence[int], options: dict[str, Any]) -> list[list[Any]]:
    """The lines of each of these regions, which train together; none of one that the others have left behind at their end."""
    with tempfile.TemporaryDirectory() as folder:
        served = serve_in_thread()
        log = Path(folder, "log.txt")
        pauses_s = [FASTEST_S * max(speeds) / speeds[member] for member in members]
        processes = [
            fork(train, folder, pauses_s, options, log=log, **region_env(served, region, len(members)))
            for region in range(len(members))
        ]
        for process in processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0, log.read_text()[-4000:]
        paths = [Path(folder, f"region-{region}.json") for region in range(len(members))]
        return [json.loads(path.read_text()) if path.exists() else [] for path in paths]


def rate(lines: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Samples per second of all regions together, after the warm-up."""
    lines, first = [each for each in lines if each], INTERVAL * WARM_UP
    began = max(each[first - 1][0] for each in lines)
    ended = max(each[-1][0] for each in lines)
    return sum(count for each in lines for at, count in each if began < at <= ended) / (ended - began)


def measured(speeds: Sequence[float], repeats: int) -> list[Row]:
    alone = [together(speeds, [region], {}) for region in range(len(speeds))]
    ideal = sum(map(rate, alone))
    rows: list[Row] = []
    for way, options in WAYS.items():
        rates = [rate(together(speeds, range(len(speeds)), options)) for _ in range(repeats)]
        found = statistics.median(rates)
        rows.append({"way": way, "samples/s": found, "of the ideal": found / ideal})
    return [*rows, {"way": "sum of the speeds alone", "samples/s": ideal, "of the ideal": 1.0}]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.balance", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    reports = []
    for speeds in SPEEDS:
        setting = {"repeats": options.repeats, "H": INTERVAL, "micro-batches of a region": ACCUMULATE}
        named = ":".join(map(str, speeds))
        rows = measured(speeds, options.repeats)
        reports.append(BenchReport(f"speeds {named}", setting, rows, formats={"of the ideal": ".1%"}))
        sys.stdout.write("\n".join([*reports[-1].lines(), ""]))
        sys.stdout.flush()
    if options.json is not None:
        write(options.json, reports)


if __name__ == "__main__":
    main()
