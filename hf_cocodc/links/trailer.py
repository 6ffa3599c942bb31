"""What a region tells the others with every transfer."""

import logging
import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from ..errors import RegionLostError

logger = logging.getLogger(__name__)


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

    Attributes:
        loss: last training loss; NaN if unknown, infinite if it is not a number.
        ending: what the region says about its own end.
        saved_at: inner step of the region's newest complete checkpoint; 0 if there is none.
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
        step_time_s: seconds of an inner step in this region, without time blocked on the link; 0 if unknown.
        sync_time_s: seconds that this region's last transfer took; 0 if unknown.
        loss: see `Word`.
        digest: checksum of the fragment's global params before the transfer; -1 if it was not computed.
        compression: share of its full rank that the codec uses for the fragment.
        ending: see `Word`.
        saved_at: see `Word`.
        round_lr: mean inner learning rate of the region's steps since the fragment's last send.
        layout: checksum of the names and shapes of the parameters that the region wants to synchronise; -1 if unknown.
        knows: number of the newest change of the members that the region knows (`Link.knows`).
        norm: of the region's outer gradient, over all its lanes; 0 if the weight is 0.
        carried: norm of what the codec adds to it from earlier transfers, likewise; 0 if it remembers no error.
        is_bounded: whether the region's inner optimizer bounds a step, so that norms of regions can be compared.
        trained_at: last inner step that the region has trained; -1 if unknown.
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
    layout: int = -1
    knows: int = 0
    norm: float = 0.0
    carried: float = 0.0
    is_bounded: bool = True
    trained_at: int = -1

    @property
    def word(self) -> Word:
        """The part that comes from the region's training loop."""
        return Word(self.loss, self.ending, self.saved_at)


def checked(trailer: Trailer, region: int) -> Trailer:
    """The trailer that `region` has sent, once no number in it can do harm. Equal rows give equal results in all regions.

    A weight outside [0, 1] is brought into it; one that is not a number counts as 0.

    Raises:
        RegionLostError: another number is one that no region sends.
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
    **dict.fromkeys(("digest", "layout"), _whole(-1, 32)),
    "trained_at": _whole(-1, 53),
    **dict.fromkeys(("step_time_s", "sync_time_s", "round_lr", "norm", "carried"), _LENGTH),
    "compression": (lambda value: 0 < value <= 1, "must lie in (0, 1]"),
}
"""What holds for numbers of a trailer, beside their types. The loss may be anything: nothing is computed from it but a mean."""
