"""Times, learning rates and changes that this region measures, and the values of them that all regions agree on."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from ..links.base import Arrival
from ..parts.schedules import AgreedStats
from .compatibility import sound_numbers

_STEPS_TIMED = 255
"""Number of inner steps before an event whose times count."""
_SAVED = ("lr", "lr_sum", "step_time_s", "sync_time_s", "change")


class Measurements:
    """What one region measures while it trains.

    Args:
        now: seconds, by the link's clock.

    Attributes:
        lr: learning rate of the last inner step.
        lr_sum: sum of learning rates of all inner steps.
        step_time_s: median seconds of the inner steps before the last event, without time at events; 0 if unknown.
        sync_time_s: seconds from the last region's send to the end of the outer step, for the last transfer; 0 if unknown.
        change: for each fragment ||mean outer gradient||_2 / its length, at its last landing.
        agreed: measurements from the trailers of landed transfers, equal in all regions.
    """

    def __init__(self, now: float) -> None:
        self.lr = self.lr_sum = 0.0
        self.step_time_s = self.sync_time_s = 0.0
        self.agreed = AgreedStats()
        self.begin(())
        self._left_at = now
        self._durations: deque[float] = deque(maxlen=_STEPS_TIMED)

    def begin(self, lengths: Sequence[float]) -> None:
        """From now on there are fragments with these numbers of values, over all lanes of the region; none has landed yet."""
        self._lengths = lengths
        self.change = [0.0] * len(lengths)
        self.agreed = self.agreed._replace(change=(), compression=1.0)

    def note_step(self, inner_lr: float, now: float) -> None:
        """An inner step with this learning rate has ended."""
        self._durations.append(now - self._left_at)
        self._left_at = now
        self.lr = inner_lr
        self.lr_sum += inner_lr

    def mean_lr(self, lr_sum: float, steps: int) -> float:
        """Mean learning rate of the last `steps` inner steps, before which the sum was `lr_sum`."""
        return (self.lr_sum - lr_sum) / max(steps, 1)

    def note_event(self) -> None:
        """A transfer is about to be sent or landed."""
        # not the mean: one evaluation among the steps must not count
        self.step_time_s = median(self._durations)
        self._durations.clear()

    def leave_events(self, now: float) -> None:
        """From now on, time counts as training again."""
        self._left_at = now

    def hear(self, fragment: int, arrival: Arrival, outer_step_s: float) -> None:
        """Take in the measurements of a transfer: those of this region, and those of all regions from the trailers."""
        # a link without time of its own (lockstep) measures nothing; schedules must not follow this machine's speed there
        self.sync_time_s = arrival.seconds and arrival.seconds + outer_step_s
        if arrival.is_finite:
            self.change[fragment] = math.sqrt(arrival.square) / self._lengths[fragment]
        self.agreed = AgreedStats(
            step_time_s=max(trailer.step_time_s for trailer in arrival.trailers),
            sync_time_s=max(trailer.sync_time_s for trailer in arrival.trailers),
            change=tuple(self.change),
            compression=arrival.trailers[0].compression,
        )

    def correct(self, fragment: int, change: float) -> None:
        """Take another region's change of a fragment, where regions have come apart."""
        self.change[fragment] = change
        self.agreed = self.agreed._replace(change=tuple(self.change))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, under the names in checkpoints."""
        return {name: getattr(self, name) for name in _SAVED} | {"stats": self.agreed._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: nobody has saved it.
        """
        change = state["change"]
        stats = AgreedStats(**state["stats"] | {"change": tuple(state["stats"]["change"])})
        sound_numbers(state["lr"], state["lr_sum"], signed=True)
        sound_numbers(*change, state["step_time_s"], state["sync_time_s"])
        sound_numbers(*stats.change, stats.step_time_s, stats.sync_time_s, stats.compression)
        if len(change) != len(self._lengths) or len(stats.change) not in (0, len(change)):
            raise ValueError(f"it has changes of {len(change)} fragments, and there are {len(self._lengths)}")
        for name in _SAVED:
            setattr(self, name, list(map(float, change)) if name == "change" else float(state[name]))
        self.agreed = stats
