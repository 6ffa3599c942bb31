"""One transfer in flight."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..errors import InputError
from ..link.base import Handle
from ..parts.guard import Ordinary, Verdict
from .compatibility import sound_counts

TOKENS = 2**40
"""So many tokens since a send are a share of 1. A power of two keeps shares, and their ratios, exact."""


class Trained(NamedTuple):
    """Inner steps and tokens that a region has trained since it started."""

    steps: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, counts: Sequence[int]) -> "Trained":
        """From a checkpoint. Raises TypeError or ValueError if these are no such counts."""
        sound_counts(counts, 1)
        return cls(*counts)


@dataclass
class Transfer:
    """An outer gradient on its way: one object from the send to the landing.

    Attributes:
        snapshot: local params at the send, flat.
        global_params: global params at the send, flat; shared with the fragment and with other transfers.
        lr_sum: sum of inner learning rates up to the send.
        outer_grad: this region's outer gradient, flat; zero if it does not count.
        square: sum of its squares over all its lanes, an fp64 scalar on the device; None for a transfer that was loaded.
        is_own: whether this region takes part in it; not if it was coming in at the send, or has the transfer from another one.
        taken: share with which a landing has taken in `outer_grad` before (eager updates); None if none has.
        judged: the ordinary norm that it was held against when it was taken in; 0 if it was not.
        norm: of this region's outer gradient; 0 if it has no weight. Known once the transfer has begun.
        ordinary: what was ordinary at the send (`parts.guard`).
        is_finite: whether this region's outer gradient was finite; known as `norm` is.
        trained: what this region had trained at the send before, so that later steps are carried; nothing if unknown.
        verdict: by which it was averaged; None until somebody has asked for it.
        handle: waits for the mean; set at the send.
    """

    sent_at: int
    snapshot: Tensor
    global_params: Tensor
    lr_sum: float
    outer_grad: Tensor | None = None
    square: Tensor | None = None
    is_own: bool = True
    taken: Tensor | float | None = None
    judged: float = 0.0
    norm: float = 0.0
    ordinary: Ordinary = Ordinary()
    is_finite: bool = True
    trained: Trained = Trained()
    verdict: Verdict | None = None
    handle: Handle = field(init=False)


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
