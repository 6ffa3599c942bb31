"""What a process has only once, but every region in lockstep needs for itself: states of random numbers and of Accelerate."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import torch


def process_state() -> tuple[tuple, dict[str, Any]]:
    """The states of the random numbers, and of Accelerate's gradient accumulation and data loaders, as they are."""
    return _random_state(), _copied(_of_accelerate())


def set_process_state(state: tuple[tuple, dict[str, Any]]) -> None:
    """Go back to these states."""
    _set_random_state(state[0])
    shared = _of_accelerate()
    shared.clear()
    shared.update(_copied(state[1]))


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """After the block, torch, NumPy and Python draw the random numbers that they would have drawn without it."""
    state = _random_state()
    try:
        yield
    finally:
        _set_random_state(state)


def _random_state() -> tuple:
    """The last is None before CUDA has started: it has only a seed then, torch's own, as torch.manual_seed gives it to both."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(), cuda


def _set_random_state(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])
    elif torch.cuda.is_available():  # another region may have started or seeded it since
        torch.cuda.manual_seed_all(torch.initial_seed())


def _of_accelerate() -> dict[str, Any]:
    accelerate = sys.modules.get("accelerate.state")
    return accelerate.GradientState._shared_state if accelerate else {}


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Lists and mappings are changed in place."""
    return {name: value.copy() if isinstance(value, list | dict) else value for name, value in state.items()}
