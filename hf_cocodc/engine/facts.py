"""What the rest of a region asks of its engine beside the weights; known in all ranks, also in those that have no engine."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..parts.guard import lower_median
from .fragment import FragmentState


class FragmentFacts(NamedTuple):
    """A fragment after the last events. JSON keeps it.

    Attributes:
        in_flight_since: inner step at which the oldest transfer in flight was sent; None if there is none.
        ordinary_loss: the median of its `losses`; NaN if there are none.

    The others are those of `FragmentState`.
    """

    numel: int
    sent_at: int
    in_flight_since: int | None
    nonfinite_rounds: int
    voids: int
    far_losses: int
    ordinary_loss: float
    far_regions: Sequence[int]

    @classmethod
    def of(cls, fragment: FragmentState) -> "FragmentFacts":
        return cls(
            numel=fragment.fragment.numel,
            sent_at=fragment.sent_at,
            in_flight_since=fragment.in_flight[0].sent_at if fragment.in_flight else None,
            nonfinite_rounds=fragment.nonfinite_rounds,
            voids=fragment.voids,
            far_losses=fragment.far_losses,
            ordinary_loss=lower_median(fragment.losses) if fragment.losses else math.nan,
            far_regions=list(fragment.far_regions),
        )
