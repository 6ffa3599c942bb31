"""The costs of codecs: the error, and the time to encode and to decode, against a copy of the same values."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from ...errors import InputError, nearest, shown
from ...link.base import drive
from ...parts import codecs
from ...parts.codecs.base import Codec, CodecState, Message, Reply, slices, weighted_mean
from ...parts.fragments import Fragment
from ...parts.tensors.flat import moved
from ...parts.tensors.memory import HOST, Buffers, has_streams
from ...settings.outer import CODECS
from .report import BenchReport, Row

KNOWN: dict[str, Callable[[], Codec]] = {name: getattr(codecs, name) for name in CODECS}
"""Codecs by their names in recipes."""

_SIDE = 1000
_NOTES = (
    "GB/s: 10^9 bytes of fp32 per second. Encoding ends with the last byte to send; decoding starts there.",
    "vs copy: the speed against one plain copy of the fp32 values, measured in turn with the codec; 1 is the speed of memory.",
    "CPU s per GB: on all cores, for encoding and decoding. Training on the same cores loses this time.",
    "A codec can fill a link of encode GB/s divided by times smaller: 4 GB/s and 4 times smaller fill 8 Gbit/s.",
    f"relative error: |decoded - values| / |values| of normal values in matrices of {_SIDE} x {_SIDE}. Such values are the worst "
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
    num_matrices, rest = divmod(numel, _SIDE * _SIDE)
    shapes = ((_SIDE, _SIDE),) * num_matrices + ((rest,),) * (rest > 0)
    fragment = Fragment(0, tuple(f"p{i}" for i in range(len(shapes))), shapes, numel)
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
        encode, decode, mean = _transfer(codec, fragment, values, state, buffers, means)
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


def _transfer(
    codec: Codec,
    fragment: Fragment,
    values: Tensor,
    state: CodecState,
    buffers: Buffers,
    means: list[Tensor],
) -> tuple[float, float, Tensor]:
    """One region's side of a transfer: seconds until the last byte is encoded, seconds after that, decoded mean.

    Means are decoded into `buffers`, as in a run, and are added to `means`.
    """
    encoded = 0.0

    def exchange(message: Message) -> Reply:
        nonlocal encoded
        coder, numel = message.coder, message.values.numel()
        [parts] = slices(coder, numel, 1)
        payloads = [coder.encode(message.values[part]) for part in parts]
        encoded = now(values.device)
        mean = buffers.take(numel)
        means.append(mean)
        for payload, part in zip(payloads, parts, strict=True):
            weighted_mean([payload], [1.0], coder, part.stop - part.start, out=mean[part])
        return Reply(mean, lambda: mean)

    start = now(values.device)
    mean = drive(codec.converse(values, fragment, state), exchange).mean
    return encoded - start, now(values.device) - encoded, mean


def now(device: torch.device) -> float:
    """Seconds, once the device has done its work."""
    if has_streams(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()
