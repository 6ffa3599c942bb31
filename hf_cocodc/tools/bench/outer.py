"""The cost of an outer step for the training thread: the engine's own sends and landings, against a copy of the same bytes."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.synchronizer import Synchronizer
from ...link.base import Arrival, ArrivedHandle, Handle, MeanRequest
from ...link.lockstep import LockstepHub, LockstepLink
from ...parts.codecs.base import Result
from ...parts.schedules import every
from ...parts.tensors.memory import HOST
from ...resolve import from_config
from ...settings import OuterConfig
from .codec import now
from .report import BenchReport, Row

_NOTES = (
    "bytes per param: the least that must be read and written; a merge that needs norms reads its inputs twice.",
    "times the copy: time divided by that of a plain copy that reads and writes as many bytes, timed just before.",
    "send: takes the snapshot and the outer gradient, and its norm. land: the outer step, the merge, and the local params. "
    "Both are whole calls of Synchronizer.step, in the training thread, for a transfer that has already ended.",
    "A landing takes the outer step, too: new global params and outer state from the mean.",
    "SGD: torch.optim.SGD with Nesterov momentum, tensor by tensor. It moves the global params and no local ones.",
)
_COPIED = 24
_INTERVAL = 500
"""Inner steps between two sends, nearly all of them idle."""
_WHOLE: dict[str, Any] = {"fragment_pattern": "whole", "num_fragments": 1}
_LANDINGS: dict[str, tuple[OuterConfig, int]] = {
    "land, replace (diloco)": (OuterConfig(method="diloco"), 24),
    "land, mix (streaming)": (OuterConfig(method="streaming", mixing_alpha=0.5, **_WHOLE), 28),
    "land, compensate (cocodc)": (OuterConfig(method="cocodc", **_WHOLE), 44),
}
"""Methods, and bytes per parameter of their landings: outer gradient 4, momentum 8, global params 8, local params 4; a merge
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
    for what, (config, bytes_per_param) in _LANDINGS.items():
        rounds = _rounds(config, shapes, clock, repeat)
        if not rows:  # up to the merge all methods do the same
            rows.append(clock.row("idle step", None, [each.idle for each in rounds]))
            rows.append(clock.row("send", 16, [each.send for each in rounds]))
        rows.append(clock.row(what, bytes_per_param, [each.landing for each in rounds]))
    rows += [
        clock.row(f"SGD, {name}", _STEP_BYTES, _sgd(shapes, clock, repeat, kind))
        for name, kind in _SGD.items()
    ]
    copies = [_Sample(seconds, seconds) for seconds in clock.copies]
    return [clock.row("copy", _COPIED, copies), *rows]


def llama_like(numel: int) -> list[tuple[int, ...]]:
    """Shapes of a Llama with about `numel` parameters, which is 53 times the square of its width.

    It has only two blocks, so that its tensors are not much smaller than those of a model that is worth training.
    """
    width = max(16, 16 * round(math.sqrt(numel / 53) / 16))
    heads, hidden, vocabulary = width // 4, 8 * width // 3, 16 * width
    block = [
        *((width, width), (heads, width), (heads, width), (width, width)),
        *((hidden, width), (hidden, width), (width, hidden), (width,), (width,)),
    ]
    return [(vocabulary, width), *2 * block, (width,), (vocabulary, width)]


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


class _Interval(NamedTuple):
    """What happens in `_INTERVAL` inner steps; an idle step is the mean of many."""

    idle: _Sample
    send: _Sample
    landing: _Sample


class _Answered(LockstepLink):
    """The link of a single region whose mean is there at once."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(LockstepHub(1), region=0, num_regions=1)
        self._mean = torch.empty(numel, device=device)

    def mean(self, request: MeanRequest) -> Handle:
        result, trailers = Result(self._mean, lambda: self._mean, {}), (request.trailer(),)
        return ArrivedHandle(Arrival(result, trailers, 0, 0.0, 0.0, (0,), request.judge(trailers)))

    def refresh(self, grad: Tensor) -> None:
        """Set the next mean, as a landing has overwritten the last one."""
        self._mean.copy_(grad)


def _rounds(
    config: OuterConfig,
    shapes: Sequence[tuple[int, ...]],
    clock: _Clock,
    repeat: int,
) -> list[_Interval]:
    """Rounds of a method on a model of these shapes, without checksums, which the link's thread computes."""
    model = nn.Module()
    model.params = nn.ParameterList(_tensors(shapes, 0.02, clock.device))
    params = [param.detach() for param in model.parameters()]
    link = _Answered(clock.numel, clock.device)
    grad = 1e-3 * torch.randn(clock.numel, device=clock.device)
    method = dataclasses.replace(from_config(config), schedule=every(_INTERVAL, 1))
    synchronizer = Synchronizer(model, method, link, digest_interval=sys.maxsize)

    def idle() -> None:
        for _ in range(_INTERVAL - 2):
            synchronizer.step(1e-3)

    rounds = []
    synchronizer.step(1e-3)
    for _ in range(repeat + 2):
        quiet = clock.time(idle)
        link.refresh(grad)
        send = clock.time(lambda: synchronizer.step(1e-3))
        torch._foreach_mul_(params, 1.001)  # an inner step, for the merge to keep
        landing = clock.time(lambda: synchronizer.step(1e-3))
        rounds.append(_Interval(quiet._replace(seconds=quiet.seconds / (_INTERVAL - 2)), send, landing))
    return rounds[2:]  # in the first rounds memory is newly allocated


def _sgd(
    shapes: Sequence[tuple[int, ...]], clock: _Clock, repeat: int, kind: dict[str, bool]
) -> list[_Sample]:
    params = [nn.Parameter(tensor) for tensor in _tensors(shapes, 0.02, clock.device)]
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    sgd = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True, **kind)
    return [clock.time(sgd.step) for _ in range(repeat + 1)][1:]  # the first step allocates the momentum


def _tensors(shapes: Sequence[tuple[int, ...]], scale: float, device: torch.device) -> list[Tensor]:
    return [scale * torch.randn(shape, device=device) for shape in shapes]
