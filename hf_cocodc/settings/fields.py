"""What settings have in common: types, rules, help texts, and their form in JSON.

A settings class declares each key once. Recipes, flags and scripts all come here, by its constructor: a value has the type of
its field, or nothing is made of it.
"""

import contextlib
import copy
import dataclasses
import enum
import functools
import json
import math
import re
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from ..errors import InputError, nearest, short, shown

_C = TypeVar("_C", bound=type)
_R = TypeVar("_R")
_T = TypeVar("_T")

hints_of = functools.cache(get_type_hints)

WORDS = {
    **{"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "null": "null"},
    **{"array": "a list", "list": "a list", "object": "a mapping", "dict": "a mapping"},
}
"""How messages and lists of keys name a type, by its name in Python, and in msgspec's errors."""
_MISFIT = re.compile(r"Expected `(.+)`, got `[^`]+`(?: - at (`key` in )?`\$(.*)`)?")

LARGEST = 2**63  # regions tell each other numbers of 64 bits
LONGEST_HOST = 255
_EXPERT = "Expert: "
"""How the help of an expert setting begins."""


class Limit(NamedTuple):
    """What a value may be by itself, also in words that a message says after it. None is always allowed."""

    holds: Callable[[Any], bool]
    words: str

    def check(self, name: str, value: Any) -> None:
        """Raise InputError for a value that may not be."""
        if not self.holds(value):
            raise InputError(f"{name}={shown(value)} {self.words}.")


class Names(NamedTuple):
    """The names that a text may be; `or_own`: or MODULE:NAME, of a user's own."""

    names: Sequence[str]
    or_own: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise InputError for a name that is not known. Each item of a list is a name."""
        for each in value if isinstance(value, list) else [value]:
            if each not in self.names and not (self.or_own and is_own(each)):
                more = " Or MODULE:NAME, for one of your own." if self.or_own else ""
                raise InputError(f"{name}={shown(each)} is not known.{nearest(each, self.names)}{more}")


def is_own(name: object) -> TypeGuard[str]:
    """Whether a setting names something of a user's own.

    >>> is_own("my_module:my_method"), is_own("diloco")
    (True, False)
    """
    return isinstance(name, str) and ":" in name


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
    """A field of a settings class, with a help text and rules: `Limit`, `Names`, and others that its class knows. A list as
    the default is copied for each object.
    """
    help_text = _Help(text)
    help_text.rules = rules
    of_default: Any = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**of_default, metadata={"help": help_text})


def expert(text: str, *rules: Any, default: Any = None) -> Any:
    """A `setting` that most runs leave alone: it comes after all others, and its help says so."""
    return setting(_EXPERT + text, *rules, default=default)


@functools.cache
def rules_of(cls: type, kind: type[_R]) -> dict[str, _R]:
    """The rules of one kind, by field."""
    return {
        each.name: rule
        for each in dataclasses.fields(cls)
        for rule in getattr(each.metadata.get("help"), "rules", ())
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


class _Kind(type):
    """The type of settings classes, which HfArgumentParser does not take: fields such as `device` are flags of other classes."""

    def __getattr__(cls, name: str) -> Any:
        if name == "_argument_group_name":  # HfArgumentParser asks each class that it is given
            raise InputError(
                f"HfArgumentParser(...) makes flags of {cls.__name__} without a prefix, such as --device or --min. Write "
                "hf_cocodc.script_parser(TrainingArguments): its flags are --outer_device and --region_min."
            )
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")


class Settings(metaclass=_Kind):
    """What the settings classes share: a check of each value, and all values as plain data, as
    `transformers.TrainingArguments` gives them.
    """

    SECTION: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the type of each value, and then each value by itself. Raises InputError."""
        cls: Any = type(self)
        dot = f"{self.SECTION}." if self.SECTION else ""
        for name, hint in hints_of(cls).items():
            if name != "SECTION":
                object.__setattr__(self, name, converted(getattr(self, name), hint, f"{dot}{name}"))
        for kind in (Names, Limit):
            for name, rule in rules_of(cls, kind).items():
                value = getattr(self, name)
                if value is not None:
                    rule.check(f"{dot}{name}", value)

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value, as numbers, texts, lists and mappings: `cls(**config.to_dict())` is equal to `config`.

        There is no secret in it: settings name the file of a secret, never the secret.
        """
        return {each.name: copy.deepcopy(getattr(self, each.name)) for each in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def build(cls: type[_T], content: Any, section: str = "") -> _T:
    """Make a settings class of a mapping. Raises InputError for an unknown key, a missing section or an impossible value."""
    if not isinstance(content, Mapping):
        raise InputError(f"{section or 'it'} must be a mapping of keys, not {shown(content)}.")
    fields = {each.name: each for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
    dot = f"{section}." if section else ""
    for key in content:
        if key not in fields:
            raise InputError(f"unknown key {dot}{short(key)}.{nearest(str(key), list(fields))}")
    for name, each in fields.items():
        if name not in content and each.default is each.default_factory is dataclasses.MISSING:
            raise InputError(
                f"section {dot}{name} is missing. A recipe needs model, tokenizer, data and training."
            )
    return cls(**content)


def converted(value: Any, hint: Any, name: str) -> Any:
    """`value` as a type hint wants it: a number of numpy becomes Python's, an int a float where only a float fits, text a number
    where both fit (flags give text), and a mapping its dataclass.

    Raises:
        InputError: the value has another type, or is a number that is not finite or too large.
            The message names `name` and the type.
    """
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, name)  # type: ignore[arg-type]
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, str):
        value = _text(value, name)
    kinds = get_args(hint)
    if isinstance(value, str) and str in kinds and {int, float} & {*kinds}:
        with contextlib.suppress(ValueError):
            value = int(value) if value.isdigit() else float(value)
    try:
        value = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise InputError(_in_words(str(error), value, name)) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}={value} must be finite.")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise InputError(f"{name}={shown(value)} must fit into 64 bits.")
    return value


def _text(value: str, name: str) -> str:
    """A text without its class, for example that of an enumeration. Raises InputError if it is none in UTF-8."""
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in value.encode():
            return str.__str__(value)
    raise InputError(f"{name}={shown(value)} must be text in UTF-8, without zero bytes. Correct it.")


def _in_words(error: str, value: Any, name: str) -> str:
    """An error of msgspec in our words."""
    match = _MISFIT.fullmatch(error)
    if match is None:
        return f"{name}={shown(value)} cannot be: {error}."
    kinds, is_key, place = match.groups()
    wanted = " or ".join(WORDS.get(kind, kind) for kind in kinds.split(" | "))
    if is_key:
        key = next(each for each in value if not isinstance(each, str))
        return f"{name}: the key {shown(key)} must be {wanted}, not {type(key).__name__}."
    for number in re.findall(r"\[(\d+|\.\.\.)\]", place or ""):
        if number == "...":  # msgspec does not say at which key
            return f"{name}={shown(value)}: each value in it must be {wanted}."
        value, name = [*value][int(number)], f"{name}[{number}]"
    return f"{name}={shown(value)} must be {wanted}, not {type(value).__name__}."


def loosened(hint: Any) -> Any:
    """A hint of another library for `converted`, which then refuses only what cannot be meant. Any text passes for a word: a
    Literal may stand for more than it lists, like PEFT's "pissa_niter_[number of iters]". Any mapping passes for a dataclass.
    """
    found: list[Any] = []
    for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        kind = get_origin(option) or option
        if kind is Literal:
            found += map(type, get_args(option))
        elif dataclasses.is_dataclass(kind):
            found.append(dict)
        elif kind in (list, tuple):
            found.append(list[loosened((*get_args(option), Any)[0])])  # type: ignore[misc]
        elif kind is dict:
            found.append(dict[str, loosened((*get_args(option), Any, Any)[1])])  # type: ignore[misc]
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            found.append(str)
        else:
            found.append(option if kind in (bool, int, float, str, types.NoneType) else Any)
    # msgspec knows no union of two kinds of mappings, or of lists
    kinds = [get_origin(each) or each for each in found]
    found = [kind if kinds.count(kind) > 1 else each for kind, each in zip(kinds, found, strict=True)]
    return Union[tuple(found)]  # noqa: UP007  a union of what is in a list


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
