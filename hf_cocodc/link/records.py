"""Records of numbers, and the trailer: what regions tell each other beside their means.

A record is a NamedTuple whose fields are numbers: typed in the program, a row of fp64 on the wire, which holds integers exactly
up to 2**53. Each kind of record carries a mark: regions that are out of step notice it, and never take one number for another.
"""

import functools
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..errors import LinkError, RegionLostError
from ..parts.tensors.memory import HOST

logger = logging.getLogger(__name__)

Record = TypeVar("Record", bound=tuple)

ROW = 20
"""Numbers in a row: the mark of the kind, the fields, zeros. Rows of all kinds have one length."""


def to_row(record: tuple, beside: Sequence[float] = ()) -> Tensor:
    """The record as a row: (ROW,) fp64; longer by the numbers `beside` it, which `from_row` does not read."""
    numbers = [_mark(type(record)), *map(float, record)]
    padding = [0.0] * (ROW - len(numbers))
    return torch.tensor([*numbers, *padding, *beside], dtype=torch.float64, device=HOST)


def from_row(kind: type[Record], row: Tensor, region: int) -> Record:
    """The record of type `kind` that `region` has sent as a row.

    Raises LinkError if it is of another kind: regions are out of step; RegionLostError if a field has a wrong number.
    """
    mark, *numbers = row.tolist()
    if mark != _mark(kind):
        raise LinkError(
            f"regions are out of step: region {region} did not send the expected {kind.__name__}. Every region must "
            "make the same calls in the same order (with eager updates an evaluation is one): start all of them with the same "
            "version and the same script."
        )
    try:
        return in_order(kind, numbers)
    except ValueError as error:
        raise RegionLostError(
            region,
            f"region {region} sent a {kind.__name__} with a wrong number ({error}): what it sends cannot be believed. Look at "
            "its last output, and start it again.",
        ) from error


def from_numbers(kind: type[Record], numbers: Mapping[str, float]) -> Record:
    """The record whose fields have these values, each in its field's type. Raises ValueError if that type has no such value."""
    return kind(**{name: convert(numbers[name]) for name, convert in _types(kind).items() if name in numbers})


def in_order(kind: type[Record], numbers: Sequence[float]) -> Record:
    """The record whose fields have these values, in their order; what follows them is left out. Raises like `from_numbers`."""
    return from_numbers(kind, dict(zip(_types(kind), numbers, strict=False)))


@functools.cache
def _types(kind: type[tuple]) -> dict[str, Callable[[float], Any]]:
    hints = get_type_hints(kind)
    return {name: functools.partial(_convert, name, hints[name]) for name in kind._fields}  # type: ignore[attr-defined]


def _convert(name: str, kind: type, value: float) -> Any:
    if kind is float:
        return float(value)
    try:
        if value == int(value):
            return kind(int(value))
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{name}={value:g} is no {kind.__name__}")


@functools.cache
def _mark(kind: type[tuple]) -> float:
    return float(zlib.crc32(f"{kind.__module__}.{kind.__qualname__}".encode()))


class Ending(IntEnum):
    """What a region says about its own end."""

    NO = 0
    """It trains on."""
    DONE = 1
    """Its training is complete: it stopped early, or its data ran out."""
    INTERRUPTED = 2
    """It must leave, because of a signal or an error."""
    LEAVING = 3
    """It leaves in good order, and the others go on without it."""


class Word(NamedTuple):
    """The part of a trailer that comes from the training loop; the engine passes it on and never acts on it.

    `loss`: last training loss; NaN if unknown, infinite if not a number. `saved_at`: step of the newest complete checkpoint or
    0.
    """

    loss: float = math.nan
    ending: Ending = Ending.NO
    saved_at: int = 0


Words = Mapping[int, Word]
"""The words of the regions that took part in a transfer, in ascending order of the regions."""
NOTHING_TO_SAY = Word()


