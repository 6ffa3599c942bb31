"""The costs of codecs: the error, and the time to encode and to decode, against a copy of the same values:
`python -m tests.benchmarks.codec --millions 8`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from hf_cocodc.errors import InputError, nearest, shown
from hf_cocodc.parts.codecs.base import Codec
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.parts.tensors.flat import moved
from hf_cocodc.parts.tensors.memory import HOST, Buffers
from hf_cocodc.tools.bench.link import KNOWN
from hf_cocodc.tools.bench.report import BenchReport, Row, write
from tests.benchmarks.timing import SIDE, matrices, now, transfer

_NOTES = (
    "GB/s: 10^9 bytes of fp32 per second. Encoding ends with the last byte to send; decoding starts there.",
    "vs copy: the speed against one plain copy of the fp32 values, measured in turn with the codec; 1 is the speed of memory.",
    "CPU s per GB: on all cores, for encoding and decoding. Training on the same cores loses this time.",
    "A codec can fill a link of encode GB/s divided by times smaller: 4 GB/s and 4 times smaller fill 8 Gbit/s.",
    f"relative error: |decoded - values| / |values| of normal values in matrices of {SIDE} x {SIDE}. Such values are the worst "
    "case for topk (no few large values) and lowrank (no few directions). Error feedback returns the error in later rounds.",
)


def measure(
    numel: int, repeat: int, only: Sequence[str] | None = None, device: torch.device = HOST
) -> BenchReport:
    """Measure codecs on `numel` fp32 values: one row per codec, with the medians of `repeat` measurements; both at least 1.

    The values are on `device`, where they are encoded. `only` names codecs; None takes all that a recipe can name. Raises
    InputError if one is unknown.
    """
    for name in only or ():
        if name not in KNOWN:
            raise InputError(f"--only {shown(name)} is not a codec.{nearest(name, list(KNOWN))}")
    fragment = matrices(numel)
    values = torch.randn(numel, generator=torch.Generator(HOST).manual_seed(0), device=HOST).to(device)
    samples: dict[str, list[float]] = {}
    rows = [_row(name, KNOWN[name](), fragment, values, repeat, samples) for name in only or KNOWN]
    setting = {"values": numel, "repeat": repeat, "threads": torch.get_num_threads()}
    return BenchReport("codecs", setting, rows, _NOTES, samples=samples)


def _row(
    name: str,
    codec: Codec,
    fragment: Fragment,
    values: Tensor,
    repeat: int,
    samples: dict[str, list[float]],
) -> Row:
    """The row of a codec; its single measurements join `samples`."""
    target, state = torch.empty_like(values), moved(codec.init(fragment), values.device)
    buffers, means = Buffers(values.device), list[Tensor]()
    copies, encodes, decodes, busy = [], [], [], []
    for _ in range(repeat + 1):
        start = now(values.device)
        target.copy_(values)
        copies.append(now(values.device) - start)
        buffers.give(*means)
        means.clear()
        start = time.process_time()
        encode, decode, mean = transfer(codec, fragment, values, state, buffers, means)
        busy.append(time.process_time() - start)
        encodes.append(encode)
        decodes.append(decode)
    # Leave out the first measurement, which allocates memory.
    measured = {"copy": copies[1:], "encode": encodes[1:], "decode": decodes[1:], "CPU": busy[1:]}
    samples.update({f"{name}, {what} s": seconds for what, seconds in measured.items()})
    copy, encode, decode, cpu = map(median, measured.values())
    gigabytes, num_bytes = 4e-9 * len(values), codec.wire_bytes(fragment, 0, 2)
    return {
        "codec": name,
        "bits per value": 8 * num_bytes / len(values),
        "times smaller": 4 * len(values) / num_bytes,
        "encode GB/s": gigabytes / encode,
        "decode GB/s": gigabytes / decode,
        "encode vs copy": copy / encode,
        "decode vs copy": copy / decode,
        "CPU s per GB": cpu / gigabytes,
        "relative error": ((mean - values).norm() / values.norm()).item(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--millions", type=int, default=32, help="number of values, in millions (default: 32)"
    )
    parser.add_argument(
        "--repeat", type=int, default=5, help="number of measurements; their median counts (default: 5)"
    )
    parser.add_argument("--only", nargs="+", metavar="CODEC", help="codecs to measure (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(arguments)
    report = measure(options.millions * 10**6, options.repeat, options.only or ())
    sys.stdout.write("\n".join(report.lines()) + "\n")
    if options.json is not None:
        write(options.json, [report])
    return 0


if __name__ == "__main__":
    sys.exit(main())
