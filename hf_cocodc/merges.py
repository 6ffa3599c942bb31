"""What becomes of the local params when new global params land."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InputError, nearest
from .sync_info import SyncInfo
from .tensors import norms


class Merge(NamedTuple):
    """How the local params take in new global params.

    Attributes:
        apply: (local, new global, snapshot, info) -> local; flat fp32 of the fragment's length. It may write to local.
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
        lambda local, new_global, snapshot, info: local.mul_(alpha).add_(new_global, alpha=1 - alpha),
        keeps_local_steps=True,
    )


COMPENSATIONS = ("adaptive", "additive", "fixed", "lr_normalized")


def compensate_delay(mode: str = "adaptive", strength: float = 0.5) -> Merge:
    """Redo the steps made in flight as if they had started from the new global params (CoCoDC, 2504.17672).

    ::

        u = (theta(send) - theta(now)) / tau ;  D = Theta - theta(send)
        theta <- Theta - tau (u + lambda u u D)          element-wise, tau = inner steps in flight; Theta where tau = 0

    The diagonal u u stands for the Hessian (DC-ASGD). Modes, which differ in lambda:

    - fixed: lambda = strength, the paper's printed form. u is in units of weights, so at usual learning rates the term is
      about 1e-7 of u and the merge is the additive one.
    - lr_normalized: with gradients g = u / eta in place of u: Theta - tau eta (g + strength g g D).
    - adaptive: lambda = strength ||u|| / ||u u D|| for each tensor, so that the term is `strength` times as long as u.
    - additive: lambda = 0; LOSCAR-SGD (2605.20866) proves that this converges.

    Differs from the paper: adaptive by default (after DC-S3GD), without its 1e-8 in the denominator, which at the scale of
    weights would switch the term off.

    Raises:
        InputError: unknown mode, negative strength.
    """
    if mode not in COMPENSATIONS:
        raise InputError(f"outer.compensation={mode!r} is not known.{nearest(mode, COMPENSATIONS)}")
    if strength < 0:
        raise InputError(
            f"outer.compensation_strength={strength} must not be negative; 0 is the additive merge."
        )

    def additive(local: Tensor, new_global: Tensor, snapshot: Tensor, info: SyncInfo) -> Tensor:
        return local.sub_(snapshot).add_(new_global) if info.staleness else new_global

    def compensated(local: Tensor, new_global: Tensor, snapshot: Tensor, info: SyncInfo) -> Tensor:
        if not info.staleness or (mode == "lr_normalized" and not info.flight_lr):
            return additive(local, new_global, snapshot, info)
        update = torch.sub(snapshot, local, out=local).div_(info.staleness)
        curvature = (new_global - snapshot).mul_(update).mul_(update)
        if mode == "fixed":
            curvature *= strength
        elif mode == "lr_normalized":
            curvature *= strength / info.flight_lr
        else:
            terms, steps = info.views(curvature), info.views(update)
            lengths = norms([*terms, *steps], info.total)
            for term, length, wanted in zip(terms, lengths, lengths[len(terms) :], strict=False):
                term *= strength * wanted / length if length else 0.0
        return torch.sub(new_global, update.add_(curvature), alpha=info.staleness, out=update)

    return Merge(additive if mode == "additive" or strength == 0 else compensated, keeps_local_steps=True)


def additive() -> Merge:
    """theta <- Theta + (theta - snapshot): the steps made in flight are added to the new global params."""
    return compensate_delay("additive")
