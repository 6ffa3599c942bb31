"""What becomes of the local params when new global params land."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .errors import InputError
from .sync_info import SyncInfo


class Merge(NamedTuple):
    """How the local params take in new global params.

    Attributes:
        apply: (local, new global, snapshot, info) -> local; flat fp32 of the fragment's length, inputs not written to.
        keeps_local_steps: whether inner steps made since the send live on in the result, so that a run that ends after
            the landing still has to send them.
    """

    apply: Callable[[Tensor, Tensor, Tensor, SyncInfo], Tensor]
    keeps_local_steps: bool


def replace() -> Merge:
    """theta <- Theta (DiLoCo, 2311.08105)."""
    return Merge(lambda local, new_global, snapshot, info: new_global, keeps_local_steps=False)


def mix(alpha: float) -> Merge:
    """theta <- alpha theta + (1 - alpha) Theta (Streaming DiLoCo, 2501.18512).

    Args:
        alpha: weight of the local params: 1 is no communication, 0 throws away the steps made during the transfer.

    Raises:
        InputError: alpha outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise InputError(
            f"mixing_alpha={alpha} is a weight and must lie in [0, 1]: 0 takes the global params, 1 the local."
        )
    if alpha == 0:
        return replace()
    if alpha == 1:  # not through the formula: 0 * Theta is not 0 where Theta is infinite
        return Merge(lambda local, new_global, snapshot, info: local, keeps_local_steps=True)
    return Merge(
        lambda local, new_global, snapshot, info: local * alpha + new_global * (1 - alpha),
        keeps_local_steps=True,
    )
