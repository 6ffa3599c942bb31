"""What those links have in common that reach other regions from their own process."""

import time
from collections.abc import Callable

from torch import Tensor

from ..meeting.presence import Presence
from ..meeting.stopping import StopAgreement
from ..tensors.pools import Pool
from .base import Link, T
from .calls import MeanMemory


class DirectLink:
    """Part of a link: see `Link` for its methods.

    Args:
        region: this region.
        presence: shows other regions that this one is alive. A link may replace it.
        pin_memory: whether to keep means in pinned memory, from which a GPU copies faster.
    """

    lane, num_lanes = 0, 1
    replicas = False
    timing = "measured"

    def __init__(self, region: int, presence: Presence, pin_memory: bool) -> None:
        self.region = region
        self.agreement: StopAgreement | None = None
        self._presence = presence
        self._memory = MeanMemory(pin_memory)
        self._broadcast_bytes = 0

    @property
    def awaits(self) -> int | None:
        return self._presence.awaits

    def bring_to(self, home: Pool) -> None:
        self._memory.bring_to(home)

    def give(self, mean: Tensor) -> None:
        self._memory.give(mean)

    def total(self, values: Tensor) -> Tensor:
        return values

    def clock(self) -> float:
        return time.perf_counter()

    def count_broadcasts(self) -> int:
        counted, self._broadcast_bytes = self._broadcast_bytes, 0
        return counted

    def lead(self, call: Callable[[Link], T], what: str) -> T:
        return call(self)  # type: ignore[arg-type]  # the rest of the link is in the class that has this part

    def leave_note(self, reason: str) -> None:
        self._presence.leave_note(reason)

    def note_of(self, region: int, wait_s: float = 0.0) -> str | None:
        return self._presence.note_of(region, wait_s)
