"""The outer optimizer, as transforms of the averaged outer gradient.

A transform is a pair of functions; `chain` puts them in a row. The engine subtracts what comes out of the chain from
the global params. Everything is flat fp32 of one fragment's length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sync_info import SyncInfo

State = dict[str, Any]
"""Outer state of one fragment: named tensors and numbers, nested by the names given to `chain`; saved in checkpoints."""


class OuterTransform(NamedTuple):
    """A step of the outer optimizer.

    Attributes:
        init: state for a fragment with these global params (flat fp32). Called once, before the first send.
        update: (outer gradient, state, info) -> (outer gradient, state). Called once a landing.
        regions_agree: whether equal outer gradients give every region the same result; where not, the global params
            differ between regions and are averaged when training ends, for evaluation and for export.
    """

    init: Callable[[Tensor], State]
    update: Callable[[Tensor, State, SyncInfo], tuple[Tensor, State]]
    regions_agree: bool = True


def chain(**transforms: OuterTransform) -> OuterTransform:
    """Apply the transforms in the order given; their keyword names are the keys of the state in a checkpoint."""

    def init(flat: Tensor) -> State:
        return {name: transform.init(flat) for name, transform in transforms.items()}

    def update(grad: Tensor, state: State, info: SyncInfo) -> tuple[Tensor, State]:
        new_state = {}
        for name, transform in transforms.items():
            grad, new_state[name] = transform.update(grad, state[name], info)
        return grad, new_state

    return OuterTransform(init, update, all(transform.regions_agree for transform in transforms.values()))


def scale(factor: float) -> OuterTransform:
    """g <- factor g. With the outer learning rate eta_o as the factor this is plain SGD."""
    return OuterTransform(lambda flat: {}, lambda grad, state, info: (grad * factor, state))


def nesterov(momentum: float) -> OuterTransform:
    """Nesterov momentum in PyTorch's SGD form, without dampening or weight decay (2311.08105; 2501.18512).

    buf <- mu buf + g ; g <- g + mu buf, and buf = g at the first call.
    """

    def update(grad: Tensor, state: State, info: SyncInfo) -> tuple[Tensor, State]:
        buffer = state["buffer"] * momentum + grad
        return grad + buffer * momentum, {"buffer": buffer}

    return OuterTransform(lambda flat: {"buffer": torch.zeros_like(flat)}, update)
