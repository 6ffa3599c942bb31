"""What an outer step costs the training thread: the engine's own sends and landings, against a copy of the same bytes."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.synchronizer import Synchronizer
from ..engine.transfer import Here
from ..links.base import Arrival, Handle
from ..links.lockstep import LockstepHub, LockstepLink
from ..links.trailer import Trailer
from ..parts.codecs.base import Conversation, Result
from ..parts.schedules import every
from ..resolve import from_config
from ..settings import OuterConfig
from .report import Report, Row

_NOTES = (
    "bytes a param: the least that has to be read and written; a merge that needs norms reads what it needs twice.",
    "times the copy: time against that of one plain copy which reads and writes as many bytes, taken in turn with it.",
    "send: snapshot and outer gradient, and whether it is finite. land: outer step on the mean, merge, local params "
    "written. Both are whole calls of Synchronizer.step, over a link whose answer is there at once.",
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
"""Methods, and bytes a parameter of their landings: outer gradient 4, momentum 8, global params 8, local params written 4;
where they are merged, read 4 more; compensation reads the snapshot, 4, and once more what it has read of all three."""
_SGD: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def measure(numel: int, repeat: int) -> Report:
    """One row for each thing that happens at a send or a landing, and for what is done elsewhere instead.

    Args:
        numel: parameters of the model, about; at least 1.
        repeat: measurements, at least 1; their medians count.
    """
    shapes = llama_like(numel)
    clock = _Clock(sum(math.prod(shape) for shape in shapes))
    rows: list[Row] = []
    for what, (config, bytes_a_param) in _LANDINGS.items():
        rounds = _rounds(config, shapes, clock, repeat)
        if not rows:  # up to the merge all methods do the same
            rows.append(clock.row("idle step", None, [each.idle for each in rounds]))
            rows.append(clock.row("send", 16, [each.send for each in rounds]))
        rows.append(clock.row(what, bytes_a_param, [each.landing for each in rounds]))
    rows += [clock.row(f"SGD, {name}", 20, _sgd(shapes, clock, repeat, kind)) for name, kind in _SGD.items()]
    copies = [_Sample(seconds, seconds) for seconds in clock.copies]
    setting = {
        "parameters": clock.numel,
        "tensors": len(shapes),
        "repeat": repeat,
        "threads": torch.get_num_threads(),
    }
    return Report("outer step", setting, [clock.row("copy", _COPIED, copies), *rows], _NOTES)


def llama_like(numel: int) -> list[tuple[int, ...]]:
    """Shapes of a Llama with about `numel` parameters, which is 53 times the square of its width.

    It has two blocks only: so its tensors are not much smaller than those of a model that is worth training.
    """
    width = max(16, 16 * round(math.sqrt(numel / 53) / 16))
    heads, hidden, vocabulary = width // 4, 8 * width // 3, 16 * width
    block = [
        *((width, width), (heads, width), (heads, width), (width, width)),
        *((hidden, width), (hidden, width), (width, hidden), (width,), (width,)),
    ]
    return [(vocabulary, width), *2 * block, (width,), (vocabulary, width)]


class _Sample(NamedTuple):
    """Seconds of something, and of the copy that was taken in turn with it."""

    seconds: float
    copy_s: float


class _Clock:
    """Times calls, each in turn with a plain copy."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.copies: list[float] = []
        self._source = torch.ones(_COPIED // 8 * numel)
        self._target = torch.zeros_like(self._source)

    def time(self, call: Callable[[], Any]) -> _Sample:
        self.copies.append(_seconds(lambda: self._target.copy_(self._source)))
        return _Sample(_seconds(call), self.copies[-1])

    def row(self, what: str, bytes_a_param: int | None, samples: Sequence[_Sample]) -> Row:
        seconds, copy_s = (median(each) for each in zip(*samples, strict=True))
        row: Row = {"what": what, "ms": 1e3 * seconds}
        if bytes_a_param is None:
            return row | {"bytes a param": None, "GB/s": None, "times the copy": None}
        return row | {
            "bytes a param": bytes_a_param,
            "GB/s": 1e-9 * bytes_a_param * self.numel / seconds,
            "times the copy": seconds / copy_s * _COPIED / bytes_a_param,
        }


class _Round(NamedTuple):
    """What happens in `_INTERVAL` inner steps; an idle step is the mean of many."""

    idle: _Sample
    send: _Sample
    landing: _Sample


class _Answered(LockstepLink):
    """The link of a lone region whose mean is there at once, so that nothing but the engine takes time."""

    def __init__(self, numel: int) -> None:
        super().__init__(LockstepHub(1), region=0, num_regions=1)
        self._mean = torch.empty(numel)

    def mean(
        self, conversation: Conversation, numel: int, trailer: Callable[[], Trailer], what: str
    ) -> Handle:
        return Here(Arrival(Result(self._mean, lambda: self._mean, {}), (trailer(),), 0, 0.0, 0.0))

    def refresh(self, grad: Tensor) -> None:
        """Answer with this, which the last landing has overwritten."""
        self._mean.copy_(grad)


def _rounds(
    config: OuterConfig, shapes: Sequence[tuple[int, ...]], clock: _Clock, repeat: int
) -> list[_Round]:
    """Rounds of a method on a model of these shapes; without checksums, which are the link's thread's business."""
    model = nn.Module()
    model.params = nn.ParameterList(_tensors(shapes, scale=0.02))
    params = [param.detach() for param in model.parameters()]
    link, grad = _Answered(clock.numel), 1e-3 * torch.randn(clock.numel)
    method = dataclasses.replace(from_config(config), schedule=every(_INTERVAL, 1))
    synchronizer = Synchronizer(model, method, link, digest_interval=sys.maxsize)

    def idle() -> None:
        for _ in range(_INTERVAL - 2):
            synchronizer.step(1e-3)

    rounds = []
    synchronizer.step(1e-3)
    for _ in range(repeat + 2):
        quiet = clock.time(idle)
        send = clock.time(lambda: synchronizer.step(1e-3))
        link.refresh(grad)
        torch._foreach_mul_(params, 1.001)  # an inner step, for the merge to keep
        landing = clock.time(lambda: synchronizer.step(1e-3))
        rounds.append(_Round(quiet._replace(seconds=quiet.seconds / (_INTERVAL - 2)), send, landing))
    return rounds[2:]  # before, memory is new


def _sgd(
    shapes: Sequence[tuple[int, ...]], clock: _Clock, repeat: int, kind: dict[str, bool]
) -> list[_Sample]:
    params = [nn.Parameter(tensor) for tensor in _tensors(shapes, scale=0.02)]
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    sgd = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True, **kind)
    return [clock.time(sgd.step) for _ in range(repeat + 1)][1:]  # the first makes the momentum


def _tensors(shapes: Sequence[tuple[int, ...]], scale: float) -> list[Tensor]:
    return [scale * torch.randn(shape) for shape in shapes]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
