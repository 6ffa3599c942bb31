"""Holds `hf-cocodc plan` against real training over an emulated link: `python -m tests.benchmarks.plan`.

Each cell trains with one method, codec and link, in two regions or four. An inner step sleeps, as a processor that waits for an
accelerator: other load on the machine then changes little, and what it changes is measured in the same run, as are the speed of
the codecs and of the outer step. It prints the utilization that the planner expects and the one measured, and the table of
the README. Needs Linux network namespaces: root, or a kernel that allows user namespaces. Takes about 35 minutes.
"""

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.tools.bench.report import BenchReport, read, write
from hf_cocodc.tools.plan.course import MEASURED, WARM_UP
from hf_cocodc.tools.plan.forecast import Subject, codecs_of
from hf_cocodc.tools.plan.speeds import Speeds
from hf_cocodc.tools.plan.transfers import LinkFigures
from tests.benchmarks.workers import run, serve

from .emulation.privileges import obstacle
from .emulation.wan import INTERFACE, Wan
from .timing import speeds_here
from .workload import model_of

PROGRAM = "tests.benchmarks.plan"
SHAPE = {"num_hidden_layers": 16, "intermediate_size": 401}
PORT = 29650
COORDINATOR = (
    *(sys.executable, "-m", "hf_cocodc", "coordinator"),
    *("--host", "0.0.0.0", "--port", str(PORT), "--insecure"),
)
H, PACE_S = 20, 0.1
RESULTS = Path(__file__).parents[2] / "docs" / "evidence" / "benchmarks" / "plan.json"


class Cell(NamedTuple):
    """One training."""

    link: str
    outer: dict[str, Any]


class Place(NamedTuple):
    """Where regions train: the link that the planner is told of, and the uplink of each region if they differ."""

    link: LinkFigures
    regions: int = 2
    uplinks: tuple[float, ...] | None = None


LINKS = {
    "100 ms, 1000 Mbit/s": Place(LinkFigures(0.1, 1e9)),
    "100 ms, 50 Mbit/s, 0.01 % loss": Place(LinkFigures(0.1, 50e6, 1e-4)),
    "30 ms, 40 Mbit/s": Place(LinkFigures(0.03, 40e6)),
    "150 ms, 20 Mbit/s": Place(LinkFigures(0.15, 20e6)),
    "300 ms, 100 Mbit/s": Place(LinkFigures(0.3, 100e6)),
    "four regions, 80 ms, 150 Mbit/s each": Place(LinkFigures(0.08, 150e6), 4),
    "40 ms, 20 Mbit/s up, 100 down": Place(LinkFigures(0.04, 20e6), 2, (20e6, 100e6)),
}
FAST, LOSSY, HOME, FAR, FARTHEST, FOUR, UNEVEN = LINKS
TRAININGS = {**dict.fromkeys(LINKS, 1), LOSSY: 6, HOME: 3}
"""Trainings of each cell. Which packets are lost changes a training of a few rounds by a tenth and more; what fills a slow link
changes it by a few hundredths."""
CELLS = (
    Cell(FAST, {"method": "diloco", "codec": "fp32"}),
    Cell(FAST, {"method": "streaming", "codec": "fp32", "overlap_steps": 2}),
    Cell(FAST, {"method": "eager", "codec": "fp32"}),
    Cell(FAST, {"method": "cocodc", "codec": "fp32"}),
    Cell(LOSSY, {"method": "diloco", "codec": "int8"}),
    Cell(LOSSY, {"method": "streaming", "codec": "bf16", "overlap_steps": 4}),
    Cell(LOSSY, {"method": "co2", "codec": "int8"}),
    Cell(LOSSY, {"method": "dilocox", "codec": "lowrank", "rank": 16}),
    Cell(LOSSY, {"method": "cocodc", "codec": "int8"}),
    Cell(HOME, {"method": "diloco", "codec": "fp4"}),
    Cell(HOME, {"method": "diloco", "codec": "bf16"}),
    Cell(HOME, {"method": "streaming", "codec": "int8", "overlap_steps": 1}),
    Cell(HOME, {"method": "streaming", "codec": "fp4", "overlap_steps": 1}),
    Cell(HOME, {"method": "eager", "codec": "bf16"}),
    Cell(FAR, {"method": "diloco", "codec": "fp4"}),
    Cell(FAR, {"method": "streaming", "codec": "int8", "overlap_steps": 2}),
    Cell(FARTHEST, {"method": "diloco", "codec": "int8"}),
    Cell(FARTHEST, {"method": "streaming", "codec": "int8", "overlap_steps": 2}),
    Cell(FARTHEST, {"method": "streaming", "codec": "int8", "overlap_steps": 3}),
    Cell(FOUR, {"method": "diloco", "codec": "int8"}),
    Cell(FOUR, {"method": "streaming", "codec": "bf16", "overlap_steps": 2}),
    Cell(UNEVEN, {"method": "diloco", "codec": "fp4"}),
    Cell(UNEVEN, {"method": "streaming", "codec": "fp4", "overlap_steps": 2}),
)


def subject_of(link: LinkFigures, step_s: float, speeds: Speeds, regions: int = 2) -> Subject:
    """What the planner is told of a training."""
    recipe = Recipe.from_dict(
        {
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": {"builtin": "bytes"},
            "data": {"builtin": "python-stdlib"},
            "training": {},
            "regions": {"link": "tcp"},
        }
    )
    with torch.device("meta"):
        model = model_of(SHAPE)
    return Subject(recipe, model, link, step_s, regions, speeds)


def config_of(cell: Cell) -> OuterConfig:
    return OuterConfig(sync_interval=H, **cell.outer)


