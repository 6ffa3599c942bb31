"""How much regions count in a mean: their shares, and what the norm guard makes of them and remembers."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import InputError
from ..link.base import Arrival
from ..link.records import Trailer
from ..parts import guard as rules
from ..parts.guard import Guard, Ordinary, Said, Verdict
from .fragment import FragmentState, Trained, Transfer

TOKENS = 2**40
"""So many tokens since a send are a share of 1. A power of two keeps shares, and their ratios, exact."""


def unknown_tokens() -> InputError:
    """The error where shares follow tokens of which nobody has told the number."""
    return InputError(
        "outer.weights=tokens weighs regions by the tokens that they train on, but nobody has said how many an inner "
        "step had. Give them with every step (outer.step(loss, tokens=...)), or set outer.weights=steps or equal."
    )


class Shares:
    """Counts what this region has `trained`, and computes its shares (`outer.weights`).

    A mean divides by the sum of all shares: only their ratios matter. A region whose outer gradient carries no step has none.

    - equal: 1. If regions may come in during the run (`is_elastic`), one that has not trained all steps since a fragment's last
      send counts less, as with `steps`: in its first round it has made fewer steps than the others.
    - steps: inner steps trained since the fragment's last send / steps that were due.
    - tokens: tokens trained since the fragment's last send / `TOKENS`.
    """

    def __init__(self, rule: str, is_elastic: bool) -> None:
        self._rule, self._is_elastic = rule, is_elastic
        self.trained = Trained()

    def count(self, tokens: int | None) -> None:
        """Count an inner step on so many tokens (None: unknown). Raises InputError if shares follow tokens that are unknown."""
        if tokens is None and self._rule == "tokens":
            raise unknown_tokens()
        steps, sum_so_far = self.trained
        self.trained = Trained(steps + 1, sum_so_far + (tokens or 0))

    def share(self, since: Trained, due: int) -> float:
        """This region's share in a mean, from 0 to 1.

        `since`: what had been trained at the last send whose steps are not carried again. `due`: steps since the last send.
        """
        steps, tokens = self.trained.steps - since.steps, self.trained.tokens - since.tokens
        if steps <= 0:
            return 0.0
        if self._rule == "tokens":
            return min(tokens / TOKENS, 1.0)
        if self._rule == "equal" and not self._is_elastic:
            return 1.0
        return min(steps / max(due, 1), 1.0)


class Guarding:
    """Judges transfers by their trailers and those of landed ones. Without a guard, every region counts as it says."""

    def __init__(self, guard: Guard | None, region: int) -> None:
        self._guard, self._region = guard, region

    def ordinary(self, fragment: FragmentState) -> Ordinary:
        """What is ordinary for a transfer sent now; equal in all regions."""
        return Ordinary() if self._guard is None else rules.ordinary(fragment.norms, fragment.paces)

    def judge(self, ordinary: Ordinary) -> Callable[[Sequence[Trailer]], Verdict]:
        """A function that judges the trailers of a transfer that is sent now."""
        return lambda trailers: rules.judge(self._guard, ordinary, _said(trailers))

    def own_fate(self, transfer: Transfer, arrival: Arrival) -> str:
        """What the guard did to this region's outer gradient: "", "clipped", "dropped" or "void"."""
        if not transfer.is_own or self._region not in arrival.members:
            return ""
        return arrival.verdict.fates[arrival.members.index(self._region)]

    def limit_of_fresh(self, fragment: FragmentState, rate: float, arrival: Arrival) -> float:
        """The ordinary norm for an outer gradient that no other region judges; 0 if there is none.

        As for a transfer, that norm is the larger of two: by the history, and of the regions in the transfer that lands. Those
        are one round older: if the learning rate has grown since, so may the norm.
        """
        verdict = arrival.verdict
        rates = [each.round_lr for each in arrival.trailers if each.round_lr]
        grown = max(rate / min(rates), 1.0) if rates else 1.0
        limit = max(self.ordinary(fragment).at(rate), verdict.limit * grown)
        return 0.0 if self._guard is None or verdict.outside else limit

    def share_of_fresh(self, limit: float, square: Tensor) -> Tensor | float:
        """How much of an outer gradient with this sum of squares counts (`parts.guard.share`): a scalar on its device."""
        if self._guard is None or not limit:
            return 1.0
        norm, clip = square.sqrt(), self._guard.clip * limit
        clipped = torch.where(norm <= self._guard.drop * limit, clip / norm, 0.0)
        return torch.where(norm <= clip, 1.0, clipped)

    def is_clipped(self, limit: float, norm: float) -> bool:
        """Whether a fresh outer gradient of this norm has counted less."""
        return bool(self._guard and limit and rules.share(self._guard, limit, norm) < 1)

    def remember(self, fragment: FragmentState, arrival: Arrival) -> None:
        """Let a transfer that has landed be part of what is ordinary, unless it was out of the ordinary itself."""
        trailers, verdict = arrival.trailers, arrival.verdict
        counted = [each for each in trailers if each.weight]
        trained = [each for each in trailers if each.weight or each.trained_at == each.inner_step]
        # where every region that has trained is excluded, nothing lands either
        is_void = not arrival.is_finite or (bool(trained) and not counted)
        fragment.voids = fragment.voids + 1 if is_void else 0
        if self._guard is None:
            return
        fates = zip(arrival.members, verdict.fates, strict=False)
        fragment.far_regions = tuple(region for region, fate in fates if fate)
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
