"""Reads recipes: from YAML files, which may extend each other, to plain sections and values."""

import dataclasses
import enum
import math
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.scanner import Scanner, ScannerError

from ..errors import InputError, nearest, short, shown

MAX_BYTES = 128 * 1024
MAX_DEPTH = 50
MAX_VALUES = 10_000  # with each alias counted as what it stands for
MAX_INT = 2**64

_KINDS = {"null": "null", "bool": "true or false", "int": "a whole number", "float": "a number"}
_TAG = "tag:yaml.org,2002:"

_EXTENDS = "extends"
T = TypeVar("T")


def read_file(path: str | os.PathLike) -> Any:
    """Parse a recipe's file. Raises InputError, with the line, if it cannot be read, or is no YAML of a sensible size."""
    where = f"recipe {shown(os.fspath(path))}"
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        return read_yaml(content.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: byte {error.start} is not UTF-8. A recipe is a text file in YAML."
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML 1.2 into None, bool, int, float, str, list and dict. Dates are text. Aliases and merge keys (<<) work.

    Raises:
        InputError: with `where` and the line: it is not valid YAML, a key is given twice or is no word, a value has a tag, is
            NaN or does not fit into 64 bits, or the text is too large (also with its aliases expanded).
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"{where}: it is longer than {MAX_BYTES // 1024} KiB, too long for a recipe.")
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    parser.Scanner = _Scanner
    parser.max_depth = MAX_DEPTH
    parser.composer.warn_double_anchors = False  # YAML allows it
    try:
        return parser.load(text)
    except MaxDepthExceededError as error:
        raise InputError(
            f"{where}{_line(error, text)}: nested more than {MAX_DEPTH} deep. A recipe needs a few levels."
        ) from error
    except YAMLError as error:
        parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
        reason = ", ".join(part for part in parts if part) or error
        raise InputError(
            f"{where}{_line(error, text)}: not valid YAML: {short(reason, 200).rstrip('.')}."
        ) from error


def _line(error: Any, text: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return f", line {mark.line + 1}"
    position = getattr(error, "position", None)  # of a character that YAML forbids
    return "" if position is None else f", line {1 + text.count(chr(10), 0, position)}"


def _refusal(problem: str, node: Node) -> ConstructorError:
    return ConstructorError(None, None, problem, node.start_mark)


class _Scanner(Scanner):
    """ruamel's scanner for YAML 1.2 alone: of versions that it does not know it raises anything."""

    def scan_yaml_directive_value(self, start_mark: Any) -> Any:
        try:
            version = super().scan_yaml_directive_value(start_mark)
        except ValueError:  # thousands of digits
            version = None
        if version != (1, 2):
            raise ScannerError(None, None, "a recipe is YAML 1.2; remove the %YAML line", start_mark)
        return version


class _Constructor(SafeConstructor):
    """ruamel's safe constructor for the values that a recipe may hold."""

    def construct_document(self, node: Node) -> Any:
        self._sizes: dict[int, int] = {}
        self._size(node)
        return super().construct_document(node)

    def _size(self, node: Node) -> int:
        """The number of values in a node; an alias counts as what it stands for, or a few lines could mean billions."""
        if id(node) in self._sizes:
            if not self._sizes[id(node)]:
                raise _refusal("a value contains itself", node)
            return self._sizes[id(node)]
        self._sizes[id(node)] = 0
        children = () if isinstance(node, ScalarNode) else node.value
        if isinstance(node, MappingNode):
            children = [each for pair in node.value for each in pair]
            if complex_key := next((key for key, _ in node.value if not isinstance(key, ScalarNode)), None):
                raise _refusal("a key is a list or a mapping; keys are words", complex_key)
        size = 1 + sum(self._size(child) for child in children)
        if size > MAX_VALUES:
            raise _refusal(f"more than {MAX_VALUES} values (each alias counts as what it stands for)", node)
        self._sizes[id(node)] = size
        return size

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError) as error:
            kind = _KINDS.get(str(node.tag).removeprefix(_TAG), "what its tag says")
            raise _refusal(f"{shown(node.value)} is not {kind}", node) from error
        if isinstance(value, int) and abs(value) >= MAX_INT:
            raise _refusal("a whole number does not fit into 64 bits", node)
        if isinstance(value, float) and math.isnan(value):
            raise _refusal(".nan is not a number that a recipe can use", node)
        return value

    def check_mapping_key(self, node: Node, key_node: Node, mapping: Any, key: Any, value: Any) -> bool:
        if key in mapping:
            raise _refusal(f"key {shown(key)} is given twice", key_node)
        return True

    def construct_undefined(self, node: Node) -> None:
        raise _refusal(f"the tag {short(node.tag)} is not allowed; values need no tags", node)

    def construct_text(self, node: Node) -> Any:
        return self.construct_scalar(node)


