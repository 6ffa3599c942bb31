"""Checks that a saved state fits the model and the method of this run."""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError, CocodcError
from ..parts.fragments import Fragment
from ..parts.guard import LONGEST_HISTORY

T = TypeVar("T")

_OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_COUNTS = ("num_sends", "settled_at", "sent_at", "nonfinite_rounds", "voids", "far_losses")
HISTORIES = ("norms", "paces", "losses")
"""What the norm guard remembers of a fragment's last landings."""


def loading(load: Callable[[T, dict[str, Any]], None]) -> Callable[[T, dict[str, Any]], None]:
    """Wrap a method that loads a state: no gradients, and CheckpointError for a state that no engine saves."""

    @functools.wraps(load)
    def loads(owner: T, state: dict[str, Any]) -> None:
        try:
            with torch.no_grad():
                load(owner, state)
        except CocodcError:
            raise
        except _OF_DAMAGE as error:
            raise CheckpointError(
                f"the engine's state in the checkpoint is none that hf_cocodc saves ({type(error).__name__}: {error}). Resume "
                "from another checkpoint of the run."
            ) from error

    return loads


def layout(fragments: Sequence[Fragment]) -> list[list[Any]]:
    """Per fragment a list of [name, shape] for parameters, [name, shape, [first row, row after the last]] for pieces."""
    return [
        [
            [name, list(shape), *([list(f.rows[i])] if i in f.rows else [])]
            for i, (name, shape) in enumerate(zip(f.names, f.shapes, strict=True))
        ]
        for f in fragments
    ]


def laid_out(layout: Sequence[Sequence[Sequence[Any]]]) -> tuple[Fragment, ...]:
    """The fragments of which `layout` has told."""
    return tuple(
        Fragment(
            index,
            tuple(name for name, *_ in params),
            tuple(tuple(shape) for _, shape, *_ in params),
            sum(math.prod(shape) for _, shape, *_ in params),
            {i: tuple(rows[0]) for i, (_, _, *rows) in enumerate(params) if rows},
        )
        for index, params in enumerate(layout)
    )


def sound_counts(value: Any, levels: int = 0) -> None:
    """Check a count, or lists of counts nested at most `levels` deep. Raises ValueError for anything else."""
    if levels and isinstance(value, list | tuple):
        for each in value:
            sound_counts(each, levels - 1)
    elif not _is_count(value):
        raise ValueError(f"{str(value)[:80]!r} is no count")


def sound_numbers(*numbers: Any, signed: bool = False) -> None:
    """Check finite numbers, not negative unless `signed`. Raises ValueError for anything else."""
    for each in numbers:
        if not _is_number(each, signed):
            raise ValueError(f"{str(each)[:80]!r} is no number that a run saves")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any, signed: bool = False) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max and (value >= 0 or signed)


def same_layout(saved: list, fragments: Sequence[Fragment]) -> None:
    """Check a saved layout against `fragments`. Raises CheckpointError, which names the first parameter that differs."""
    expected = layout(fragments)
    if len(saved) != len(expected):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} fragments, this run {len(expected)}. Resume with the outer.num_fragments "
            "and outer.fragment_pattern that wrote it."
        )
    for index, (theirs, ours) in enumerate(zip(saved, expected, strict=True)):
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


def same_structure(saved: Any, expected: Any, what: str) -> None:
    """Check that a saved state has the keys and tensor shapes of a fresh one. Raises CheckpointError, which names the place."""
    if isinstance(expected, dict):
        if not isinstance(saved, dict) or saved.keys() != expected.keys():
            names = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
            raise CheckpointError(
                f"{what}: the checkpoint has {names}, this run {sorted(expected)}. Resume with the method, codec and "
                "merge that wrote it."
            )
        for key, value in expected.items():
            same_structure(saved[key], value, f"{what}, {key}")
    elif isinstance(expected, Tensor) and (
        not isinstance(saved, Tensor) or saved.shape != expected.shape or saved.dtype != expected.dtype
    ):
        seen = f"{list(saved.shape)} {saved.dtype}" if isinstance(saved, Tensor) else type(saved).__name__
        raise CheckpointError(
            f"{what}: the checkpoint has {seen}, this run {list(expected.shape)} {expected.dtype}. Resume with the model "
            "and settings that wrote it."
        )


def sound_fragment(state: Mapping[str, Any], numel: int, what: str) -> None:
    """Check the numbers of a saved fragment, and its transfers in flight. Raises CheckpointError for what no engine saves."""

    def hold(is_sound: bool, name: str, value: Any) -> None:
        if not is_sound:
            raise CheckpointError(
                f"{what}: the checkpoint has {name}={str(value)[:80]}, which no run saves. It is damaged: use another."
            )

    for name in _COUNTS:
        hold(_is_count(state.get(name, 0)), name, state.get(name))
    for name in HISTORIES:
        history = state.get(name, [])
        are_sound = isinstance(history, list) and all(_is_number(each, name == "losses") for each in history)
        hold(are_sound and len(history) <= LONGEST_HISTORY, name, history)
    hold(_is_number(state["lr_sum"], signed=True), "lr_sum", state["lr_sum"])
    before, flat = 0, torch.empty(numel, dtype=torch.float32, device="meta")
    for each in state["in_flight"]:
        sent_at = each["sent_at"]
        hold(_is_count(sent_at) and before <= sent_at <= state["sent_at"], "sent_at of a transfer", sent_at)
        before = sent_at
        for name in ("norm", "reference", "pace"):
            hold(_is_number(each.get(name, 0.0)), f"{name} of a transfer", each.get(name))
        for name in ("snapshot", "global_params", "mean", "outer_grad"):
            if name != "outer_grad" or each[name] is not None:
                same_structure(each[name], flat, f"{what}, {name} of a transfer")
        members = each.get("members", range(len(each["trailers"])))
        hold(
            len(members) == len(each["trailers"]) > 0 and list(members) == sorted(set(members)),
            "members of a transfer",
            members,
        )
