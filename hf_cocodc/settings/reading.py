"""Reads recipes: from YAML files, which may extend each other, to plain sections and values."""

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor

from ..errors import InputError, nearest, reason, short, shown

MAX_BYTES = 128 * 1024

_EXTENDS = "extends"


class _Constructor(SafeConstructor):
    """ruamel's safe constructor, for which a date is text, and so is "="."""


for _name in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_name}", SafeConstructor.construct_scalar)


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

    Raises InputError, with `where` and the line, if it is not valid YAML, a key is given twice, or the text is too large.
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"{where}: it is longer than {MAX_BYTES // 1024} KiB, too long for a recipe.")
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    parser.composer.warn_double_anchors = False  # YAML allows it
    try:
        return parser.load(text)
    except Exception as error:  # ruamel raises anything for a wrong number, or another version of YAML
        parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
        why = ", ".join(part for part in parts if part) or reason(error)
        raise InputError(
            f"{where}{_line(error, text)}: not valid YAML: {short(why, 200).rstrip('.')}."
        ) from error


def yaml_of(content: Mapping[str, Any]) -> str:
    """YAML that `read_yaml` reads as `content`, in its order."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode, yaml.width = False, 10_000  # raw, some characters would come back as others
    yaml.dump(content, text)
    return text.getvalue()


def _line(error: Any, text: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return f", line {mark.line + 1}"
    position = getattr(error, "position", None)  # of a character that YAML forbids
    return "" if position is None else f", line {1 + text.count(chr(10), 0, position)}"


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


def override_key(content: dict, override: str, knows: Callable[[str], bool] = lambda key: True) -> None:
    """Apply one "section.key=value" to a recipe in place; null removes the key or the section. Raises InputError if it does not
    fit the recipe, or if null is to remove what is not there and nobody `knows`.
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
        if isinstance(target, dict):
            target = target.get(parent, {}) if removes else target.setdefault(parent, {})
    if not isinstance(target, dict):
        raise InputError(
            f"--set {shown(override)}: {short('.'.join(parents))} is not a mapping in the recipe."
        )
    if not removes:
        target[last] = value
    elif last in target:
        del target[last]
    elif not knows(key.strip()):
        raise InputError(
            f"--set {shown(override)}: the recipe has no {short(key)} to remove.{nearest(last, list(target))}"
        )
