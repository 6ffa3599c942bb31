"""Nested states as JSON and named tensors, and back."""

import math
from typing import Any

from torch import Tensor

_TENSOR = "$tensor"
_FLOAT = "$float"
_DEEPEST = 64
"""Levels of a state at most."""


def take_apart(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A state as JSON-able values, and its tensors by name: on the host, each in memory of its own, none twice."""
    tensors: dict[str, Tensor] = {}
    return _take_apart(value, "", tensors, {}), tensors


def put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The state that `take_apart` took apart.

    Raises:
        KeyError: a tensor is missing.
        ValueError: it is no such state.
    """
    return _put_together(value, tensors, _DEEPEST)


def _put_together(value: Any, tensors: dict[str, Tensor], levels: int) -> Any:
    if not isinstance(value, dict | list):
        return value
    if not levels:
        raise ValueError(f"a state has more than {_DEEPEST} levels")
    if isinstance(value, list):
        return [_put_together(each, tensors, levels - 1) for each in value]
    for mark in (_TENSOR, _FLOAT):
        if mark in value and (len(value) > 1 or not isinstance(value[mark], str)):
            raise ValueError(f"a state has {str(value)[:80]} in the place of a tensor or a number")
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: _put_together(each, tensors, levels - 1) for key, each in value.items()}


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = name
            on_host = value.cpu()
            alone = on_host.untyped_storage().nbytes() == on_host.nbytes
            tensors[name] = on_host if alone else on_host.clone()  # safetensors refuses views of one memory
        return {_TENSOR: seen[id(value)]}
    if isinstance(value, dict):
        return {key: _take_apart(each, _join(name, key), tensors, seen) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_take_apart(each, _join(name, i), tensors, seen) for i, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)
