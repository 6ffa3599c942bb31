"""What settings have in common: help texts, their form in JSON, and errors that name the rule."""

import contextlib
import copy
import dataclasses
import json
import textwrap
from typing import Any, ClassVar, TypeVar

from ..errors import InputError, shown

_C = TypeVar("_C", bound=type)

_EXPERT = "Expert: "
"""How the help of an expert setting begins. HfArgumentParser gives argparse all other metadata, which it does not take."""


def setting(text: str, default: Any = None) -> Any:
    """A field of a settings class, with a help text."""
    return dataclasses.field(default=default, metadata={"help": text})


def expert(text: str, default: Any = None) -> Any:
    """A `setting` that most runs leave alone: it comes after all others, and its help says so."""
    return setting(_EXPERT + text, default)


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
    """What the settings classes share: their values as plain data, as `transformers.TrainingArguments` gives them."""

    SECTION: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value, as numbers, texts, lists and mappings: `cls(**config.to_dict())` is equal to `config`.

        There is no secret in it: settings name the file of a secret, never the secret.

        Raises:
            InputError: a field holds an object, such as a Method.
        """
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name, value in values.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"{self.SECTION}.{name} is {shown(value)}, which is no number, text, list or mapping. Put what makes it "
                    f"into a module, and name that: {name}='my_module:my_{name}'."
                ) from error
        return copy.deepcopy(values)

    def to_json_string(self) -> str:
        """`to_dict` as JSON. Raises InputError if a field holds an object, such as a Method."""
        return json.dumps(self.to_dict(), indent=2)


def take_number(config: Any, name: str) -> None:
    """Turn a field that holds a number as text into a number: flags give text to fields that also accept a word."""
    value = getattr(config, name)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            object.__setattr__(config, name, int(value) if value.isdigit() else float(value))


def require(config: Any, name: str, holds: Any, rule: str, section: str = "outer") -> None:
    """Raise InputError with `rule` if `holds` is false for the field `name`; None is always allowed."""
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise InputError(f"{section}.{name}={shown(value)} {rule}.")


def check_host(name: str, host: str) -> None:
    """Raise InputError if `host` cannot be a machine's name or address. Whether there is one, only a network can say."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise InputError(f"{name}: {shown(host)} is not the name of a machine ({error}).") from error
