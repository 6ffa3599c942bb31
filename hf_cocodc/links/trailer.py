"""What regions tell each other with every transfer."""

from enum import IntEnum
from typing import NamedTuple


class Ending(IntEnum):
    """A region's word on its own end; rides on every transfer."""

    NO = 0
    """It trains on."""
    DONE = 1
    """It has come to the end of its training: early stopping, or its data ran out."""
    INTERRUPTED = 2
    """It has to leave, by a signal or an error."""


class Trailer(NamedTuple):
    """Numbers that ride on every transfer, so that nobody waits for them on their own.

    Attributes:
        weight: share in the mean; 0 where this region's outer gradient is not finite and sits the transfer out.
        fragment: index of the fragment, to notice regions that are out of step.
        inner_step: inner step after which the transfer left.
        step_time_s: seconds of an inner step here, time blocked on the link left out; 0 if unknown.
        sync_time_s: seconds that the last transfer took here; 0 if unknown.
        loss: the region's last training loss; NaN if unknown.
        digest: checksum of the fragment's global params before the transfer; -1 where it was not taken.
        compression: share of its full rank that the codec uses for the fragment.
        ending: the region's word on its own end; see `agreement.Ending`.
        saved_at: step of the region's newest complete checkpoint; 0 if none.
        round_lr: mean inner learning rate of the region's steps since the fragment's last send.
    """

    weight: float = 1.0
    fragment: float = -1.0
    inner_step: float = 0.0
    step_time_s: float = 0.0
    sync_time_s: float = 0.0
    loss: float = float("nan")
    digest: float = -1.0
    compression: float = 1.0
    ending: float = 0.0
    saved_at: float = 0.0
    round_lr: float = 0.0
