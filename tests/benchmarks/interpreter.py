"""What a training thread that holds the interpreter's lock costs a transfer: `python -m tests.benchmarks.interpreter`.

A thread that launches kernels on a GPU keeps Python's lock nearly all the time, and the link's thread needs it for each of its
calls. Two regions in two processes send a model of 50M parameters over loopback while their training threads sleep, compute
without the lock (as they also would on a machine with few cores), or hold it in a loop of Python; round by round in turns.

It prints the seconds of a transfer in each case. "holds / sleeps" is what a transfer pays in all (the aim is 1.2), "holds /
computes" what it pays for the lock alone: on a machine with few cores, threads share these, too. It also prints how much the
training threads get done meanwhile. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.benchmarks.timing import llama_like
from tests.benchmarks.workers import run, serve, start_here

PROGRAM = "tests.benchmarks.interpreter"
CODECS = ("fp32", "int8", "fp4")
SLEEPS, COMPUTES, HOLDS = "sleeps", "computes", "holds"
DOING = (SLEEPS, COMPUTES, HOLDS)
"""What the training thread does in a round; the next round has the next one."""
PACE_S = 0.02
"""Seconds of an inner step."""
WARM_UP = len(DOING)


def computing() -> int:
    """Some work without the lock: units of work."""
    hashlib.pbkdf2_hmac("sha256", b"a step", b"of training", 500)
    return 1


def holding() -> int:
    """Some work that needs the lock."""
    total = 0
    for number in range(1000):
        total += number
    return 1


def sleeping() -> int:
    time.sleep(PACE_S)
    return 1


WORK: dict[str, Callable[[], int]] = {SLEEPS: sleeping, COMPUTES: computing, HOLDS: holding}


class Step(NamedTuple):
    """An inner step: seconds since the send before it at its beginning and at its end, and units of work in a second."""

    began: float
    ended: float
    speed: float


def inner_step(does: str, sent: float) -> Step:
    """Work for some time: a step that got less of a core does less in it."""
    began = now = time.perf_counter()
    units = 0
    while now < began + PACE_S:
        units += WORK[does]()
        now = time.perf_counter()
    return Step(began - sent, now - sent, units / (now - began))


def _region(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train in one region, and yield its rounds: what the thread did, and the seconds of the transfer and of its steps."""
    from accelerate import Accelerator

    from hf_cocodc import OuterOptimizer

    model = nn.Module()
    torch.manual_seed(0)
    model.params = nn.ParameterList(0.02 * torch.randn(shape) for shape in llama_like(spec["parameters"]))
    params = [param.detach() for param in model.parameters()]
    interval = spec["interval"]
    config = OuterConfig(
        method="streaming",
        codec=spec["codec"],
        sync_interval=interval,
        num_fragments=1,
        fragment_pattern="whole",
        overlap_steps=interval - 1,
    )
    regions = RegionConfig(region=spec["region"], count=2, coordinator=spec["coordinator"], run=spec["codec"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rounds, journal = spec["rounds"] + WARM_UP, Path(spec["folder"], "journal.jsonl")
    steps: list[list[Step]] = [[] for _ in range(rounds + 1)]
    accelerator, last = Accelerator(cpu=True), (rounds + 1) * interval
    outer = OuterOptimizer(accelerator, model, optimizer, config, regions, max_steps=last, journal=journal)
    sent = time.perf_counter()
    for step in range(1, last + 1):
        number = (step - 1) // interval
        steps[number].append(inner_step(DOING[number % len(DOING)], sent))
        if step % interval == 0:
            torch._foreach_mul_(params, 1.0 + 1e-3 * (1 + spec["region"]))
        outer.step()
        if step % interval == 0:
            sent = time.perf_counter()
    outer.finish()
    for event in map(json.loads, journal.read_text().splitlines()):
        number = event.get("sent_at", 0) // interval
        # the first round of each kind allocates memory; what the last step sends comes when all is over
        if event["kind"] == "land" and WARM_UP < number <= rounds:
            seconds = event["transfer_s"]
            during = [each.speed for each in steps[number] if each.ended <= seconds]
            after = [each.speed for each in steps[number] if each.began > seconds]
            yield {
                "does": DOING[number % len(DOING)],
                "transfer": seconds,
                "speed": median(during or [math.nan]) / median(after or [math.nan]),
                "waited": event["blocked_s"] > PACE_S,
            }


def compare(codec: str, options: argparse.Namespace) -> tuple[Row, dict[str, list[float]]]:
    """The row of a codec, and the single measurements."""
    from hf_cocodc.coordinator.server import serve_in_thread

    with closing(serve_in_thread()) as served, tempfile.TemporaryDirectory() as folder:
        common = {
            "coordinator": served.address,
            "codec": codec,
            "parameters": round(options.millions * 1e6),
            "interval": max(round(options.round_s / PACE_S), 4),
            "rounds": options.repeats * len(DOING),
        }
        specs = []
        for region in range(2):
            Path(folder, str(region)).mkdir()
            specs.append({**common, "region": region, "folder": str(Path(folder, str(region)))})
        rounds = list(run(PROGRAM, specs, start_here, num_threads=1))
    found = {
        f"{codec}, {what}, {does}": [each[what] for each in rounds if each["does"] == does]
        for what in ("transfer", "speed")
        for does in DOING
    }
    row: Row = {"codec": codec}
    row |= {f"{does}, s": median(found[f"{codec}, transfer, {does}"]) for does in DOING}
    row["holds / sleeps"] = row["holds, s"] / row["sleeps, s"]
    row["holds / computes"] = row["holds, s"] / row["computes, s"]
    row |= {f"speed that {does}": median(found[f"{codec}, speed, {does}"]) for does in DOING[1:]}
    row["waited"] = sum(each["waited"] for each in rounds)
    return row, found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__, allow_abbrev=False)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), metavar="NAME")
    parser.add_argument("--millions", type=float, default=50.0, help="parameters (default: 50 million)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each kind; the median counts")
    parser.add_argument("--round-s", type=float, default=4.0, help="longer than any transfer (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    samples: dict[str, list[float]] = {}
    for codec in options.codecs:
        row, found = compare(codec, options)
        rows.append(row)
        samples |= found
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    report = BenchReport(
        "transfers beside a thread that holds the interpreter's lock",
        {"parameters": round(options.millions * 1e6), "repeats": options.repeats, "step s": PACE_S},
        rows,
        notes=[
            "sleeps, computes, holds: seconds of a transfer while the training threads of both regions do that (medians).",
            "speed that ...: what the training thread gets done during a transfer, beside the same when the transfer is over.",
            "waited: rounds that were shorter than their transfer, which then had the lock for itself: give a longer --round-s.",
        ],
        samples=samples,
    )
    sys.stdout.write("\n".join(["", *report.lines(), ""]))
    if options.json:
        write(options.json, [report])
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        serve(_region)
    raise SystemExit(main())
