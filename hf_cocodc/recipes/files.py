"""Finds the file of a recipe, and reads it with the recipes that it extends."""

import os
from pathlib import Path
from typing import Any

from ..errors import InputError, short, shown
from .parsing import read_file

_EXTENDS = "extends"


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name: quickstart/diloco and the like."""
    here = Path(__file__).resolve()
    # an installed wheel has a copy beside this module; a clone has the folder itself
    folders = [here.parent / "quickstart", here.parents[2] / "recipes" / "quickstart"]
    folder = next((each for each in folders if each.is_dir()), folders[0])
    return {f"quickstart/{path.stem}": path for path in sorted(folder.glob("*.yaml"))}


def find(name: str | os.PathLike, folder: Path | None = None) -> Path:
    """The file of a recipe: a path, relative to `folder` (by default where the process runs), or the name of a shipped one.

    A file wins over a shipped recipe of the same name.

    Raises:
        InputError: there is neither, or the path is impossible.
    """
    path = (folder or Path()) / name
    try:
        if path.is_file():
            return path
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise InputError(f"recipe {shown(os.fspath(name))} cannot be read: {error.strerror}.") from error
    known = shipped()
    found = known.get(os.fspath(name).removesuffix(".yaml"))
    if found is None:
        raise InputError(
            f"recipe {shown(os.fspath(name))} is not a file. These come with the package: {', '.join(known)}."
        )
    return found


def read_recipe(name: str | os.PathLike) -> tuple[dict[str, Any], str]:
    """A recipe's content, and how messages call the recipe.

    A recipe may extend another one: `extends: other.yaml`, relative to its own file (or the name of a shipped recipe). Then
    it only holds what differs: mappings are merged key by key, other values are replaced, and null removes a key.

    Raises:
        InputError: a file is missing or cannot be read, is no mapping, or extends itself.
    """
    chain = read_chain(name)
    content: dict[str, Any] = {}
    for _, each in reversed(chain):
        content = _merged(content, each)
    extended = ", which extends ".join(short(path.name) for path, _ in chain)
    return content, f"recipe {extended}"


def read_chain(name: str | os.PathLike) -> list[tuple[Path, dict[str, Any]]]:
    """The file of a recipe and its content, then those of the recipe that it extends, and so on.

    Raises:
        InputError: as `read_recipe`.
    """
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
    """`base` with `changes`: neither is written to."""
    merged = dict(base)
    for key, value in changes.items():
        if value is None and key in base:
            del merged[key]
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merged(base[key], value)
        else:
            merged[key] = value
    return merged
