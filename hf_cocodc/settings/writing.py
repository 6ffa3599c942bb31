"""Writes recipes with the comments of those that they come from. Comments belong to keys, so that keys may come and go."""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from ..errors import InputError
from .reading import read_yaml

Place = tuple[str, ...]
"""Keys that lead to a value; of a list the numbers of its items."""
_BESIDE = re.compile(r"[\s,:]*(?:[&!]\S+\s+)*(#.*)")
_WORD = re.compile(r"[\w.-]+")


class Annotation(NamedTuple):
    """What a file has at a key, or at an item of a list, apart from its value.

    Attributes:
        before: the lines above it: comments, and empty lines.
        beside: the comment at the end of its line.
        after: the lines below its value that are indented as if they belonged to it, such as keys that are commented out.
        source: its value as it is written, where that is one line.
    """

    before: tuple[str, ...] = ()
    beside: str = ""
    after: tuple[str, ...] = ()
    source: str = ""


class Notes(NamedTuple):
    """The comments of a file: `head` above the first key, `at` each place, and `end` below the last section."""

    head: tuple[str, ...]
    at: Mapping[Place, Annotation]
    end: tuple[str, ...]

    def over(self, base: "Notes") -> "Notes":
        """These, and those of another file at places of which this one says nothing."""
        return Notes(
            self.head,
            {**base.at, **{place: note for place, note in self.at.items() if note != Annotation()}},
            self.end,
        )


def notes_of(path: Path) -> Notes:
    """The comments of a recipe's file, which has been read before."""
    text = path.read_text(encoding="utf-8-sig")
    lines = text.split("\n")  # as ruamel's marks count them; str.splitlines knows more ends of lines
    root = YAML(typ="safe", pure=True).compose(text)
    at: dict[Place, Annotation] = {}
    if not isinstance(root, MappingNode) or not root.value:
        return Notes((), at, ())
    _note(root, (), lines, at)
    first, last = (str(root.value[place][0].value) for place in (0, -1))
    head = at[(first,)].before
    at[(first,)] = at[(first,)]._replace(before=())
    after, end = _parted(_above(len(lines), lines), indent=0)
    at[(last,)] = at[(last,)]._replace(after=after)
    return Notes(head, at, end)


def _note(node: Node, place: Place, lines: Sequence[str], at: dict[Place, Annotation]) -> None:
    """Note what stands at the children of a mapping or a list."""
    if isinstance(node, MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value if isinstance(key, ScalarNode)]
    else:
        children = [(str(number), item, item) for number, item in enumerate(node.value)]
    previous: Place | None = None
    for name, key, value in children:
        here, start = (*place, name), key.start_mark
        line = lines[start.line]
        above: tuple[str, ...] = ()
        if line[: start.column].strip() in ("", *(["-"] if key is value else [])):
            above = _above(start.line, lines)
        if previous is not None:
            after, above = _parted(above, len(line) - len(line.lstrip()))
            at[previous] = at[previous]._replace(after=after)
        is_there = value.start_mark.line == start.line  # else it is an alias, or begins in the next line
        is_line = is_there and value.end_mark.line == start.line
        end = value.end_mark if is_line else key.end_mark
        beside = _BESIDE.match(lines[end.line][end.column :]) if is_line or key is not value else None
        source = line[value.start_mark.column : value.end_mark.column] if is_line else ""
        at[here] = Annotation(tuple(map(str.strip, above)), beside[1] if beside else "", (), source)
        if not isinstance(value, ScalarNode) and value.start_mark.line >= start.line:
            _note(value, here, lines, at)
        previous = here


def _above(number: int, lines: Sequence[str]) -> tuple[str, ...]:
    """The comments and empty lines right above a line."""
    first = number
    while first > 0 and (not lines[first - 1].strip() or lines[first - 1].lstrip().startswith("#")):
        first -= 1
    return tuple(lines[first:number])


def _parted(lines: Sequence[str], indent: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines between two keys: those up to the last one that is indented more than the second key, and the others."""
    deeper = [
        place
        for place, line in enumerate(lines, start=1)
        if len(line) - len(line.lstrip()) > indent and line.strip()
    ]
    cut = deeper[-1] if deeper else 0
    return tuple(line.strip() for line in lines[:cut]), tuple(line.strip() for line in lines[cut:])


def written(content: Mapping[str, Any], notes: Notes) -> str:
    """A recipe as YAML, with comments."""
    lines = [*notes.head, *_lines(content, (), notes.at), *notes.end]
    return "\n".join(lines).strip("\n") + "\n"


def _lines(
    content: Mapping[str, Any] | Sequence[Any], place: Place, at: Mapping[Place, Annotation]
) -> Iterator[str]:
    is_mapping = isinstance(content, Mapping)
    pad = "  " * len(place)
    for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
        here = (*place, str(key))
        note = at.get(here, Annotation())
        yield from (f"{pad}{line}".rstrip() for line in note.before)
        name = f"{pad}{_key(key)}:" if is_mapping else f"{pad}-"
        beside = f"  {note.beside}" if note.beside else ""
        if _means(note.source, value):
            yield f"{name} {note.source}{beside}"
        elif isinstance(value, dict | list) and value:
            below = list(_lines(value, here, at))
            if is_mapping:
                yield f"{name}{beside}"
            else:  # the first line of an item is beside its dash
                below[0] = f"{name} {below[0].lstrip()}"
            yield from below
        else:
            yield f"{name} {scalar(value)}{beside}"
        yield from (f"{pad}  {line}".rstrip() for line in note.after)


def _means(source: str, value: Any) -> bool:
    """Whether a text from a file stands for a value."""
    with contextlib.suppress(InputError):
        return bool(source) and repr(read_yaml(f"x: {source}", "")) == repr({"x": value})
    return False


def _key(key: Any) -> str:
    return scalar(key) if not isinstance(key, str) or _WORD.fullmatch(key) else _quoted(key)


def scalar(value: Any) -> str:
    """A value as YAML on one line: bare where that reads as the same value."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    if isinstance(value, str) and value.isprintable() and _means(value, value):
        return value
    return _quoted(value)


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)