class Trailer(NamedTuple):
    """Numbers that travel with every transfer, so that training never waits for them alone.

    Attributes:
        weight: share in the mean; 0 if this region's outer gradient is not finite or contains no step.
        fragment: index of the fragment; shows whether regions are in step.
        inner_step: inner step at which the transfer was sent.
        step_time_s: seconds of an inner step in this region, without time at sends and landings; 0 if unknown.
        sync_time_s: seconds that this region's last transfer took; 0 if unknown.
        digest: checksum of the fragment's global params before the transfer; -1 if it was not computed.
        compression: share of its full rank that the codec uses for the fragment.
        loss, ending, saved_at: see `Word`.
        round_lr: mean inner learning rate of the region's steps since the fragment's last send.
        knows: number of the newest change of the members that the region knows (`Link.knows`).
        norm: of the region's outer gradient, over all its lanes; 0 if the weight is 0.
        carried: norm of what the codec adds to it from earlier transfers, likewise; 0 if it remembers no error.
        is_bounded: whether the region's inner optimizer bounds a step, so that norms of regions can be compared.
        trained_at: last inner step that the region has trained; -1 if unknown.
        samples: of the inner steps that took step_time_s, over all ranks of the region; 0 where the batch is not dealt.
        unit: samples of one micro-batch, likewise.
    """

    weight: float = 1.0
    fragment: int = -1
    inner_step: int = 0
    step_time_s: float = 0.0
    sync_time_s: float = 0.0
    loss: float = math.nan
    digest: int = -1
    compression: float = 1.0
    ending: Ending = Ending.NO
    saved_at: int = 0
    round_lr: float = 0.0
    knows: int = 0
    norm: float = 0.0
    carried: float = 0.0
    is_bounded: bool = True
    trained_at: int = -1
    samples: int = 0
    unit: int = 0

    @property
    def word(self) -> Word:
        """The part that comes from the region's training loop."""
        return Word(self.loss, self.ending, self.saved_at)


def checked(trailer: Trailer, region: int) -> Trailer:
    """The trailer that `region` has sent, once no number in it can do harm. Equal rows give equal results in all regions.

    A weight outside [0, 1] is brought into it; one that is not a number counts as 0. Raises RegionLostError if another number
    is one that no region sends.
    """
    for name, (holds, rule) in _RULES.items():
        value = getattr(trailer, name)
        if not holds(value):
            raise RegionLostError(
                region,
                f"region {region} sent {name}={value:g} with a transfer, and it {rule}: what it sends cannot be believed. "
                "Look at its last output, and start it again.",
            )
    weight = min(max(trailer.weight, 0.0), 1.0) if trailer.weight == trailer.weight else 0.0
    if weight == trailer.weight:
        return trailer
    logger.warning(
        "region %d sent the weight %g with fragment %d of step %d. Weights lie between 0 and 1: it counts as %g.",
        *(region, trailer.weight, trailer.fragment, trailer.inner_step, weight),
    )
    return trailer._replace(weight=weight)


def _whole(lowest: int, bits: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: lowest <= value < 2**bits, f"must lie between {lowest} and 2**{bits}"


_COUNT = _whole(0, 53)
_LENGTH: tuple[Callable[[Any], bool], str] = (
    lambda value: 0 <= value < math.inf,
    "must be finite, and not negative",
)
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fragment": _whole(-1, 31),
    **dict.fromkeys(("inner_step", "saved_at", "knows"), _COUNT),
    **dict.fromkeys(("samples", "unit"), _whole(0, 31)),
    "digest": _whole(-1, 32),
    "trained_at": _whole(-1, 53),
    **dict.fromkeys(("step_time_s", "sync_time_s", "round_lr", "norm", "carried"), _LENGTH),
    "compression": (lambda value: 0 < value <= 1, "must lie in (0, 1]"),
}
"""What holds for numbers of a trailer, beside their types. The loss may be anything: nothing is computed from it but a mean."""