def _region(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One region: measure this machine, then train every cell; region 0's figures count."""
    link = LinkFigures(**spec["link"])
    cells = [Cell(*each) for each in spec["cells"]]
    regions = spec["regions"]
    for cell in [each for each in cells for _ in range(TRAININGS[each.link])]:
        speeds = speeds_here(codecs_of([config_of(cell)]))
        planned = subject_of(link, PACE_S, speeds, regions)
        found = _train(spec, config_of(cell), planned)
        expected = subject_of(link, found["step_s"], speeds, regions).course(config_of(cell))
        yield {
            **found,
            "expected": expected.utilization,
            "limit_mbit": planned.limit * 8 / 1e6,
            "connections": planned.connections,
        }


def _train(spec: dict[str, Any], config: OuterConfig, planned: Subject) -> dict[str, Any]:
    from accelerate import Accelerator

    from hf_cocodc import OuterOptimizer

    model = model_of(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    regions = RegionConfig(
        region=spec["region"],
        count=spec["regions"],
        coordinator=spec["coordinator"],
        interface=INTERFACE,
        connections=planned.connections,
        rate_limit=planned.limit * 8 / 1e6,
        congestion="system",  # the emulated link's: "auto" would take bbr where the kernel has it
    )
    params = [param.detach() for param in model.parameters()]
    torch.manual_seed(spec["region"])
    drift = [1e-4 * torch.randn_like(param) for param in params]
    begin, end = WARM_UP * H, (WARM_UP + MEASURED) * H
    outer = OuterOptimizer(Accelerator(cpu=True), model, optimizer, config, regions, max_steps=end)
    stepping_s = blocked_s = began = took_s = 0.0
    for step in range(1, end + 1):
        start = time.perf_counter()
        torch._foreach_add_(params, drift)
        time.sleep(max(PACE_S - (time.perf_counter() - start), 0.0))
        now = time.perf_counter()
        if step > begin:
            stepping_s += now - start
        outer.step()
        if step == begin:
            began, blocked_s = time.perf_counter(), outer.synchronizer.totals.blocked_s
        if step == end:
            took_s = time.perf_counter() - began
            blocked_s = outer.synchronizer.totals.blocked_s - blocked_s
    outer.finish()
    return {
        "measured": stepping_s / took_s,
        "step_s": stepping_s / (end - begin),
        "blocked": blocked_s / took_s,
    }


def mean_of(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several trainings as one: utilizations by the times that they stand for."""
    shares = ("measured", "expected")
    return {
        name: len(answers) / sum(1 / each[name] for each in answers)
        if name in shares
        else sum(each[name] for each in answers) / len(answers)
        for name in answers[0]
    }


def compare(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Train the cells, link by link, and print a line for each."""
    rows = []
    for name in dict.fromkeys(cell.link for cell in cells):
        (link, count, uplinks), mine = LINKS[name], [cell for cell in cells if cell.link == name]
        rate = uplinks or link.rate / (count - 1)  # the emulator's is that of each pair
        with Wan(count, rtt_s=link.rtt_s, rate=rate, loss=link.loss, congestion=link.congestion) as wan:
            wan.popen(0, COORDINATOR, stdout=subprocess.DEVNULL)  # only regions reach each other
            common = {
                "coordinator": f"{wan.address(0)}:{PORT}",
                "link": dataclasses.asdict(link),
                "regions": count,
                "cells": mine,
            }
            specs = [{**common, "region": region} for region in range(count)]
            answers = run(PROGRAM, specs, wan.popen, num_threads=1)
            for cell in mine:
                trainings = [next(answers) for _ in range(TRAININGS[name])]
                found = mean_of(trainings)
                config = config_of(cell)
                rows.append(
                    {
                        "link": name,
                        "method": config.method,
                        "codec": config.codec,
                        "overlap": config.overlap_steps,
                        "expected": found["expected"],
                        "measured": found["measured"],
                        "error": found["expected"] / found["measured"] - 1,
                        "blocked": found["blocked"],
                        "step s": found["step_s"],
                        "trainings": len(trainings),
                        "least": min(each["measured"] for each in trainings),
                        "most": max(each["measured"] for each in trainings),
                    }
                )
                sys.stdout.write(f"{rows[-1]}\n")
                sys.stdout.flush()
    return rows


def kept(path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier result, each replaced by that of `rows` for the same cell."""
    names = ("link", "method", "codec", "overlap")
    measured = {tuple(row[name] for name in names): row for row in rows}
    [report] = read(path)
    return [measured.get(tuple(row[name] for name in names), row) for row in report["rows"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--only",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of cells, from 0: only these are trained; the result keeps the others, if it has them",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args()
    missing = obstacle()
    if missing is not None:
        sys.stdout.write(f"{missing}\n")
        return 2
    rows = compare([CELLS[number] for number in options.only] if options.only else CELLS)
    if options.only and options.output.is_file():
        rows = kept(options.output, rows)
    shares = dict.fromkeys(("expected", "measured", "error", "blocked", "least", "most"), ".1%")
    setting = {"parameters": sum(param.numel() for param in model_of(SHAPE).parameters()), "H": H}
    report = BenchReport("the planner against training over an emulated link", setting, rows, formats=shares)
    sys.stdout.write(
        "\n" + "\n".join(report.lines()) + "\n| link | method | codec | expected | measured | error |\n"
    )
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for row in rows:
        overlap = "" if row["overlap"] is None else f", overlap {row['overlap']}"
        cells = f"{row['link']} | {row['method']}{overlap} | {row['codec']} | {row['expected']:.1%} | {row['measured']:.1%}"
        sys.stdout.write(f"| {cells} | {100 * row['error']:+.1f} % |\n")
    write(options.output, [report])
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        serve(_region)
    sys.exit(main())
