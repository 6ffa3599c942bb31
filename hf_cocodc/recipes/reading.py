"""Reads a recipe: YAML 1.2, overrides from the command line, and a type check of every key."""

import dataclasses
import re
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from ..errors import InputError, nearest

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """PyYAML reads YAML 1.1; this loader reads 1.2: 4e-4 is a number, `on` and `no` are words. A repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML. Raises InputError with `where` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise InputError(
            f"{where}{line}: not valid YAML: {getattr(error, 'problem', None) or error}."
        ) from error


def override_key(content: dict, override: str) -> None:
    """Apply one "section.key=value" to a recipe in place. Raises InputError if it does not fit the recipe."""
    key, equals, value = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise InputError(f"--set {override!r} must be SECTION.KEY=VALUE, for example outer.sync_interval=50.")
    target = content.setdefault(section, {})
    *parents, last = name.split(".")
    for parent in parents:
        if isinstance(target, dict):
            target = target.setdefault(parent, {})
    if not isinstance(target, dict):
        raise InputError(f"--set {override!r}: {key.rpartition('.')[0]} is not a mapping in the recipe.")
    target[last] = read_yaml(value, f"--set {override!r}")


def build(cls: type[T], content: Any, where: str, section: str) -> T:
    """Build the dataclass `cls` from a mapping. Raises InputError for an unknown key, a missing section or a wrong type."""
    if not isinstance(content, Mapping):
        raise InputError(f"{where}: {section} must be a mapping of keys, not {content!r}.")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    dot = f"{section}." if section else ""
    for key in content:
        if key not in fields:
            raise InputError(f"{where}: unknown key {dot}{key}.{nearest(str(key), list(fields))}")
    for name, each in fields.items():
        if name not in content and each.default is each.default_factory is dataclasses.MISSING:
            raise InputError(
                f"{where}: section {dot}{name} is missing. A recipe needs model, tokenizer, data and training."
            )
    values = {key: _convert(value, hints[key], where, f"{dot}{key}") for key, value in content.items()}
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _convert(value: Any, hint: Any, where: str, name: str) -> Any:
    """Check `value` against a type hint. An int becomes a float where only a float fits."""
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where, name)  # type: ignore[arg-type]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = tuple(get_origin(option) or option for option in options)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise InputError(f"{where}: {name}={value!r} must be {wanted}, not {type(value).__name__}.")
    return value
