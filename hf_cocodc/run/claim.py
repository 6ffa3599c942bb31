"""One outer optimizer at a time trains a model: two would both write its parameters."""

import weakref
from collections.abc import Callable

from torch import nn

from ..errors import InputError

_TRAINED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that an outer optimizer trains now."""


def refuse_second(model: nn.Module) -> None:
    """Check that no outer optimizer trains `model`. Raises InputError if one does."""
    if model in _TRAINED:
        raise InputError(
            f"another OuterOptimizer, or another CoCoDCCallback, trains this {type(model).__name__}: both would write its "
            "parameters. End the first one (finish() or close()), or train a model of its own."
        )


def claim(model: nn.Module) -> Callable[[], None]:
    """From now on an outer optimizer trains `model`; the returned function ends this."""
    _TRAINED.add(model)
    return lambda: _TRAINED.discard(model)
