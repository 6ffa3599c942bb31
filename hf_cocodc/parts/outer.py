"""The outer optimizer, built from transforms of the mean outer gradient.

A transform is a pair of functions, and `chain` applies several transforms in order. The engine subtracts the result from the
global params. All tensors are flat fp32 and have the length of one fragment. All operations on them are element-wise: the
engine takes one piece through the whole chain before the next piece, and reads each value from memory once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .info import OuterInfo
from .tensors.pieces import norms, square_of_difference

OuterState = dict[str, Any]
"""Outer state of a fragment: tensors and numbers, nested by the names given to `chain`. Checkpoints save it."""

Step = Callable[[Tensor, int], Tensor]
"""(piece of the outer gradient, index of the piece in `OuterInfo.cut`) -> the transformed piece.

The engine calls it once for each piece, in any order and from several threads. It owns the given piece and the same piece of
its state's tensors, and may write to both. Its result must not share memory with its state.
"""


class OuterTransform(NamedTuple):
    """One part of the outer optimizer.

    Attributes:
        init: global params of a fragment (flat fp32) -> first state. Called once, before the first send.
        begin: (state, info) -> (step, next state). Called once per landing. Computes the numbers that hold for the whole
            fragment, and returns the step for its elements. Must keep the tensors of the state; the step may write to them.
        regions_agree: whether equal mean outer gradients give equal results in all regions. If not, the global params differ
            between regions, and are averaged for evaluation, for export and at the end of training. Such a transform may read
            local params, so the training thread takes its step at the landing.
        asks_region: whether `begin` needs `total` or `round_lr`, which the ranks of a sharded region settle together. Such a
            step is not taken before the landing if the region has several lanes.
        reads_lr: whether `begin` needs `round_lr`.
    """

    init: Callable[[Tensor], OuterState]
    begin: Callable[[OuterState, OuterInfo], tuple[Step, OuterState]]
    regions_agree: bool = True
    asks_region: bool = False
    reads_lr: bool = False


def chain(**transforms: OuterTransform) -> OuterTransform:
    """Apply the transforms in the given order. Their keyword names are the keys of the state in a checkpoint.

    >>> optimizer = chain(nesterov=nesterov(0.9), lr=scale(0.7))
    >>> optimizer.init(torch.zeros(2))
    {'nesterov': {'buffer': tensor([0., 0.])}, 'lr': {}}
    """

    def init(flat: Tensor) -> OuterState:
        return {name: transform.init(flat) for name, transform in transforms.items()}

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        begun = {name: transform.begin(state[name], info) for name, transform in transforms.items()}
        steps = [step for step, _ in begun.values()]

        def step(grad: Tensor, index: int) -> Tensor:
            for each in steps:
                grad = each(grad, index)
            return grad

        return step, {name: new_state for name, (_, new_state) in begun.items()}

    parts = transforms.values()
    return OuterTransform(
        init,
        begin,
        regions_agree=all(part.regions_agree for part in parts),
        asks_region=any(part.asks_region for part in parts),
        reads_lr=any(part.reads_lr for part in parts),
    )


def scale(factor: float | Callable[[OuterInfo], float]) -> OuterTransform:
    """g <- factor g, a number or a function called at each landing. With the outer learning rate: plain SGD.

    >>> step, _ = scale(0.7).begin({}, None)
    >>> step(torch.tensor([1.0, -2.0]), 0)
    tensor([ 0.7000, -1.4000])
    """

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        chosen = factor(info) if callable(factor) else factor
        return lambda grad, index: grad.mul_(chosen), state

    return OuterTransform(lambda flat: {}, begin, asks_region=callable(factor), reads_lr=callable(factor))


def nesterov(momentum: float) -> OuterTransform:
    """Nesterov momentum in the form of PyTorch's SGD, without dampening or weight decay (2311.08105; 2501.18512).

    ::

        buf <- mu buf + g ;  g <- g + mu buf          buf = 0 before the first landing

    >>> from types import SimpleNamespace
    >>> transform, info = nesterov(0.9), SimpleNamespace(cut=lambda flat: [flat])
    >>> step, state = transform.begin(transform.init(torch.zeros(2)), info)
    >>> step(torch.tensor([1.0, -2.0]), 0)
    tensor([ 1.9000, -3.8000])
    >>> step, state = transform.begin(state, info)
    >>> step(torch.tensor([1.0, -2.0]), 0)
    tensor([ 2.7100, -5.4200])
    """

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        buffers = info.cut(state["buffer"])

        def step(grad: Tensor, index: int) -> Tensor:
            buffer = buffers[index]
            torch.add(grad, buffer, alpha=momentum, out=buffer)
            return grad.add_(buffer, alpha=momentum)

        return step, state

    return OuterTransform(lambda flat: {"buffer": torch.zeros_like(flat)}, begin)


def momentum(beta: float, clip: float | None = None) -> OuterTransform:
    """m <- clip(beta m + g, -phi, phi) ;  g <- m          element-wise (CO2, 2401.16265).

    Args:
        beta: share of the momentum that remains at each landing.
        clip: phi; None means no clipping.
    """

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        buffers = info.cut(state["buffer"])

        def step(grad: Tensor, index: int) -> Tensor:
            buffer = buffers[index]
            torch.add(grad, buffer, alpha=beta, out=buffer)
            if clip is not None:
                buffer.clamp_(-clip, clip)
            return grad.copy_(buffer)

        return step, state

    return OuterTransform(lambda flat: {"buffer": torch.zeros_like(flat)}, begin)


def staleness_penalty(constant: float | None = None) -> OuterTransform:
    """g <- g / Lambda: a smaller step if the global params moved far while g traveled (CO2, 2401.16265).

    ::

        Lambda = 1 + ||Theta(now) - Theta(send)|| / C          Lambda in [1, 10]

    C is the mean of the norms so far, this one included. A norm of zero does not count, and gives Lambda = 1: nothing lands
    before the first transfer does, so its norm says nothing about the others. In a steady run all norms are alike, and Lambda
    is about 2. Differs from the paper: this is the gap-aware form; we have not seen the printed form of Lambda.

    Args:
        constant: a fixed Lambda, as in the authors' code; None means the measured Lambda.
    """

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        [gap] = norms([square_of_difference(info.global_params, info.global_at_send)], info.total)
        if not gap:
            return lambda grad, index: grad, state
        count = state["count"] + 1
        mean_gap = state["mean_gap"] + (gap - state["mean_gap"]) / count
        penalty = min(max(1 + gap / mean_gap, 1.0), 10.0)
        return lambda grad, index: grad.div_(penalty), {"count": count, "mean_gap": mean_gap}

    if constant is not None:
        return scale(1 / constant)
    return OuterTransform(lambda flat: {"count": 0, "mean_gap": 0.0}, begin, asks_region=True)


def eager() -> OuterTransform:
    """g <- g + (Delta_m(now) - Delta_m(send)) / M: the region replaces its own stale share of the mean by its fresh one.

    Where regions do not count alike, or their number changes, 1 / M is the region's share in this mean, and Delta_m(send) is
    taken back with the share with which the landing before has taken it in. After this transform g differs between regions.
    Source: Eager updates, 2502.12996.
    """

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        taken, share = info.taken_share, info.fresh_share
        own, now = info.own_outer_grad, info.fresh_outer_grad
        assert own is not None and now is not None, "the transform says that regions do not agree"
        stale, fresh = info.cut(own), info.cut(now)

        def step(grad: Tensor, index: int) -> Tensor:
            # subtract first: a single region then gets exactly its fresh outer gradient, bit for bit
            return grad.sub_(stale[index], alpha=taken).add_(fresh[index], alpha=share)

        return step, state

    return OuterTransform(lambda flat: {}, begin, regions_agree=False)
