"""The cost of an outer step for the training thread: the engine's own sends and landings, against a copy of the same bytes:
`python -m tests.benchmarks.outer --millions 8 --threads 1`.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_cocodc.parts.tensors.memory import HOST
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.benchmarks.timing import IDLE, LANDINGS, llama_like, now, rounds, tensors

_NOTES = (
    "bytes per param: the least that must be read and written; a merge that needs norms reads its inputs twice.",
    "times the copy: time divided by that of a plain copy that reads and writes as many bytes, timed just before.",
    "send: takes the snapshot and the outer gradient, and its norm. land: the outer step, the merge, and the local params. "
    "Both are whole calls of Synchronizer.step, in the training thread, for a transfer that has already ended.",
    "A landing takes the outer step, too: new global params and outer state from the mean.",
    "SGD: torch.optim.SGD with Nesterov momentum, tensor by tensor. It moves the global params and no local ones.",
)
_COPIED = 24
_LANDINGS = {
    "replace": ("land, replace (diloco)", 24),
    "mix": ("land, mix (streaming)", 28),
    "compensate": ("land, compensate (cocodc)", 44),
}
"""Rows, and bytes per parameter of the landings: outer gradient 4, momentum 8, global params 8, local params 4; a merge
reads 4 more; compensation reads the snapshot, 4, and reads all three once more."""
_STEP_BYTES = 20
"""Bytes per parameter of an outer step: outer gradient 4, momentum 8, global params 8."""
_SGD: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def measure(numel: int, repeat: int, threads: Sequence[int] = (), device: torch.device = HOST) -> BenchReport:
    """One row for each part of a send and a landing, and rows for comparison (a copy, SGD): medians of `repeat` measurements.

    The model has about `numel` parameters, on `device`. `threads` has numbers of threads to measure with; by default one, and
    torch's own.
    """
    shapes = llama_like(numel)
    clock = _Clock(sum(math.prod(shape) for shape in shapes), device)
    before = torch.get_num_threads()
    counts = list(dict.fromkeys(threads or (1, before)))
    rows: list[Row] = []
    samples: dict[str, list[float]] = {}
    try:
        for count in counts:
            torch.set_num_threads(count)
            rows += [{"threads": count, **row} for row in _rows(shapes, clock, repeat)]
            samples |= {f"{what}, {count} thread(s), s": each for what, each in clock.samples.items()}
    finally:
        torch.set_num_threads(before)
    setting = {"parameters": clock.numel, "tensors": len(shapes), "repeat": repeat, "threads": counts}
    return BenchReport("outer step", setting, rows, _NOTES, samples=samples)


def _rows(shapes: Sequence[tuple[int, ...]], clock: "_Clock", repeat: int) -> list[Row]:
    """The rows for one number of threads."""
    clock.copies.clear()
    rows: list[Row] = []
    for reads, (what, bytes_per_param) in _LANDINGS.items():
        found = rounds(LANDINGS[reads], shapes, clock.device, repeat, clock.time)
        if not rows:  # up to the merge all methods do the same
            idle = [each.idle._replace(seconds=each.idle.seconds / IDLE) for each in found]
            rows.append(clock.row("idle step", None, idle))
            rows.append(clock.row("send", 16, [each.send for each in found]))
        rows.append(clock.row(what, bytes_per_param, [each.landing for each in found]))
    rows += [
        clock.row(f"SGD, {name}", _STEP_BYTES, _sgd(shapes, clock, repeat, kind))
        for name, kind in _SGD.items()
    ]
    copies = [_Sample(seconds, seconds) for seconds in clock.copies]
    return [clock.row("copy", _COPIED, copies), *rows]


class _Sample(NamedTuple):
    """Seconds of a call, and of the copy that was timed just before it."""

    seconds: float
    copy_s: float


class _Clock:
    """Times calls, each of them after a plain copy."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self.device = numel, device
        self.copies: list[float] = []
        self.samples: dict[str, list[float]] = {}
        self._source = torch.ones(_COPIED // 8 * numel, device=device)
        self._target = torch.zeros_like(self._source)

    def time(self, call: Callable[[], Any]) -> _Sample:
        self.copies.append(self._seconds(lambda: self._target.copy_(self._source)))
        return _Sample(self._seconds(call), self.copies[-1])

    def _seconds(self, call: Callable[[], Any]) -> float:
        start = now(self.device)
        call()
        return now(self.device) - start

    def row(self, what: str, bytes_per_param: int | None, samples: Sequence[_Sample]) -> Row:
        self.samples[what] = [sample.seconds for sample in samples]
        seconds, copy_s = (median(each) for each in zip(*samples, strict=True))
        row: Row = {"what": what, "ms": 1e3 * seconds}
        if bytes_per_param is None:
            return row | {"bytes per param": None, "GB/s": None, "times the copy": None}
        return row | {
            "bytes per param": bytes_per_param,
            "GB/s": 1e-9 * bytes_per_param * self.numel / seconds,
            "times the copy": seconds / copy_s * _COPIED / bytes_per_param,
        }


def _sgd(
    shapes: Sequence[tuple[int, ...]], clock: _Clock, repeat: int, kind: dict[str, bool]
) -> list[_Sample]:
    params = [nn.Parameter(tensor) for tensor in tensors(shapes, 0.02, clock.device)]
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    sgd = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True, **kind)
    return [clock.time(sgd.step) for _ in range(repeat + 1)][1:]  # the first step allocates the momentum


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--millions", type=int, default=32, help="number of parameters, in millions (default: 32)"
    )
    parser.add_argument(
        "--repeat", type=int, default=10, help="number of measurements; their median counts (default: 10)"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="numbers of threads (default: 1, and torch's own)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(arguments)
    report = measure(options.millions * 10**6, options.repeat, options.threads or ())
    sys.stdout.write("\n".join(report.lines()) + "\n")
    if options.json is not None:
        write(options.json, [report])
    return 0


if __name__ == "__main__":
    sys.exit(main())