_Constructor.yaml_constructors = {
    f"{_TAG}{name}": SafeConstructor.yaml_constructors[f"{_TAG}{name}"]
    for name in ("null", "bool", "int", "float", "str", "seq", "map")
} | {
    f"{_TAG}timestamp": _Constructor.construct_text,
    f"{_TAG}value": _Constructor.construct_text,
    None: _Constructor.construct_undefined,
}


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name, such as quickstart/diloco."""
    package = Path(__file__).resolve().parents[1]
    folders = [package / "recipes" / "quickstart", package.parent / "recipes" / "quickstart"]
    folder = next((each for each in folders if each.is_dir()), folders[0])
    return {f"quickstart/{path.stem}": path for path in sorted(folder.glob("*.yaml"))}


def find(name: str | os.PathLike, folder: Path | None = None) -> Path:
    """The file of a recipe: a path, relative to `folder` (by default where the process runs), or else the name of a shipped
    one. Raises InputError if there is neither, or the path is impossible.
    """
    path = (folder or Path()) / name
    try:
        if path.is_file():
            return path
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise InputError(f"recipe {shown(os.fspath(name))} cannot be read: {error.strerror}.") from error
    known = shipped()
    recipe = known.get(os.fspath(name).removesuffix(".yaml"))
    if recipe is None:
        raise InputError(
            f"recipe {shown(os.fspath(name))} is not a file. These come with the package: {', '.join(known)}."
        )
    return recipe


def read_recipe(name: str | os.PathLike) -> tuple[dict[str, Any], str]:
    """A recipe's content, and how messages call the recipe. Raises InputError if a file cannot be read, is no mapping, or
    extends itself.

    A recipe may extend another one: `extends: other.yaml`, relative to its own file (or the name of a shipped recipe). Then it
    only holds what differs: mappings are merged key by key, other values are replaced, and null removes a key.
    """
    chain = read_chain(name)
    content: dict[str, Any] = {}
    for _, each in reversed(chain):
        content = _merged(content, each)
    extended = ", which extends ".join(short(path.name) for path, _ in chain)
    return content, f"recipe {extended}"


def read_chain(name: str | os.PathLike) -> list[tuple[Path, dict[str, Any]]]:
    """The file of a recipe and its content, then those of the recipe that it extends, and so on. Raises like `read_recipe`."""
    path = find(name)
    chain = [(path, _read(path))]
    while _EXTENDS in chain[-1][1]:
        last, content = chain[-1]
        base = content.pop(_EXTENDS)
        where = f"recipe {short(last.name)}"
        if not isinstance(base, str):
            raise InputError(
                f"{where}: extends={shown(base)} must be the path of one other recipe, relative to this one: "
                "extends: diloco.yaml."
            )
        try:
            path = find(base, last.parent)
            if any(path.samefile(each) for each, _ in chain):
                names = " -> ".join(short(each.name) for each in [*(each for each, _ in chain), path])
                raise InputError(f"the recipes extend each other in a circle: {names}. Remove one extends.")
            chain.append((path, _read(path)))
        except InputError as error:
            raise InputError(f"{where}: extends: {error}") from None
    return chain


def _read(path: Path) -> dict[str, Any]:
    content = read_file(path)
    if not isinstance(content, dict):
        raise InputError(
            f"recipe {shown(os.fspath(path))} must be a mapping of sections, for example outer: and training:."
        )
    return content


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, neither of which is written to."""
    merged = dict(base)
    for key, value in changes.items():
        if value is None and key in base:
            del merged[key]
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merged(base[key], value)
        else:
            merged[key] = value
    return merged


def override_key(content: dict, override: str) -> None:
    """Apply one "section.key=value" to a recipe in place; null removes the key, and "section=null" a section. Raises InputError
    if it does not fit the recipe.
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
    """Build a dataclass from a mapping. Raises InputError for an unknown key, a missing section or a wrong type."""
    if not isinstance(content, Mapping):
        raise InputError(f"{section or 'it'} must be a mapping of keys, not {shown(content)}.")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    dot = f"{section}." if section else ""
    for key in content:
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

    A hint may be a class, a union, a Literal, list[X] or dict[str, X]. Where it names a dataclass beside other types, a mapping
    is taken as it is: the library that has this hint knows what it does with it. Where another library has the hint (not
    `is_ours`), any text passes for a Literal, which may stand for more than it lists, like PEFT's "pissa_niter_[number of
    iters]".

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
    """How messages name the values that a type hint accepts, which is no union."""
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
