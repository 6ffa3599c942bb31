"""What our link costs in a cluster, beside gloo's own all-reduce: `python -m tests.benchmarks.cluster` (a minute on two cores).

Two regions in two processes exchange the same fp32 values over loopback, round by round in turns: by gloo's all-reduce, and with
each link by a mean, and by a whole `outer.step()` of `diloco` that sends and lands (H = 1).

It prints the milliseconds of each in the slower region (medians), what its threads compute in them, and how many times gloo's
all-reduce that is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_cocodc.link.base import MeanRequest
from hf_cocodc.link.records import Trailer
from hf_cocodc.parts.codecs import unrounded
from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.benchmarks.workers import run, serve, start_here

PROGRAM = "tests.benchmarks.cluster"
REGIONS = 2
PARAMETERS = 4
WIDTH = 1 << 12
ALL_REDUCE = "gloo's all-reduce"
WARM_UP = 3
TIMEOUT = timedelta(seconds=60)


class Rounds:
    """Times calls of both regions: they begin together, and the slower one counts."""

    def __init__(self, folder: str, region: int) -> None:
        store = dist.FileStore(str(Path(folder, "store")), REGIONS)
        self.group: Any = dist.ProcessGroupGloo(store, region, REGIONS, TIMEOUT)

    def time(self, call: Callable[[], Any]) -> list[float]:
        """Seconds, and seconds of a core."""
        self.group.barrier().wait()
        began, used = time.perf_counter(), time.process_time()
        call()
        took = torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)
        self.group.allreduce([took], dist.ReduceOp.MAX).wait()
        return took.tolist()


def _region(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each call, round by round."""
    from accelerate import Accelerator

    from hf_cocodc import OuterOptimizer

    rounds, accelerator = Rounds(spec["folder"], spec["region"]), Accelerator(cpu=True)
    shape = (spec["values"] // PARAMETERS // WIDTH, WIDTH)
    flat = torch.randn(PARAMETERS * shape[0] * WIDTH)
    calls: dict[str, Callable[[], Any]] = {
        ALL_REDUCE: lambda: rounds.group.allreduce([flat]).wait(),
    }
    models = []
    with ExitStack() as ends:
        for kind in spec["links"]:
            torch.manual_seed(0)
            model = nn.Module()
            model.params = nn.ParameterList(0.02 * torch.randn(shape) for _ in range(PARAMETERS))
            models.append([param.detach() for param in model.parameters()])
            regions = RegionConfig(
                region=spec["region"],
                count=REGIONS,
                coordinator=spec["coordinator"],
                run=kind,
                link=kind,
            )
            outer = OuterOptimizer(
                accelerator,
                model,
                torch.optim.SGD(model.parameters(), lr=1e-3),
                OuterConfig(method="diloco", sync_interval=1),
                regions,
            )
            ends.callback(outer.close)
            calls[f"mean, {kind}"] = partial(_mean, outer, flat)
            calls[f"step(), {kind}"] = outer.step
        for number in range(WARM_UP + spec["rounds"]):
            found = {}
            for what, call in calls.items():
                flat.fill_(1.0)
                for params in models:
                    torch._foreach_mul_(params, 1.0 + 1e-3 * (1 + spec["region"]))
                found[what] = rounds.time(call)
            if number >= WARM_UP:
                yield found


def _mean(outer: Any, flat: Tensor) -> None:
    """The link's own part of a transfer."""
    home = outer.synchronizer.fragments[0].home
    request = MeanRequest(lambda: unrounded(flat), flat.numel(), Trailer, "a mean", home=home)
    home.give(outer.link.mean(request).wait().result.mean)


def compare(links: Sequence[str], values: int, rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    """A row for each call, and the single measurements."""
    from hf_cocodc.coordinator.server import serve_in_thread

    with closing(serve_in_thread()) as served, tempfile.TemporaryDirectory() as folder:
        common = {"coordinator": served.address, "values": values, "rounds": rounds, "links": list(links)}
        specs = [{**common, "folder": folder, "region": region} for region in range(REGIONS)]
        found = list(run(PROGRAM, specs, start_here, num_threads=1))
    samples = {
        f"{what}, {unit}": [each[what][place] for each in found]
        for what in found[0]
        for place, unit in enumerate(("s", "core s"))
    }
    least, least_core = (median(samples[f"{ALL_REDUCE}, {unit}"]) for unit in ("s", "core s"))
    rows: list[Row] = []
    for what in found[0]:
        seconds, core_s = samples[f"{what}, s"], median(samples[f"{what}, core s"])
        rows.append(
            {
                "call": what,
                "ms": 1e3 * median(seconds),
                "fastest, ms": 1e3 * min(seconds),
                "times gloo's": median(seconds) / least,
                "ms of a core": 1e3 * core_s,
                "times gloo's work": core_s / least_core,
            }
        )
    return rows, samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__, allow_abbrev=False)
    parser.add_argument("--links", nargs="+", default=["tcp", "gloo"], metavar="NAME")
    parser.add_argument("--values", type=int, default=1 << 24, help="fp32 values (default: 2^24, 67 MB)")
    parser.add_argument("--rounds", type=int, default=40, help="the median counts (default: 40)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    rows, samples = compare(options.links, options.values, options.rounds)
    report = BenchReport(
        "two regions on loopback, beside gloo's all-reduce of the same values",
        {"values": options.values, "rounds": options.rounds, "threads a region": 1},
        rows,
        notes=[
            "ms of a core: what all threads of the slower region compute. Other programs on the machine change it less."
        ],
        samples=samples,
    )
    sys.stdout.write("\n".join([*report.lines(), ""]))
    if options.json:
        write(options.json, [report])
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        serve(_region)
    raise SystemExit(main())
