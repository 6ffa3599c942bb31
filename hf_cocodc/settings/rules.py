"""What settings have in common: help texts, numbers that flags give as text, and errors that name the rule."""

import contextlib
from dataclasses import field
from typing import Any

from ..errors import InputError, shown


def setting(text: str, default: Any = None) -> Any:
    """A field of a settings class, with a help text."""
    return field(default=default, metadata={"help": text})


def take_number(config: Any, name: str) -> None:
    """Turn a field that holds a number as text into a number. Flags give text to fields that also accept a word."""
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
    """Raise InputError if `host` cannot be the name or the address of a machine. Whether there is one, only a network can say."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise InputError(f"{name}: {shown(host)} is not the name of a machine ({error}).") from error
