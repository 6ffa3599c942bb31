"""Records of numbers that regions send to each other: typed in the program, a row of fp64 on the wire.

A record is a NamedTuple whose fields are numbers. fp64 holds integers exactly up to 2**53. Each kind of record carries a
mark: regions that are out of step notice it, and never take one number for another.
"""

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..errors import LinkError, RegionLostError

Record = TypeVar("Record", bound=tuple)

ROW = 20
"""Numbers in a row: the mark of the kind, the fields, zeros. Rows of all kinds have one length."""


def to_row(record: tuple) -> Tensor:
    """The record as a row: (ROW,) fp64."""
    numbers = [_mark(type(record)), *map(float, record)]
    return torch.tensor(numbers + [0.0] * (ROW - len(numbers)), dtype=torch.float64)


def from_row(kind: type[Record], row: Tensor, region: int) -> Record:
    """The record of type `kind` that `region` has sent as a row.

    Raises:
        LinkError: the row is a record of another kind: regions are out of step.
        RegionLostError: a field has a number that its type does not have.
    """
    mark, *numbers = row.tolist()
    if mark != _mark(kind):
        raise LinkError(
            f"regions are out of step: region {region} did not send the expected {kind.__name__}. Every region must "
            "make the same calls in the same order: start all of them with the same version and the same script."
        )
    try:
        return from_numbers(kind, dict(zip(_types(kind), numbers, strict=False)))
    except ValueError as error:
        raise RegionLostError(
            region,
            f"region {region} sent a {kind.__name__} with a wrong number ({error}): what it sends cannot be believed. Look at "
            "its last output, and start it again.",
        ) from error


def from_numbers(kind: type[Record], numbers: Mapping[str, float]) -> Record:
    """The record whose fields have these values, each converted to the type of its field.

    Raises:
        ValueError: the type of a field has no such value.
    """
    return kind(**{name: convert(numbers[name]) for name, convert in _types(kind).items() if name in numbers})


@functools.cache
def _types(kind: type[tuple]) -> dict[str, Callable[[float], Any]]:
    hints = get_type_hints(kind)
    return {name: functools.partial(_convert, name, hints[name]) for name in kind._fields}  # type: ignore[attr-defined]


def _convert(name: str, kind: type, value: float) -> Any:
    if kind is float:
        return float(value)
    try:
        if value == int(value):
            return kind(int(value))
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{name}={value:g} is no {kind.__name__}")


@functools.cache
def _mark(kind: type[tuple]) -> float:
    return float(zlib.crc32(f"{kind.__module__}.{kind.__qualname__}".encode()))
