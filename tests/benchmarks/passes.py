"""What a round asks of a GPU, counted without one: `python -m tests.benchmarks.passes`.

Every method runs a round of one transfer over torch's fake tensors, which have a device, a type and a shape, and no values. Each
operation counts as one kernel, and with the bytes that it reads and writes. A copy of the fp32 values moves 8 bytes a value. The
numbers are exact, and the same on every machine. They say nothing of what a real device makes of them.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from pathlib import Path
from typing import Any

import torch

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.newer import known
from hf_cocodc.parts.tensors.memory import Home
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.fake import FakeLink, fake_tensors
from tests.far import FAR
from tests.toys import Blocks

COPY = 8
"""Bytes that a copy of one fp32 value moves."""
SHAPE = (1 << 14, 1 << 12)
"""Of the model's one parameter: 2^26 values, one slice on a device."""
ROUNDS = 4
CASES: tuple[tuple[str, str], ...] = (
    *(("diloco", codec) for codec in ("fp32", "bf16", "int8", "int4", "fp4")),
    *(("streaming", codec) for codec in ("fp32", "fp4")),
    ("cocodc", "int8"),
    ("eager", "fp32"),
    ("co2", "fp32"),
    ("dilocox", "lowrank"),
    ("sparseloco", "topk_2bit"),
    ("muloco", "int4"),
)


def settings(method: str, codec: str) -> OuterConfig:
    """Rounds of one transfer, as the method has it by default otherwise."""
    takes = inspect.signature(known()[method]).parameters
    more: dict[str, Any] = {"num_fragments": 1} if "num_fragments" in takes else {}
    if method == "cocodc":
        more |= {"overlap_steps": 1, "sends_per_interval": 1}
    return OuterConfig(method=method, sync_interval=3, codec=codec, **more)


def row(method: str, codec: str, shape: tuple[int, ...] = SHAPE) -> Row:
    """The counts of one transfer between two regions, from its send to its landing."""
    with fake_tensors() as fake:
        link: Any = FakeLink(fake)
        with fake.elsewhere():
            model = Blocks([torch.empty(shape, device=FAR)])
            region = Synchronizer(model, from_config(settings(method, codec)), link, home=Home(FAR))

        def rounds(count: int) -> None:
            for _ in range(3 * count):
                region.step(0.1)

        rounds(ROUNDS)
        landings = region.totals.landings
        before = fake.kernels, fake.moved, link.kernels, link.moved
        rounds(ROUNDS)
        landings = region.totals.landings - landings
        after = fake.kernels, fake.moved, link.kernels, link.moved
    kernels, moved, of_link, moved_by_link = (
        (now - then) / landings for now, then in zip(after, before, strict=True)
    )
    copy = COPY * math.prod(shape)
    return {
        "method": method,
        "codec": codec,
        "training: copies": round((moved - moved_by_link) / copy, 2),
        "training: kernels": round(kernels - of_link),
        "link: copies": round(moved_by_link / copy, 2),
        "link: kernels": round(of_link),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.passes", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    report = BenchReport(
        title="What a transfer between two regions asks of a GPU",
        setting={"values": math.prod(SHAPE), "regions": 2, "outer.device": "model"},
        rows=[row(*case) for case in CASES],
        notes=[
            "copies: memory that is read and written, beside one copy of the fp32 values (8 bytes a value)"
        ],
    )
    sys.stdout.write("\n".join(report.lines()) + "\n")
    if args.json is not None:
        write(args.json, [report])


if __name__ == "__main__":
    main()
