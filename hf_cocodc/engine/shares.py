"""What a region has trained, and how much its outer gradients count in the means."""

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InputError
from .compatibility import sound_counts

TOKENS = 2**40
"""As many tokens since a send are a share of 1. A power of two: shares are exact, and so are their ratios."""


class Trained(NamedTuple):
    """Inner steps and tokens that a region has trained since it started."""

    steps: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Trained":
        """What a checkpoint holds of it. Raises TypeError or ValueError if these are no such counts."""
        sound_counts(counts, 1)
        return cls(*counts)


class Shares:
    """Counts what this region trains, and finds its shares (`outer.weights`).

    A mean divides by the sum of all shares: only their ratios matter. A region whose outer gradient carries no step has none.

    - equal: 1. If regions may come in during the run (`is_elastic`), one that has not trained all steps since a fragment's last
      send counts less, as with `steps`: in its first round it has made fewer steps than the others.
    - steps: inner steps trained since the fragment's last send / steps that were due.
    - tokens: tokens trained since the fragment's last send / `TOKENS`.

    Args:
        rule: equal, steps or tokens.
        is_elastic: whether regions may come in during the run.

    Attributes:
        trained: what this region has trained so far.
    """

    def __init__(self, rule: str, is_elastic: bool) -> None:
        self._rule, self._is_elastic = rule, is_elastic
        self.trained = Trained()

    def count(self, tokens: int | None) -> None:
        """One more inner step was trained, on so many tokens; None if that is unknown.

        Raises:
            InputError: shares follow the tokens, and they are unknown.
        """
        if tokens is None and self._rule == "tokens":
            raise InputError(
                "outer.weights=tokens weighs regions by the tokens that they train on, but nobody has said how many an inner "
                "step had. Give them with every step (outer.step(loss, tokens=...)), or set outer.weights=steps or equal."
            )
        steps, sum_so_far = self.trained
        self.trained = Trained(steps + 1, sum_so_far + (tokens or 0))

    def share(self, since: Trained, due: int) -> float:
        """This region's share in a mean, from 0 to 1.

        Args:
            since: what had been trained at the last send whose steps are not carried again.
            due: inner steps since the fragment's last send.
        """
        steps, tokens = self.trained.steps - since.steps, self.trained.tokens - since.tokens
        if steps <= 0:
            return 0.0
        if self._rule == "tokens":
            return min(tokens / TOKENS, 1.0)
        if self._rule == "equal" and not self._is_elastic:
            return 1.0
        return min(steps / max(due, 1), 1.0)
