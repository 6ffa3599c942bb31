"""Sections of a recipe whose keys are those of another library: the names of the keys, and the types of their values."""

import dataclasses
import enum
from typing import Any, get_args, get_type_hints

from ..errors import InputError, nearest, short, shown
from ..recipes.reading import converted
from . import building

_WORDS = {"optim": [building.MUON]}
"""Words that we take besides those of a library."""
_ALSO = {"resume_from_checkpoint": bool, "fsdp": bool, "lora_alpha": float}
"""Types that Trainer and PEFT take besides those of their hints."""


def known_fields(section: str, given: dict[str, Any], kind: type) -> None:
    """Check a section against the dataclass `kind` of a library.

    Raises:
        InputError: a key is none of its fields, or a value has another type, or is a word that the library does not know.
    """
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = get_type_hints(kind)
    for key, value in given.items():
        if key not in known:
            raise InputError(
                f"unknown key {section}.{short(key)}.{nearest(key, known)} Use a field of {kind.__name__}."
            )
        converted(value, hints[key] | _ALSO.get(key, hints[key]), f"{section}.{key}", is_ours=False)
        words = [each.value for option in get_args(hints[key]) if _is_enum(option) for each in option]
        words += _WORDS.get(key, [])
        if words and isinstance(value, str) and value not in words:
            raise InputError(f"{section}.{key}={shown(value)} is not known.{nearest(value, words)}")


def _is_enum(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, enum.Enum)
