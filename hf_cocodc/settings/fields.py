"""What settings have in common: help texts, rules, and their form in JSON."""

import contextlib
import copy
import dataclasses
import functools
import json
import textwrap
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

from ..errors import InputError, shown

_C = TypeVar("_C", bound=type)
_R = TypeVar("_R")

_hints = functools.cache(get_type_hints)

LONGEST_HOST = 255
_EXPERT = "Expert: "
"""How the help of an expert setting begins."""


class Limit(NamedTuple):
    """What a value may be by itself, also in words that a message says after it. None is always allowed."""

    holds: Callable[[Any], bool]
    words: str


def at_least(least: int) -> Limit:
    return Limit(lambda value: value >= least, f"must be at least {least}")


def within(least: int, most: int) -> Limit:
    return Limit(lambda value: least <= value <= most, f"must lie in {least} .. {most}")


def among(*names: str) -> Limit:
    return Limit(lambda value: value in names, f"must be one of {', '.join(names)}")


class _Help(str):
    """A help text with the rules of its field. HfArgumentParser gives argparse all other metadata, which it does not take."""

    rules: tuple[Any, ...] = ()


def setting(text: str, *rules: Any, default: Any = None) -> Any:
    """A field of a settings class, with a help text and rules: a `Limit`, and others that its class knows."""
    help_text = _Help(text)
    help_text.rules = rules
    return dataclasses.field(default=default, metadata={"help": help_text})


def expert(text: str, *rules: Any, default: Any = None) -> Any:
    """A `setting` that most runs leave alone: it comes after all others, and its help says so."""
    return setting(_EXPERT + text, *rules, default=default)


@functools.cache
def rules_of(cls: type, kind: type[_R]) -> dict[str, _R]:
    """The rules of one kind, by field."""
    return {
        each.name: rule
        for each in dataclasses.fields(cls)
        for rule in getattr(each.metadata["help"], "rules", ())
        if isinstance(rule, kind)
    }


def is_expert(field: dataclasses.Field) -> bool:
    """Whether a field was made by `expert`."""
    return field.metadata["help"].startswith(_EXPERT)


def meaning(field: dataclasses.Field) -> str:
    """The help text of a field."""
    return field.metadata["help"].removeprefix(_EXPERT)


def documented(cls: _C) -> _C:
    """Add every field and its help text to the docstring of a settings class, because `help` shows no metadata."""
    lines = [cls.__doc__ or ""]
    groups = ("Attributes:", False), ("Attributes for experts, which most runs leave alone:", True)
    for head, of_experts in groups:
        fields = [each for each in dataclasses.fields(cls) if is_expert(each) == of_experts]
        lines += ["", head] if fields else []
        for each in fields:
            default = "" if each.default is None else f" Default: {each.default}."
            text = f"{each.name}: {meaning(each)}{default}"
            lines += textwrap.wrap(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
    cls.__doc__ = "\n".join(lines) + "\n"
    return cls


class Settings:
    """What the settings classes share: a check of each value, and all values as plain data, as
    `transformers.TrainingArguments` gives them.
    """

    SECTION: ClassVar[str]

    def __post_init__(self) -> None:
        """Take numbers that are given as text, and check each value by itself. Raises InputError."""
        cls: Any = type(self)
        for name, hint in _hints(cls).items():
            _take_number(self, name, get_args(hint))
        for name, rule in rules_of(cls, Limit).items():
            value = getattr(self, name)
            if value is not None and not rule.holds(value):
                raise InputError(f"{self.SECTION}.{name}={shown(value)} {rule.words}.")

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value, as numbers, texts, lists and mappings: `cls(**config.to_dict())` is equal to `config`.

        There is no secret in it: settings name the file of a secret, never the secret.
        """
        return {each.name: copy.deepcopy(getattr(self, each.name)) for each in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def _take_number(config: Settings, name: str, kinds: tuple[Any, ...]) -> None:
    """Turn text into a number, in a field that accepts both: flags give it text. A float if that is its kind of number."""
    value = getattr(config, name)
    if str not in kinds or not {int, float} & {*kinds}:
        return
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value) if value.isdigit() else float(value)
    if type(value) is int and int not in kinds:
        value = float(value)
    object.__setattr__(config, name, value)


def check_host(name: str, host: str) -> None:
    """Raise InputError if `host` cannot be a machine's name or address. Whether there is one, only a network can say."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise InputError(f"{name}: {shown(host)} is not the name of a machine ({error}).") from error
    if len(host) > LONGEST_HOST:
        raise InputError(
            f"{name}: {shown(host)} has {len(host)} characters, and the name of a machine has at most {LONGEST_HOST}. Correct it."
        )
