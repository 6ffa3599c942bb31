"""The outer optimizer, built from transforms of the mean outer gradient.

A transform is a pair of functions, and `chain` applies several transforms in order. The engine subtracts the result from the
global params. All operations on flat tensors are element-wise: the engine takes one slice of a fragment through the whole chain
before the next one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .info import OuterInfo, OuterSlice
from .tensors.memory import Home
from .tensors.slices import longest, square

OuterState = dict[str, Any]
"""Outer state of a fragment: tensors and numbers, nested by the names given to `chain`. Checkpoints save it."""

Step = Callable[[Tensor, OuterSlice], Tensor]
"""(slice of the outer gradient, what else there is of it) -> the transformed slice.

The engine calls it once for each slice, in order. It owns the given slice, and may write to it and to the state's tensors. Its
result must not share memory with the state.
"""


class OuterTransform(NamedTuple):
    """One part of the outer optimizer.

    Attributes:
        init: global params of a fragment (flat fp32) -> first state. Called once, before the first send.
        begin: (state, info) -> (step, next state). Called once per landing, in the training thread. Computes what holds for
            the whole fragment, without reading a value of the device, and returns the step for its elements. Must keep the
            state's tensors of the fragment's length; the step writes to them.
        regions_agree: whether equal mean outer gradients give equal results in all regions. If not, the global params differ
            between regions, and are averaged for evaluation, for export and at the end of training. Such a transform may read
            local params.
        reads_lr: whether `begin` needs `round_lr`.
    """

    init: Callable[[Tensor], OuterState]
    begin: Callable[[OuterState, OuterInfo], tuple[Step, OuterState]]
    regions_agree: bool = True
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

        def step(grad: Tensor, here: OuterSlice) -> Tensor:
            for name, (each, _) in begun.items():
                grad = each(grad, here._replace(state=here.state[name]))
            return grad

        return step, {name: new_state for name, (_, new_state) in begun.items()}

    parts = transforms.values()
    return OuterTransform(
        init,
        begin,
        regions_agree=all(part.regions_agree for part in parts),
        reads_lr=any(part.reads_lr for part in parts),
    )


def scale(factor: float | Callable[[OuterInfo], float]) -> OuterTransform:
    """g <- factor g, a number or a function called at each landing. With the outer learning rate: plain SGD.

    >>> step, _ = scale(0.7).begin({}, None)
    >>> step(torch.tensor([1.0, -2.0]), OuterSlice({}))
    tensor([ 0.7000, -1.4000])
    """

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        chosen = factor(info) if callable(factor) else factor
        return lambda grad, here: grad.mul_(chosen), state

    return OuterTransform(lambda flat: {}, begin, reads_lr=callable(factor))


def nesterov(momentum: float) -> OuterTransform:
    """Nesterov momentum in the form of PyTorch's SGD, without dampening or weight decay (2311.08105; 2501.18512).

    ::

        buf <- mu buf + g ;  g <- g + mu buf          buf = 0 before the first landing

    >>> transform = nesterov(0.9)
    >>> step, state = transform.begin(transform.init(torch.zeros(2)), None)
    >>> step(torch.tensor([1.0, -2.0]), OuterSlice(state))
    tensor([ 1.9000, -3.8000])
    >>> step(torch.tensor([1.0, -2.0]), OuterSlice(state))
    tensor([ 2.7100, -5.4200])
    """

    def step(grad: Tensor, here: OuterSlice) -> Tensor:
        buffer = torch.add(grad, here.state["buffer"], alpha=momentum, out=here.state["buffer"])
        return grad.add_(buffer, alpha=momentum)

    return OuterTransform(lambda flat: {"buffer": torch.zeros_like(flat)}, lambda state, info: (step, state))


def momentum(beta: float, clip: float | None = None) -> OuterTransform:
    """m <- clip(beta m + g, -phi, phi) ;  g <- m          element-wise (CO2, 2401.16265).

    Args:
        beta: share of the momentum that remains at each landing.
        clip: phi; None means no clipping.
    """

    def step(grad: Tensor, here: OuterSlice) -> Tensor:
        buffer = torch.add(grad, here.state["buffer"], alpha=beta, out=here.state["buffer"])
        if clip is not None:
            buffer.clamp_(-clip, clip)
        return grad.copy_(buffer)

    return OuterTransform(lambda flat: {"buffer": torch.zeros_like(flat)}, lambda state, info: (step, state))


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

    def init(flat: Tensor) -> OuterState:
        return {name: flat.new_zeros((), dtype=torch.float64) for name in ("count", "mean_gap")}

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        gaps = square_of_difference(info.global_params, info.global_at_send, info.home).view(1)
        [gap] = info.total(gaps).sqrt().unbind()
        count, mean_gap = (info.home.visit(state[name]) for name in ("count", "mean_gap"))
        count = count + (gap > 0)
        mean_gap = torch.where(gap > 0, mean_gap + (gap - mean_gap) / count, mean_gap)
        penalty = torch.where(gap > 0, (1 + gap / mean_gap).clamp(1.0, 10.0), 1.0)
        return lambda grad, here: grad.div_(penalty), {"count": count, "mean_gap": mean_gap}

    if constant is not None:
        return scale(1 / constant)
    return OuterTransform(init, begin)


def eager() -> OuterTransform:
    """g <- g + (Delta_m(now) - Delta_m(send)) / M: the region replaces its own stale share of the mean by its fresh one.

    Where regions do not count alike, or their number changes, 1 / M is the region's share in this mean, and Delta_m(send) is
    taken back with the share with which the landing before has taken it in. After this transform g differs between regions.
    Source: Eager updates, 2502.12996.
    """

    def begin(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        taken, share = info.taken_share, info.fresh_share

        def step(grad: Tensor, here: OuterSlice) -> Tensor:
            stale, fresh = here.own_outer_grad, here.fresh_outer_grad
            assert stale is not None and fresh is not None, "the transform says that regions do not agree"
            # subtract first: a single region then gets exactly its fresh outer gradient, bit for bit
            return grad.sub_(stale * taken).add_(fresh * share)

        return step, state

    return OuterTransform(lambda flat: {}, begin, regions_agree=False)


def square_of_difference(one: Tensor, other: Tensor, home: Home) -> Tensor:
    """Sum of squares of `one - other`, both flat and at rest: an fp64 scalar on the device."""
    pairs = zip(*(each.split(longest(home.device)) for each in (one, other)), strict=True)
    return torch.stack([square(home.visit(a) - home.visit(b)) for a, b in pairs]).sum()
