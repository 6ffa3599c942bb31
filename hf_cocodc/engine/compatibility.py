"""Checks that a saved state fits the model and the method of this run."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..parts.fragments import Fragment


def layout(fragments: Sequence[Fragment]) -> list[list[Any]]:
    """[name, shape] of every parameter, [name, shape, [first row, row after the last]] of a piece; one list per fragment."""
    return [
        [
            [name, list(shape), *([list(f.rows[i])] if i in f.rows else [])]
            for i, (name, shape) in enumerate(zip(f.names, f.shapes, strict=True))
        ]
        for f in fragments
    ]


def names_in(found: list) -> frozenset[str]:
    """Names of the parameters in a saved layout."""
    return frozenset(name for fragment in found for name, *_ in fragment)


def same_layout(found: list, fragments: Sequence[Fragment]) -> None:
    """Check that a saved layout equals the layout of `fragments`.

    Raises:
        CheckpointError: names the first parameter that differs.
    """
    expected = layout(fragments)
    if len(found) != len(expected):
        raise CheckpointError(
            f"the checkpoint has {len(found)} fragments, this run {len(expected)}. Resume with the outer.num_fragments "
            "and outer.fragment_pattern that wrote it."
        )
    for index, (theirs, ours) in enumerate(zip(found, expected, strict=True)):
        for their_param, our_param in zip_longest(theirs, ours):
            if their_param != our_param:
                raise CheckpointError(
                    f"fragment {index}: the checkpoint has the parameter {_show(their_param)}, this run {_show(our_param)}. "
                    "Resume with the model, outer.fragment_pattern and outer.split_rows that wrote it."
                )


def _show(param: list | None) -> str:
    if param is None:
        return "no more"
    name, shape, *rows = param
    return f"{name} {shape}" + "".join(f" (rows {start} to {stop - 1})" for start, stop in rows)


def form_of(state: Any) -> Any:
    """The structure of a state, for `same_structure`: its tensors have shapes and types, but no memory."""
    if isinstance(state, dict):
        return {key: form_of(value) for key, value in state.items()}
    return state.to("meta") if isinstance(state, Tensor) else state


def same_structure(found: Any, expected: Any, what: str) -> None:
    """Check that a saved state has the keys of a fresh one, and tensors of its shapes.

    Raises:
        CheckpointError: names the first place where they differ.
    """
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            names = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise CheckpointError(
                f"{what}: the checkpoint has {names}, this run {sorted(expected)}. Resume with the method, codec and "
                "merge that wrote it."
            )
        for key, value in expected.items():
            same_structure(found[key], value, f"{what}, {key}")
    elif isinstance(expected, Tensor) and (
        not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype
    ):
        seen = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise CheckpointError(
            f"{what}: the checkpoint has {seen}, this run {list(expected.shape)} {expected.dtype}. Resume with the model "
            "and settings that wrote it."
        )
