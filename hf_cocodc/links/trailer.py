"""What a region tells the others with every transfer."""

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple


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
        loss: last training loss; NaN if unknown.
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
        admits: ticket of a region that may come in after this transfer; 0 if there is none (`Link.admits`).
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
    admits: int = 0

    @property
    def word(self) -> Word:
        """The part that comes from the region's training loop."""
        return Word(self.loss, self.ending, self.saved_at)
