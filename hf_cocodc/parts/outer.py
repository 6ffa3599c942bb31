"""The outer optimizer, as transforms of the averaged outer gradient.

A transform is a pair of functions; `chain` puts them in a row. The engine subtracts what comes out of the chain from
the global params. Everything is flat fp32 of one fragment's length, and what is done to it is done element by element:
the engine takes one piece through all of it before the next, so that each value is read from memory once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensors.norms import norms, square_of_difference
from .info import SyncInfo

State = dict[str, Any]
"""Outer state of one fragment: named tensors and numbers, nested by the names given to `chain`; saved in checkpoints."""


Step = Callable[[Tensor, int], Tensor]
"""(piece of the outer gradient, its number among the pieces that `SyncInfo.cut` gives) -> that piece, transformed. Called
for every piece once, in order. It may write to the piece and to that piece of its state's
tensors, for it alone owns them; what it hands on is no part of its state."""


class OuterTransform(NamedTuple):
    """A step of the outer optimizer.

    Attributes:
        init: state for a fragment with these global params (flat fp32). Called once, before the first send.
        begin: (state, info) -> (step, state). Called once a landing: finds the numbers that hold for the whole fragment,
            and gives the step that is done to each of its elements. Tensors of the state stay what they are.
        regions_agree: whether equal outer gradients give every region the same result; where not, the global params
            differ between regions and are averaged when training ends, for evaluation and for export.
    """

    init: Callable[[Tensor], State]
    begin: Callable[[State, SyncInfo], tuple[Step, State]]
    regions_agree: bool = True


def chain(**transforms: OuterTransform) -> OuterTransform:
    """Apply the transforms in the order given; their keyword names are the keys of the state in a checkpoint."""

    def init(flat: Tensor) -> State:
        return {name: transform.init(flat) for name, transform in transforms.items()}

    def begin(state: State, info: SyncInfo) -> tuple[Step, State]:
        begun = {name: transform.begin(state[name], info) for name, transform in transforms.items()}
        steps = [step for step, _ in begun.values()]

        def step(grad: Tensor, index: int) -> Tensor:
            for each in steps:
                grad = each(grad, index)
            return grad

        return step, {name: new_state for name, (_, new_state) in begun.items()}

    return OuterTransform(init, begin, all(transform.regions_agree for transform in transforms.values()))


def scale(factor: float | Callable[[SyncInfo], float]) -> OuterTransform:
    """g <- factor g, the factor a number or computed at each landing. With the outer learning rate this is plain SGD."""

    def begin(state: State, info: SyncInfo) -> tuple[Step, State]:
        chosen = factor(info) if callable(factor) else factor
        return lambda grad, index: grad.mul_(chosen), state

    return OuterTransform(lambda flat: {}, begin)


def nesterov(momentum: float) -> OuterTransform:
    """Nesterov momentum in PyTorch's SGD form, without dampening or weight decay (2311.08105; 2501.18512).

    buf <- mu buf + g ; g <- g + mu buf, and buf = g at the first call.
    """

    def begin(state: State, info: SyncInfo) -> tuple[Step, State]:
        buffers = info.cut(state["buffer"])

        def step(grad: Tensor, index: int) -> Tensor:
            buffer = buffers[index]
            torch.add(grad, buffer, alpha=momentum, out=buffer)
            return grad.add_(buffer, alpha=momentum)

        return step, state

    return OuterTransform(lambda flat: {"buffer": torch.zeros_like(flat)}, begin)


def momentum(beta: float, clip: float | None = None) -> OuterTransform:
    """m <- beta m + g, each element clipped to [-clip, clip] before it is used and kept (CO2, 2401.16265).

    Args:
        beta: what remains of the momentum at each landing.
        clip: phi; None clips nothing.
    """

    def begin(state: State, info: SyncInfo) -> tuple[Step, State]:
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
    """g <- g / Lambda, a smaller step where the global params moved much while g travelled (CO2, 2401.16265).

    ::

        Lambda = 1 + ||Theta(now) - Theta(at the send)|| / C ,  C the mean of that norm so far, Lambda in [1, 10]

    Differs from the paper: its printed form of Lambda was not seen; this is the gap-aware form.

    Args:
        constant: a fixed Lambda instead, as in the authors' code.
    """

    def begin(state: State, info: SyncInfo) -> tuple[Step, State]:
        [gap] = norms([square_of_difference(info.global_params, info.global_at_send)], info.total)
        count = state["count"] + 1
        mean_gap = state["mean_gap"] + (gap - state["mean_gap"]) / count
        penalty = min(max(1 + gap / mean_gap, 1.0), 10.0) if gap else 1.0
        return lambda grad, index: grad.div_(penalty), {"count": count, "mean_gap": mean_gap}

    if constant is not None:
        return scale(1 / constant)
    return OuterTransform(lambda flat: {"count": 0, "mean_gap": 0.0}, begin)


def eager() -> OuterTransform:
    """g <- g + (Delta_m(now) - Delta_m(at the send)) / M: the region's own stale part gives way to the fresh one.

    Eager updates, 2502.12996. Regions differ from here on.
    """

    def begin(state: State, info: SyncInfo) -> tuple[Step, State]:
        share = 1 / info.num_regions
        stale, fresh = info.cut(info.own_outer_grad), info.cut(info.fresh_outer_grad())

        def step(grad: Tensor, index: int) -> Tensor:
            # in this order one region alone gets its fresh outer gradient bit for bit
            return grad.sub_(stale[index], alpha=share).add_(fresh[index], alpha=share)

        return step, state

    return OuterTransform(lambda flat: {}, begin, regions_agree=False)
