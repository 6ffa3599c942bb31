"""How the local params take in new global params when a transfer lands."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from . import demands
from .info import MergeInfo, MergeSlice

_MAX_CURVATURE = 10.0
"""Upper bound for the mean of lambda u u. Above it, D can only be noise; in training the mean is 0.003 to 3."""


class Merge(NamedTuple):
    """Computes the new local params from the new global params, slice by slice.

    Attributes:
        apply: (slice, info) -> new local params of the slice, element by element.
        keeps_local_steps: whether the result contains the inner steps made since the send, so that a run that ends after the
            landing must still send them.
        reads_local: whether the result depends on the local params. If not, the result is the new global params.
        measure: (slice, info) -> two tensors. The engine calls it for all slices before the first `apply`, and gives the norms
            of both for each parameter, over all ranks that hold shards of it, to `scales`. None if `apply` needs no norms.
        scales: (norms of the first, of the second, numbers of values, info), each of the three 1-D fp64 over the parameters -> a
            number for each parameter, likewise. `apply` finds them in `MergeSlice.scales`.
        reads_lr: whether the result depends on `MergeInfo.flight_lr`.
    """

    apply: Callable[[MergeSlice, MergeInfo], Tensor]
    keeps_local_steps: bool
    reads_local: bool = True
    measure: Callable[[MergeSlice, MergeInfo], tuple[Tensor, Tensor]] | None = None
    scales: Callable[[Tensor, Tensor, Tensor, MergeInfo], Tensor] | None = None
    reads_lr: bool = False


def replace() -> Merge:
    """theta <- Theta (DiLoCo, 2311.08105).

    >>> here = MergeSlice(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]))
    >>> replace().apply(here, None)
    tensor([3.])
    """
    return Merge(lambda here, info: here.new_global, keeps_local_steps=False, reads_local=False)


def follow() -> Merge:
    """theta <- Theta + (theta - snapshot), whenever it lands: for a region that has no part in the transfer.

    Its own steps are measured from the snapshot, for example the global params before the landing, and stay in its next outer
    gradient. A region without own steps takes the global params, bit for bit.

    >>> here = MergeSlice(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]))
    >>> follow().apply(here, None)
    tensor([2.])
    """
    return Merge(
        lambda here, info: (here.local - here.snapshot).add_(here.new_global), keeps_local_steps=True
    )


def mix(alpha: float) -> Merge:
    """theta <- alpha theta + (1 - alpha) Theta (Streaming DiLoCo, 2501.18512).

    Args:
        alpha: weight of the local params: 1 ignores the global params, 0 discards the steps made during the transfer.

    Raises:
        InputError: alpha is outside [0, 1].

    >>> here = MergeSlice(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]))
    >>> mix(0.25).apply(here, None)
    tensor([2.5000])
    """
    if not 0 <= alpha <= 1:
        raise InputError(
            f"mixing_alpha={alpha} is a weight and must lie in [0, 1]: 0 means only global params, 1 only local."
        )
    if alpha == 0:
        return replace()
    if alpha == 1:  # the formula would give NaN if Theta is infinite
        return Merge(lambda here, info: here.local, keeps_local_steps=True)
    return Merge(
        lambda here, info: (here.local * alpha).add_(here.new_global, alpha=1 - alpha),
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

    def additive(here: MergeSlice, info: MergeInfo) -> Tensor:
        return (here.local - here.snapshot).add_(here.new_global) if info.staleness else here.new_global

    # with d = tau u, the second line above is theta <- Theta - (d + lambda / tau d d D): fewer passes over memory
    def terms(here: MergeSlice, info: MergeInfo) -> tuple[Tensor, Tensor]:
        """d and d D."""
        steps = here.snapshot - here.local
        return steps, (here.new_global - here.snapshot).mul_(steps)

    def norms(here: MergeSlice, info: MergeInfo) -> tuple[Tensor, Tensor]:
        steps, curvature = terms(here, info)
        return steps, curvature.mul_(steps)

    def joined(steps: Tensor, curvature: Tensor, here: MergeSlice) -> Tensor:
        return torch.sub(here.new_global, steps.addcmul_(steps, curvature))

    def scaled(here: MergeSlice, info: MergeInfo) -> Tensor:
        factor = strength if mode == "fixed" else strength / info.flight_lr if info.flight_lr else 0.0
        if not info.staleness or not factor:
            return additive(here, info)
        steps, curvature = terms(here, info)
        return joined(steps, curvature.mul_(factor / info.staleness), here)

    def adapted(here: MergeSlice, info: MergeInfo) -> Tensor:
        if not info.staleness:
            return here.new_global
        steps, curvature = terms(here, info)
        torch._foreach_mul_(list(curvature.split_with_sizes(here.sizes)), list(here.scales))
        return joined(steps, curvature, here)

    def scales(steps: Tensor, curvatures: Tensor, numels: Tensor, info: MergeInfo) -> Tensor:
        """lambda / tau."""
        most = _MAX_CURVATURE * info.staleness * numels / steps.square()
        return torch.where(curvatures > 0, torch.minimum(strength * steps / curvatures, most), 0.0)

    if mode == "additive" or strength == 0:
        return Merge(additive, keeps_local_steps=True)
    if mode == "adaptive":
        return Merge(adapted, keeps_local_steps=True, measure=norms, scales=scales)
    return Merge(scaled, keeps_local_steps=True, reads_lr=mode == "lr_normalized")


def additive() -> Merge:
    """theta <- Theta + (theta - snapshot): add the steps made during the transfer to the new global params.

    >>> from types import SimpleNamespace
    >>> here = MergeSlice(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([2.0]))
    >>> additive().apply(here, SimpleNamespace(staleness=5))
    tensor([2.])
    """
    return compensate_delay("additive")
