"""Runs what takes a region's time, to measure it: a codec's side of a transfer, and the engine's sends and landings."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Arrival, Awaited, Handle, MeanRequest, drive
from hf_cocodc.link.lockstep import LockstepHub, LockstepLink
from hf_cocodc.parts import codecs
from hf_cocodc.parts.codecs.base import Codec, CodecState, Message, Reply, Result, slices, weighted_mean
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.parts.schedules import every
from hf_cocodc.parts.tensors.flat import moved
from hf_cocodc.parts.tensors.memory import HOST, Buffers, has_streams
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.tools.plan.speeds import Speeds

T = TypeVar("T")
SIDE = 1000
IDLE = 498
"""Inner steps without an event in a round."""
LANDINGS: dict[str, OuterConfig] = {
    "replace": OuterConfig(method="diloco"),
    "mix": OuterConfig(method="streaming", mixing_alpha=0.5, fragment_pattern="whole", num_fragments=1),
    "compensate": OuterConfig(method="cocodc", fragment_pattern="whole", num_fragments=1),
}
"""A method for each kind of landing, by what its merge reads."""
CODEC_VALUES, OUTER_VALUES = 2_000_000, 2_000_000
REPEAT = 3


def matrices(numel: int) -> Fragment:
    """A fragment of so many values, in matrices of SIDE x SIDE and a rest."""
    count, rest = divmod(numel, SIDE * SIDE)
    shapes = ((SIDE, SIDE),) * count + ((rest,),) * (rest > 0)
    return Fragment(0, tuple(f"p{i}" for i in range(len(shapes))), shapes, numel)


def transfer(
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


@dataclasses.dataclass(frozen=True)
class Round(Generic[T]):
    """What was measured of IDLE idle inner steps together, of a send, and of a landing."""

    idle: T
    send: T
    landing: T


class _Answered(LockstepLink):
    """The link of a single region whose mean is there at once."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(LockstepHub(1), region=0, num_regions=1)
        self._mean = torch.empty(numel, device=device)

    def mean(self, request: MeanRequest) -> Handle:
        result, trailers = Result(self._mean, lambda: self._mean, {}), (request.trailer(),)
        return Awaited(lambda: Arrival(result, trailers, 0, 0.0, 0.0, (0,), request.judge(trailers)))

    def refresh(self, grad: Tensor) -> None:
        """Set the next mean, as a landing has overwritten the last one."""
        self._mean.copy_(grad)


def rounds(
    config: OuterConfig,
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    repeat: int,
    measured: Callable[[Callable[[], Any]], T],
) -> list[Round[T]]:
    """Rounds of a method on a model of these shapes, without checksums, which the link's thread computes.

    `measured` makes each call, and returns what it has measured.
    """
    model, numel = nn.Module(), sum(map(math.prod, shapes))
    model.params = nn.ParameterList(tensors(shapes, 0.02, device))
    params = [param.detach() for param in model.parameters()]
    link = _Answered(numel, device)
    grad = 1e-3 * torch.randn(numel, device=device)
    method = dataclasses.replace(from_config(config), schedule=every(IDLE + 2, 1))
    synchronizer = Synchronizer(model, method, link, digest_interval=sys.maxsize)

    def idle() -> None:
        for _ in range(IDLE):
            synchronizer.step(1e-3)

    found: list[Round[T]] = []
    synchronizer.step(1e-3)
    for _ in range(repeat + 2):
        quiet = measured(idle)
        link.refresh(grad)
        send = measured(lambda: synchronizer.step(1e-3))
        torch._foreach_mul_(params, 1.001)  # an inner step, for the merge to keep
        landing = measured(lambda: synchronizer.step(1e-3))
        found.append(Round(quiet, send, landing))
    return found[2:]  # in the first rounds memory is newly allocated


def tensors(shapes: Sequence[tuple[int, ...]], scale: float, device: torch.device) -> list[Tensor]:
    return [scale * torch.randn(shape, device=device) for shape in shapes]


def speeds_here(names: Sequence[str]) -> Speeds:
    """How fast a core of this machine is, as the planner wants to know it: measured for some seconds."""
    device = HOST
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # the link's thread has one
        coded = {name: _coding(name, device) for name in names}
    finally:
        torch.set_num_threads(before)

    def seconds(call: Callable[[], Any]) -> float:
        began = now(device)
        call()
        return now(device) - began

    shapes = llama_like(OUTER_VALUES)
    numel = sum(map(math.prod, shapes))
    found = {reads: rounds(config, shapes, device, REPEAT, seconds) for reads, config in LANDINGS.items()}
    return Speeds(
        encode={name: encode_s for name, (encode_s, _) in coded.items()},
        decode={name: decode_s for name, (_, decode_s) in coded.items()},
        send=median(each.send for each in found["replace"]) / numel,
        land={reads: median(each.landing for each in every) / numel for reads, every in found.items()},
    )


def _coding(name: str, device: torch.device) -> tuple[float, float]:
    """Seconds per value to encode with a codec, and to decode."""
    codec: Codec = getattr(codecs, name)()
    fragment = matrices(CODEC_VALUES)
    values = torch.randn(fragment.numel, generator=torch.Generator(HOST).manual_seed(0), device=HOST).to(
        device
    )
    state, buffers, means = moved(codec.init(fragment), device), Buffers(device), list[Tensor]()
    tries = []
    for _ in range(REPEAT + 1):
        buffers.give(*means)
        means.clear()
        tries.append(transfer(codec, fragment, values, state, buffers, means)[:2])
    encode, decode = (median(each) for each in zip(*tries[1:], strict=True))  # the first allocates memory
    return encode / fragment.numel, decode / fragment.numel
