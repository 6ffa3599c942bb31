"""Reads YAML 1.2 from people: every failure, and everything too large, is one paragraph with the file and the line."""

import math
import os
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.scanner import Scanner, ScannerError

from ..errors import InputError, short, shown

MAX_BYTES = 128 * 1024
MAX_DEPTH = 50
MAX_VALUES = 10_000  # with each alias counted as what it stands for
MAX_INT = 2**64

_KINDS = {"null": "null", "bool": "true or false", "int": "a whole number", "float": "a number"}
_TAG = "tag:yaml.org,2002:"


def read_file(path: str | os.PathLike) -> Any:
    """Parse the YAML of a recipe's file, which `files.find` has found.

    Raises:
        InputError: the file cannot be read, or it is not valid YAML of a sensible size. The message has the line.
    """
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
        said = ", ".join(part for part in parts if part) or error
        raise InputError(
            f"{where}{_line(error, text)}: not valid YAML: {short(said, 200).rstrip('.')}."
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
