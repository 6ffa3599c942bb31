"""What becomes of the local params when new global params land."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, nearest
from .info import Piece, SyncInfo


class Merge(NamedTuple):
    """How the local params take in new global params, piece by piece.

    Attributes:
        apply: (piece, info) -> local params of the piece, element by element; it may write to `local`, `snapshot` and
            `room`.
        keeps_local_steps: whether inner steps made since the send live on in the result, so that a run that ends after
            the landing still has to send them.
        reads_local: whether the result depends on the local params; where not, it is the new global ones.
        measure: (piece, info) -> two tensors, written over `snapshot` and `room` of the piece. Called for all pieces
            before `apply`, which finds them there again (but what was in `local` no more), and in `Piece.norms` their
            norms, parameter by parameter. None where it needs none.
    """

    apply: Callable[[Piece, SyncInfo], Tensor]
    keeps_local_steps: bool
    reads_local: bool = True
    measure: Callable[[Piece, SyncInfo], tuple[Tensor, Tensor]] | None = None


def replace() -> Merge:
    """theta <- Theta (DiLoCo, 2311.08105)."""
    return Merge(lambda piece, info: piece.new_global, keeps_local_steps=False, reads_local=False)


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
        return Merge(lambda piece, info: piece.local, keeps_local_steps=True)
    return Merge(
        lambda piece, info: piece.local.mul_(alpha).add_(piece.new_global, alpha=1 - alpha),
        keeps_local_steps=True,
    )


_LONGEST = 10.0
"""Mean of lambda u u above which D cannot be more than noise; in training it is 0.003 to 3."""
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
    - adaptive: lambda = strength ||u|| / ||u u D|| for each tensor, so that the term is `strength` times as long as u; but
      lambda u u, a Hessian's diagonal times a step, is 10 on average at most: where D is nothing but rounding errors, they
      would be blown up to the length of u.
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

    def additive(piece: Piece, info: SyncInfo) -> Tensor:
        return piece.local.sub_(piece.snapshot).add_(piece.new_global) if info.staleness else piece.new_global

    def terms(piece: Piece, info: SyncInfo) -> tuple[Tensor, Tensor]:
        """u and u u D."""
        curvature = torch.sub(piece.new_global, piece.snapshot, out=piece.room)
        update = torch.sub(piece.snapshot, piece.local, out=piece.snapshot).div_(max(info.staleness, 1))
        return update, curvature.mul_(update).mul_(update)

    def joined(update: Tensor, curvature: Tensor, piece: Piece, info: SyncInfo) -> Tensor:
        return torch.sub(piece.new_global, update.add_(curvature), alpha=info.staleness, out=piece.local)

    def scaled(piece: Piece, info: SyncInfo) -> Tensor:
        factor = strength if mode == "fixed" else strength / info.flight_lr if info.flight_lr else 0.0
        if not info.staleness or not factor:
            return additive(piece, info)
        update, curvature = terms(piece, info)
        return joined(update, curvature.mul_(factor), piece, info)

    def adapted(piece: Piece, info: SyncInfo) -> Tensor:
        if not info.staleness:
            return piece.new_global
        update, curvature = piece.snapshot, piece.room
        measured = zip(curvature.split_with_sizes(piece.sizes), piece.norms, piece.numels, strict=True)
        for term, (wanted, length), numel in measured:
            term *= min(strength * wanted / length, _LONGEST * numel / wanted**2) if length else 0.0
        return joined(update, curvature, piece, info)

    if mode == "additive" or strength == 0:
        return Merge(additive, keeps_local_steps=True)
    if mode == "adaptive":
        return Merge(adapted, keeps_local_steps=True, measure=terms)
    return Merge(scaled, keeps_local_steps=True)


def additive() -> Merge:
    """theta <- Theta + (theta - snapshot): the steps made in flight are added to the new global params."""
    return compensate_delay("additive")
