"""Regions of different speed: how long an inner step takes, and what dealing the global batch would bring."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import InputError
from ...parts.deal import Pace, coarse, deal_of, ideal_time_s, step_time_s
from ...run.figures import shares
from ...settings.recipe import Recipe


class Paces(NamedTuple):
    """The regions of a plan, by their own settings.

    Attributes:
        own: what each would say of its inner steps, in micro-batches.
        tokens: of a micro-batch.
        is_auto: whether they share the global batch (`regions.balance`).
    """

    own: Mapping[int, Pace]
    tokens: int
    is_auto: bool

    @property
    def equal(self) -> dict[int, int]:
        """Micro-batches of the regions in an inner step, with equal batches."""
        return {region: pace.samples for region, pace in self.own.items()}

    @property
    def dealt(self) -> dict[int, int]:
        """The same, once they are dealt by these speeds."""
        return deal_of(sum(self.equal.values()), self.own, self.equal)

    @property
    def step_s(self) -> float:
        """Seconds of an inner step: that of the slowest region."""
        return step_time_s(self.dealt if self.is_auto else self.equal, self.own)

    def in_words(self) -> list[str]:
        """What regions get done together, with equal batches and with dealt ones; nothing if all are equally fast."""
        speeds = [pace.speed for pace in self.own.values()]
        if max(speeds) <= min(speeds) * (1 + 1e-9):
            hint = "speeds: regions.balance=auto deals the global batch by speed, and here all regions are equally fast. Name "
            return (
                [f"{hint}their speeds to forecast a deal, for example --speeds 3,1."] if self.is_auto else []
            )
        equal, dealt = self.equal, self.dealt
        rates = [sum(each.values()) / step_time_s(each, self.own) for each in (equal, dealt)]
        ideal = 1 / ideal_time_s(1, self.own)
        tokens = [f"{self._rate(rate)} ({rate / ideal:.0%} of the sum)" for rate in rates]
        kind = "dealt" if self.is_auto else "equal"
        words = (
            f"speeds: the sum of the regions' speeds is {self._rate(ideal)}. With equal batches they make {tokens[0]}; with "
            f"regions.balance=auto {tokens[1]}, {rates[1] / rates[0]:.2f} times as many. Then, of {sum(dealt.values())} "
            f"micro-batches of an inner step, {shares(dealt)}. Table and forecast are with {kind} batches: an inner step "
            f"takes {self.step_s:.4g} s. Waits for the link come on top."
        )
        advice = coarse(dealt, self.own)
        return [words, *([advice] if advice else [])]

    def _rate(self, micro_batches: float) -> str:
        tokens = self.tokens * micro_batches
        return f"{tokens:{',.0f' if tokens >= 100 else '.3g'}} tokens a second"


def paces_of(recipe: Recipe, regions: int, speeds: Sequence[float], step_s: float, gpus: int) -> Paces:
    """The paces of so many regions; an inner step of a region at speed 1, as are those without a speed, takes `step_s`.

    Raises InputError if the recipe has no batch.
    """
    counts = []
    for name, usual in (("gradient_accumulation_steps", 1), ("per_device_train_batch_size", 8)):
        counts.append(recipe.training.get(name, usual))
        if counts[-1] < 1:
            raise InputError(f"training.{name}={counts[-1]} must be at least 1.")
    all_speeds = [*speeds, *[1.0] * (regions - len(speeds))]
    own = {region: Pace(step_s / speed, counts[0], 1) for region, speed in enumerate(all_speeds)}
    return Paces(own, gpus * counts[1] * recipe.data.block_size, recipe.regions.balance == "auto")
