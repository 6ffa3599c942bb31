"""The norm guard in one region: what it reads from transfers, and what it remembers of them."""

from collections.abc import Callable, Sequence

from ..links.base import Arrival
from ..links.trailer import Trailer
from ..parts import guard as rules
from ..parts.guard import Guard, Verdict
from .fragment import FragmentState
from .transfer import Transfer


class Guarding:
    """Judges transfers, from numbers that all regions have: norms on the trailers, and norms of transfers that have landed.

    Args:
        guard: the limits; None: every region counts as it says.
        region: this region.
    """

    def __init__(self, guard: Guard | None, region: int) -> None:
        self._guard, self._region = guard, region

    def reference(self, fragment: FragmentState) -> float:
        """The norm that is ordinary for a transfer sent now; equal in all regions."""
        return 0.0 if self._guard is None else rules.reference(fragment.norms)

    def judge(self, reference: float) -> Callable[[Sequence[Trailer]], Verdict]:
        """Judges the trailers of a transfer that is sent now."""

        def verdict(trailers: Sequence[Trailer]) -> Verdict:
            said = ([getattr(each, name) for each in trailers] for name in ("norm", "weight", "carried"))
            return rules.judge(self._guard, reference, *said)

        return verdict

    def verdict(self, reference: float, arrival: Arrival) -> Verdict:
        """The verdict by which a transfer was averaged."""
        return self.judge(reference)(arrival.trailers)

    def own_fate(self, transfer: Transfer, arrival: Arrival) -> str:
        """What the guard did to this region's outer gradient: "", "clipped" or "dropped"."""
        if not transfer.is_own or self._region not in arrival.members:
            return ""
        return self.verdict(transfer.reference, arrival).fates[arrival.members.index(self._region)]

    def fresh(self, fragment: FragmentState, norm: float, landing: Arrival) -> tuple[float, float]:
        """What counts of an outer gradient of this norm that no other region judges, and the norm that it is held against.

        As for a transfer, that is the larger of two medians; here of the history, and of the regions in the transfer that lands.
        """
        ordinary = self.reference(fragment)
        if self._guard is None or not ordinary:
            return 1.0, 0.0
        limit = max(ordinary, _agreed(landing) or 0.0)
        return rules.share(self._guard, limit, norm), limit

    def remember(self, fragment: FragmentState, arrival: Arrival) -> None:
        """A transfer has landed: its norm is part of what is ordinary from now on, unless most regions stood still."""
        now = _agreed(arrival)
        if self._guard is not None and now:
            fragment.norms = [*fragment.norms, now][-self._guard.history :]


def _agreed(arrival: Arrival) -> float | None:
    norms, weights = ([getattr(each, name) for each in arrival.trailers] for name in ("norm", "weight"))
    return rules.agreed(norms, weights)
