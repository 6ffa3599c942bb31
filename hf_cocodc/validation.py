"""What others say, and what a checkpoint has, is believed only where it can be true: counts and numbers in their range."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

MOST = (1 << 53) - 1
"""No count of ours is larger: so far fp64 tells whole numbers apart."""
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Size = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""A finite number that is not negative."""
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


def whole(kind: type[T], state: Mapping[str, Any]) -> T:
    """A dataclass of this kind with what the state says of each of its fields: what is missing must not be as at the beginning.

    Raises KeyError if a field is missing, ValueError if a value cannot be true.
    """
    named = {each.name: state[each.name] for each in fields(kind)}  # type: ignore[arg-type]
    return msgspec.convert(named, kind, str_keys=True)
