"""How the local params take in new global params when a transfer lands."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from . import demands
from .info import MergeInfo, Piece

_MAX_CURVATURE = 10.0
"""Upper bound for the mean of lambda u u. Above it, D can only be noise; in training the mean is 0.003 to 3."""


class Merge(NamedTuple):
    """Computes the new local params from the new global params, piece by piece.

    Attributes:
        apply: (piece, info) -> new local params of the piece, element by element. May write to `local`, `snapshot` and `room`.
        keeps_local_steps: whether the result contains the inner steps made since the send, so that a run that ends after the
            landing must still send them.
        reads_local: whether the result depends on the local params. If not, the result is the new global params.
        measure: (piece, info) -> two tensors, stored in `snapshot` and `room` of the piece. The engine calls it for all pieces
            before the first `apply`, which finds the two tensors there, and their norms for each parameter in `Piece.norms`;
            the content of `local` is undefined by then. None if `apply` needs no norms.
        reads_lr: whether the result depends on `MergeInfo.flight_lr`.
    """

    apply: Callable[[Piece, MergeInfo], Tensor]
    keeps_local_steps: bool
    reads_local: bool = True
    measure: Callable[[Piece, MergeInfo], tuple[Tensor, Tensor]] | None = None
    reads_lr: bool = False


def replace() -> Merge:
    """theta <- Theta (DiLoCo, 2311.08105).

    >>> piece = Piece(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1), [1])
    >>> replace().apply(piece, None)
    tensor([3.])
    """
    return Merge(lambda piece, info: piece.new_global, keeps_local_steps=False, reads_local=False)


def follow() -> Merge:
    """theta <- Theta + (theta - snapshot), whenever it lands: for a region that has no part in the transfer.

    Its own steps are measured from the snapshot, for example the global params before the landing, and stay in its next outer
    gradient. A region without own steps takes the global params, bit for bit.

    >>> piece = Piece(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1), [1])
    >>> follow().apply(piece, None)
    tensor([2.])
    """
    return Merge(
        lambda piece, info: piece.local.sub_(piece.snapshot).add_(piece.new_global), keeps_local_steps=True
    )


def mix(alpha: float) -> Merge:
    """theta <- alpha theta + (1 - alpha) Theta (Streaming DiLoCo, 2501.18512).

    Args:
        alpha: weight of the local params: 1 ignores the global params, 0 discards the steps made during the transfer.

    Raises:
        InputError: alpha is outside [0, 1].

    >>> piece = Piece(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1), [1])
    >>> mix(0.25).apply(piece, None)
    tensor([2.5000])
    """
    if not 0 <= alpha <= 1:
        raise InputError(
            f"mixing_alpha={alpha} is a weight and must lie in [0, 1]: 0 means only global params, 1 only local."
        )
    if alpha == 0:
        return replace()
    if alpha == 1:  # the formula would give NaN if Theta is infinite
        return Merge(lambda piece, info: piece.local, keeps_local_steps=True)
    return Merge(
        lambda piece, info: piece.local.mul_(alpha).add_(piece.new_global, alpha=1 - alpha),
        keeps_local_steps=True,
    )


def compensate_delay(mode: str = "adaptive", strength: float = 0.5) -> Merge:
    """Redo the steps made during the transfer as if they had started from the new global params (CoCoDC, 2504.17672).

    ::

        u = (theta(send) - theta(now)) / tau ;  D = Theta - theta(send)
        theta <- Theta - tau (u + lambda u u D)          element-wise; tau = inner steps in flight; Theta if tau = 0

    The diagonal u u approximates the Hessian (DC-ASGD). The modes differ in lambda:

    - fixed: lambda = strength, the paper's printed form. u is a difference of weights: at usual learning rates lambda u u D is
      about 1e-7 of u, and the merge practically the additive one.
    - lr_normalized: gradients g = u / eta replace u: theta <- Theta - tau eta (g + strength g g D).
    - adaptive: lambda = strength ||u|| / ||u u D|| for each tensor. The term is then `strength` times as long as u. The mean of
      lambda u u, a Hessian diagonal times a step, is limited to 10: if D consists only of rounding errors, an unlimited lambda
      would enlarge them to the length of u.
    - additive: lambda = 0. LOSCAR-SGD (2605.20866) proves that this converges.

    Differs from the paper: the default is adaptive (after DC-S3GD), without its 1e-8 in the denominator, which would switch the
    term off at the scale of weights.

    Args:
        strength: the factor in the formulas above; 0 gives the additive merge.

    Raises:
        InputError: the mode is unknown, or the strength is negative.
    """
    demands.one_of("compensation", mode, demands.COMPENSATIONS)
    if strength < 0:
        raise InputError(
            f"outer.compensation_strength={strength} must not be negative; 0 gives the additive merge."
        )

    def additive(piece: Piece, info: MergeInfo) -> Tensor:
        return piece.local.sub_(piece.snapshot).add_(piece.new_global) if info.staleness else piece.new_global

    def terms(piece: Piece, info: MergeInfo) -> tuple[Tensor, Tensor]:
        """Compute u and u u D."""
        curvature = torch.sub(piece.new_global, piece.snapshot, out=piece.room)
        update = torch.sub(piece.snapshot, piece.local, out=piece.snapshot).div_(max(info.staleness, 1))
        return update, curvature.mul_(update).mul_(update)

    def joined(update: Tensor, curvature: Tensor, piece: Piece, info: MergeInfo) -> Tensor:
        return torch.sub(piece.new_global, update.add_(curvature), alpha=info.staleness, out=piece.local)

    def scaled(piece: Piece, info: MergeInfo) -> Tensor:
        factor = strength if mode == "fixed" else strength / info.flight_lr if info.flight_lr else 0.0
        if not info.staleness or not factor:
            return additive(piece, info)
        update, curvature = terms(piece, info)
        return joined(update, curvature.mul_(factor), piece, info)

    def adapted(piece: Piece, info: MergeInfo) -> Tensor:
        if not info.staleness:
            return piece.new_global
        update, curvature = piece.snapshot, piece.room
        measured = zip(curvature.split_with_sizes(piece.sizes), piece.norms, piece.numels, strict=True)
        for term, (wanted, length), numel in measured:
            term *= min(strength * wanted / length, _MAX_CURVATURE * numel / wanted**2) if length else 0.0
        return joined(update, curvature, piece, info)

    if mode == "additive" or strength == 0:
        return Merge(additive, keeps_local_steps=True)
    if mode == "adaptive":
        return Merge(adapted, keeps_local_steps=True, measure=terms)
    return Merge(scaled, keeps_local_steps=True, reads_lr=mode == "lr_normalized")


def additive() -> Merge:
    """theta <- Theta + (theta - snapshot): add the steps made during the transfer to the new global params.

    >>> from types import SimpleNamespace
    >>> piece = Piece(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1), [1])
    >>> additive().apply(piece, SimpleNamespace(staleness=5))
    tensor([2.])
    """
    return compensate_delay("additive")
