"""The norm guard in one region: what it reads from transfers, and what it remembers of them."""

import math
from collections.abc import Callable, Sequence

from ..links.base import Arrival
from ..links.trailer import Trailer
from ..parts import guard as rules
from ..parts.guard import Guard, Ordinary, Said, Verdict
from .fragment import FragmentState
from .transfer import Transfer


class Guarding:
    """Judges transfers, from numbers that all regions have: what trailers say, and what transfers said that have landed.

    Args:
        guard: the limits; None: every region counts as it says.
        region: this region.
    """

    def __init__(self, guard: Guard | None, region: int) -> None:
        self._guard, self._region = guard, region

    def ordinary(self, fragment: FragmentState) -> Ordinary:
        """What is ordinary for a transfer sent now; equal in all regions."""
        return Ordinary() if self._guard is None else rules.ordinary(fragment.norms, fragment.paces)

    def judge(self, ordinary: Ordinary) -> Callable[[Sequence[Trailer]], Verdict]:
        """Judges the trailers of a transfer that is sent now."""
        return lambda trailers: rules.judge(self._guard, ordinary, _said(trailers))

    def verdict(self, ordinary: Ordinary, arrival: Arrival) -> Verdict:
        """The verdict by which a transfer was averaged."""
        return self.judge(ordinary)(arrival.trailers)

    def own_fate(self, transfer: Transfer, arrival: Arrival) -> str:
        """What the guard did to this region's outer gradient: "", "clipped", "dropped" or "void"."""
        if not transfer.is_own or self._region not in arrival.members:
            return ""
        return self.verdict(transfer.ordinary, arrival).fates[arrival.members.index(self._region)]

    def fresh(
        self, fragment: FragmentState, norm: float, rate: float, landing: Transfer, arrival: Arrival
    ) -> tuple[float, float]:
        """What counts of an outer gradient of this norm that no other region judges, and the norm that it is held against.

        As for a transfer, that is the larger one of two: by the history, and of the regions in the transfer that lands. Those are
        one round older: if the learning rate has grown since, so may the norm.
        """
        verdict = self.verdict(landing.ordinary, arrival)
        rates = [each.round_lr for each in arrival.trailers if each.round_lr]
        grown = max(rate / min(rates), 1.0) if rates else 1.0
        limit = max(self.ordinary(fragment).at(rate), verdict.limit * grown)
        if self._guard is None or not limit or verdict.outside:
            return 1.0, 0.0
        return rules.share(self._guard, limit, norm), limit

    def remember(self, fragment: FragmentState, transfer: Transfer, arrival: Arrival) -> None:
        """A transfer has landed: it is part of what is ordinary from now on, unless it was out of the ordinary itself."""
        trailers = arrival.trailers
        counted = [each for each in trailers if each.weight]
        trained = [each for each in trailers if each.weight or each.trained_at == each.inner_step]
        # where every region that has trained is excluded, nothing lands either
        is_void = not arrival.is_finite or (bool(trained) and not counted)
        fragment.voids = fragment.voids + 1 if is_void else 0
        if self._guard is None:
            return
        verdict = self.verdict(transfer.ordinary, arrival)
        told = zip(arrival.members, verdict.fates, strict=False)
        fragment.far_regions = tuple(region for region, fate in told if fate)
        known = [each.loss for each in counted if not math.isnan(each.loss)]
        if known:
            loss = rules.lower_median(known)
            is_far = rules.is_far(loss, fragment.losses)
            fragment.far_losses = fragment.far_losses + 1 if is_far else 0
            if math.isfinite(loss) and not (is_far or is_void or any(verdict.fates)):
                fragment.losses = self._kept(fragment.losses, loss)
        if is_void or verdict.outside:
            return
        now = rules.agreed(_said(trailers), verdict, self._guard)
        if now is None or not now[0]:
            return
        norm, rate = now
        fragment.norms = self._kept(fragment.norms, norm)
        if rate:
            fragment.paces = self._kept(fragment.paces, norm / rate)

    def _kept(self, values: Sequence[float], value: float) -> list[float]:
        assert self._guard is not None
        return [*values, value][-self._guard.history :]


def _said(trailers: Sequence[Trailer]) -> list[Said]:
    return [Said(each.norm, each.weight, each.round_lr, each.carried, each.is_bounded) for each in trailers]
