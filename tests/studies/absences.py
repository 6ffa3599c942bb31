"""Regions that are lost and come back, drawn by the seed of a run."""

from __future__ import annotations

import random
from typing import Any


class Absences:
    """When each region trains.

    In each round, a region that is there is lost with probability `rate`, at a random inner step of the round: what it has
    trained since the last landing is lost with it. It comes back at a random inner step, `rounds[0]` to `rounds[1]` rounds
    later, with the global params of the last landing and a fresh inner optimizer. A loss that would leave fewer than `least`
    regions in a round does not happen. `late` regions, those with the highest numbers, first come in `late_rounds` rounds
    after the start.

    Args:
        given: the keys above; missing ones have these defaults.
        regions: M.
        steps: inner steps of the run.
        sync_interval: H.
        seed: of the run.
    """

    DEFAULTS: dict[str, Any] = {"rate": 0.0, "rounds": [1, 3], "least": 1, "late": 0, "late_rounds": 0}

    def __init__(
        self, given: dict[str, Any], regions: int, steps: int, sync_interval: int, seed: int
    ) -> None:
        if unknown := given.keys() - self.DEFAULTS.keys():
            raise ValueError(
                f"study.absences: {', '.join(unknown)} is not known. Known: {', '.join(self.DEFAULTS)}."
            )
        told = {**self.DEFAULTS, **given}
        generator = random.Random(f"absences {seed}")
        self._steps = steps
        self._away: list[set[int]] = [set() for _ in range(regions)]
        for region in range(regions - told["late"], regions):
            first = told["late_rounds"] * sync_interval + generator.randrange(sync_interval)
            self._away[region].update(range(1, min(first, steps) + 1))
        for start in range(0, steps, sync_interval):
            for region in generator.sample(range(regions), regions):
                lost, at = generator.random() < told["rate"], start + 1 + generator.randrange(sync_interval)
                back = (
                    at
                    + generator.randint(*told["rounds"]) * sync_interval
                    + generator.randrange(sync_interval)
                )
                others = [other for other in range(regions) if other != region]
                here = [other for other in others if not self._away[other] & set(range(at, back))]
                if lost and at not in self._away[region] and len(here) >= told["least"]:
                    self._away[region].update(range(at, min(back, steps + 1)))

    def here(self, region: int, step: int) -> bool:
        """Whether a region trains in an inner step, counted from 1."""
        return step not in self._away[region]

    @property
    def trained(self) -> float:
        """The share of all inner steps of all regions that are trained."""
        return 1 - sum(map(len, self._away)) / (len(self._away) * self._steps)
