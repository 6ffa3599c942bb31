"""Turns what YAML holds into sections: overrides from the command line, and a type check of every key."""

import dataclasses
import enum
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import InputError, nearest, short, shown
from .parsing import read_yaml

T = TypeVar("T")
_GONE = {
    "regions.store": "is called regions.coordinator now",
    "regions.encrypt": "has gone: with a secret (regions.secret_file), all that regions send is encrypted",
}
"""Keys of earlier versions, and what became of them."""


def override_key(content: dict, override: str) -> None:
    """Apply one "section.key=value" to a recipe in place; null removes the key, and "section=null" a section.

    Raises:
        InputError: it does not fit the recipe.
    """
    key, equals, text = override.partition("=")
    *parents, last = key.strip().split(".")
    value = read_yaml(text, f"--set {shown(override)}") if equals and last else None
    removes = bool(equals) and value is None
    if not (equals and last and all(parents) and (parents or removes)):
        raise InputError(
            f"--set {shown(override)} must be SECTION.KEY=VALUE, for example outer.sync_interval=50."
        )
    target = content
    for parent in parents:
        if removes and isinstance(target, dict) and target.get(parent) is None:
            return
        if isinstance(target, dict):
            target = target.setdefault(parent, {})
    if not isinstance(target, dict):
        raise InputError(
            f"--set {shown(override)}: {short('.'.join(parents))} is not a mapping in the recipe."
        )
    if removes:
        target.pop(last, None)
    else:
        target[last] = value


def build(cls: type[T], content: Any, section: str = "") -> T:
    """Build the dataclass `cls` from a mapping. Raises InputError for an unknown key, a missing section or a wrong type."""
    if not isinstance(content, Mapping):
        raise InputError(f"{section or 'it'} must be a mapping of keys, not {shown(content)}.")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    dot = f"{section}." if section else ""
    for key in content:
        if f"{dot}{key}" in _GONE:
            raise InputError(f"{dot}{key} {_GONE[f'{dot}{key}']}.")
        if key not in fields:
            raise InputError(f"unknown key {dot}{short(key)}.{nearest(str(key), list(fields))}")
    for name, each in fields.items():
        if name not in content and each.default is each.default_factory is dataclasses.MISSING:
            raise InputError(
                f"section {dot}{name} is missing. A recipe needs model, tokenizer, data and training."
            )
    return cls(**{key: converted(value, hints[key], f"{dot}{key}") for key, value in content.items()})


def converted(value: Any, hint: Any, name: str, *, is_ours: bool = True) -> Any:
    """`value` as a type hint wants it: an int becomes a float where only a float fits, a mapping becomes its dataclass.

    A hint may be a class, a union, a Literal, list[X] or dict[str, X]. Where it names a dataclass beside other types, a
    mapping is taken as it is: the library that has this hint knows what it does with it.

    Args:
        value: from the recipe.
        hint: the type that is wanted.
        name: what a message calls the value.
        is_ours: whether this package knows all words that a Literal should list. Where another library has the hint, any text
            is taken: its Literal may stand for more, like PEFT's "pissa_niter_[number of iters]".

    Raises:
        InputError: the value has another type, or is a number that is not finite. The message names `name` and the type.
    """
    if dataclasses.is_dataclass(hint):
        return build(hint, value, name)  # type: ignore[arg-type]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if Any in options:
        return value
    if any(get_origin(option) is Literal and _is_among(value, get_args(option)) for option in options):
        return value
    if not is_ours and isinstance(value, str) and any(_is_of_words(option) for option in options):
        return value
    if isinstance(value, Mapping) and any(dataclasses.is_dataclass(option) for option in options):
        return value
    fitting = [option for option in options if _is_a(value, get_origin(option) or option)]
    if not fitting and float in options and isinstance(value, int) and not isinstance(value, bool):
        value, fitting = float(value), [float]
    if not fitting:
        wanted = " or ".join(word for option in options for word in words_of(option, str in options))
        raise InputError(f"{name}={shown(value)} must be {wanted}, not {type(value).__name__}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}={value} must be finite.")
    for option in fitting:
        inner = get_args(option)
        if isinstance(value, list) and inner:
            return [
                converted(each, inner[0], f"{name}[{place}]", is_ours=is_ours)
                for place, each in enumerate(value)
            ]
        if isinstance(value, dict) and inner:
            for key in value:
                if not isinstance(key, inner[0]):
                    raise InputError(f"{name}: the key {shown(key)} must be text, not {type(key).__name__}.")
            return {
                key: converted(each, inner[1], f"{name}.{short(key)}", is_ours=is_ours)
                for key, each in value.items()
            }
    return value


def _is_among(value: Any, literals: tuple) -> bool:
    return any(value == each and type(value) is type(each) for each in literals)


def _is_of_words(option: Any) -> bool:
    return get_origin(option) is Literal and any(isinstance(each, str) for each in get_args(option))


def _is_a(value: Any, kind: Any) -> bool:
    if kind is tuple:  # YAML has only lists
        return isinstance(value, list)
    return (
        isinstance(kind, type) and isinstance(value, kind) and (not isinstance(value, bool) or kind is bool)
    )


def words_of(option: Any, is_text_allowed: bool = False) -> list[str]:
    """How messages name the values that a type hint, which is no union, accepts."""
    if get_origin(option) is Literal:
        return [repr(each) for each in get_args(option)]
    kind = get_origin(option) or option
    if is_text_allowed and issubclass(kind, enum.Enum):
        return []
    words = {
        types.NoneType: "null",
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
    }
    return [
        words.get(kind) or {list: "a list", tuple: "a list", dict: "a mapping"}.get(kind) or kind.__name__
    ]
