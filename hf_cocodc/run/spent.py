"""How long something beside the inner steps holds training, for the journal."""

from typing import Protocol

from ..engine.synchronizer import Synchronizer
from ..link.base import Link


class Trains(Protocol):
    """An outer optimizer, as far as seconds are counted."""

    link: Link
    synchronizer: Synchronizer


class Spent:
    """Counts seconds, from the moment when it is made."""

    def __init__(self, outer: Trains) -> None:
        self._outer = outer
        self._began, self._blocked = outer.link.clock(), outer.synchronizer.totals.blocked_s

    @property
    def facts(self) -> dict[str, float]:
        """Seconds until now, and those of them in which training waited for the link: `took_s` and `blocked_s` of an event."""
        took, blocked = self._outer.link.clock() - self._began, self._outer.synchronizer.totals.blocked_s
        return {"took_s": round(took, 6), "blocked_s": round(blocked - self._blocked, 6)}
