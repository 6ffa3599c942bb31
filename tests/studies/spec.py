"""The file that describes a study, and the runs that it asks for."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_cocodc.errors import InputError, nearest, shown
from hf_cocodc.settings.outer import AUTO, AUTO_VALUES, FOLLOWING
from hf_cocodc.settings.reading import read_file, read_recipe

Settings = dict[str, Any]
Changes = dict[str, Any]
"""New values by name, section.key; null removes a key."""
WHOLE: dict[str, Changes] = {"": {}}
"""The cells of a study that has none."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study. docs/evidence/studies.md explains the keys of its file.

    Attributes:
        name: of its files.
        title: of its tables.
        base: settings of every run: the sections of a recipe.
        arms: changes of the base, which are compared with each other.
        cells: changes that all arms have in common; each cell has its own table.
        seeds: of the comparison.
        sweep_seeds: of the sweep, others.
        grid: the values that the sweep tries, by name.
        grids: by arm, instead of `grid`; an empty one sweeps nothing.
        like: by arm, the arm whose best of the sweep it takes.
        sweep_in: by cell, the cell whose best it takes; one that is not named has its own.
        reference: the arm from which differences are taken.
        common_loss: the arm whose loss all are to reach; by default the worst.
        confidence: of the intervals.
        notes: sentences below the tables.
    """

    name: str
    title: str
    base: Settings
    arms: dict[str, Changes]
    cells: dict[str, Changes]
    seeds: tuple[int, ...]
    sweep_seeds: tuple[int, ...]
    grid: dict[str, list[Any]]
    grids: dict[str, dict[str, list[Any]]]
    like: dict[str, str]
    sweep_in: dict[str, str]
    reference: str
    common_loss: str | None
    confidence: float
    notes: tuple[str, ...]

    def combinations(self, arm: str) -> list[Changes]:
        """What the sweep tries of an arm; a single combination, for example of no changes, needs no runs."""
        grid = self.grids.get(arm, self.grid)
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def settings(self, cell: str, arm: str, chosen: Changes, seed: int) -> Settings:
        """The settings of one run, with numbers for an outer learning rate and momentum that are auto."""
        settings = {**changed(self.base, self.cells[cell], self.arms[arm], chosen), "seed": seed}
        outer = settings["outer"]
        waiting = [name for name in FOLLOWING if outer.get(name) == AUTO]
        outer |= {name: AUTO_VALUES[outer["method"]][name] for name in waiting}
        return settings


def changed(base: Settings, *changes: Changes) -> Settings:
    """Settings with changes, in their order.

    >>> changed({"outer": {"codec": "fp32", "rank": 4}}, {"outer.codec": "int8"}, {"outer.rank": None})
    {'outer': {'codec': 'int8'}}
    """
    settings = copy.deepcopy(base)
    for name, value in itertools.chain.from_iterable(each.items() for each in changes):
        *parents, last = name.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return settings


def read(path: Path, quick: bool = False) -> Study:
    """Read a study; `quick`: at its reduced size.

    Raises:
        InputError: the file or a run of it cannot work.
    """
    content = read_file(path)
    reduced = content.pop("quick", {})
    if quick:
        for key, value in reduced.items():
            merges = key in ("changes", "sweep")
            content[key] = {**(content.get(key) or {}), **value} if merges else value
    known = [
        "title",
        "recipe",
        "changes",
        "arms",
        "cells",
        "sweep",
        "seeds",
        "reference",
        "common_loss",
        "confidence",
        "notes",
    ]
    where = f"study {path.name}"
    for key in content:
        if key not in known:
            raise InputError(f"{where}: {shown(key)} is not known.{nearest(str(key), known)}")
    sweep = content.get("sweep") or {}
    cells = {str(name): given or {} for name, given in (content.get("cells") or WHOLE).items()}
    base, _ = read_recipe(path.parent / content["recipe"])
    study = Study(
        name=path.stem,
        title=content["title"],
        base=changed({"study": {}, **base}, content.get("changes") or {}),
        arms={name: given or {} for name, given in content["arms"].items()},
        cells=cells,
        seeds=_seeds(content["seeds"]),
        sweep_seeds=_seeds(sweep.get("seeds", [])),
        grid=sweep.get("grid") or {},
        grids={name: grid or {} for name, grid in (sweep.get("grids") or {}).items()},
        like=sweep.get("like") or {},
        sweep_in=_sweep_in(sweep.get("in"), cells),
        reference=content["reference"],
        common_loss=content.get("common_loss"),
        confidence=content.get("confidence", 0.95),
        notes=tuple(content.get("notes") or ()),
    )
    _check(study, where)
    return study


def only(study: Study, cells: Sequence[str] | None) -> Study:
    """A study of some of its cells, by default of all. Raises InputError if one is unknown."""
    for cell in cells or ():
        if cell not in study.cells:
            raise InputError(f"--cells {shown(cell)} is not known.{nearest(cell, list(study.cells))}")
    kept = {name: given for name, given in study.cells.items() if cells is None or name in cells}
    for cell in kept:
        if (source := study.sweep_in.get(cell, cell)) not in kept:
            raise InputError(
                f"--cells: the sweep for {shown(cell)} is made in {shown(source)}. Name it, too."
            )
    return replace(study, cells=kept)


def _seeds(given: Any) -> tuple[int, ...]:
    """Seeds as they are written: a list, or the first and the number of them in a mapping."""
    if isinstance(given, Mapping):
        return tuple(range(given["first"], given["first"] + given["count"]))
    return tuple(given)


def _sweep_in(given: Any, cells: Collection[str]) -> dict[str, str]:
    """The cells that take the best of another, as they are written: a mapping, or one cell for all others."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {cell: given for cell in cells if cell != given}


def _check(study: Study, where: str) -> None:
    """Refuse what could only fail after hours. Raises InputError."""
    from .training import STUDY, Run

    shared = set(study.seeds) & set(study.sweep_seeds)
    if shared:
        raise InputError(
            f"{where}: seeds {sorted(shared)} are in the sweep and in the comparison. Use others in the sweep."
        )
    named = {"reference": study.reference, "common_loss": study.common_loss}
    named |= {f"sweep.grids: {arm}": arm for arm in study.grids}
    named |= {f"sweep.like: {arm}": other for arm, other in study.like.items()}
    named |= {f"sweep.like: {arm}": arm for arm in study.like if arm not in study.arms}
    for key, arm in named.items():
        if arm is not None and arm not in study.arms:
            raise InputError(f"{where}: {key}: {shown(arm)} is no arm.{nearest(arm, list(study.arms))}")
    for cell in itertools.chain.from_iterable(study.sweep_in.items()):
        if cell not in study.cells:
            raise InputError(
                f"{where}: sweep.in: {shown(cell)} is no cell.{nearest(cell, list(study.cells))}"
            )
    for cell, source in study.sweep_in.items():
        if source in study.sweep_in:
            raise InputError(
                f"{where}: sweep.in: {shown(cell)} takes the best of {shown(source)}, which has no sweep of its own."
            )
    for cell, arm in itertools.product(study.cells, study.arms):
        combinations = study.combinations(arm)
        if len(combinations) > 1 and arm not in study.like and not study.sweep_seeds:
            raise InputError(
                f"{where}: arm {shown(arm)} has {len(combinations)} combinations, but sweep.seeds is empty."
            )
        settings = study.settings(cell, arm, combinations[0], 0)
        if unknown := settings["study"].keys() - STUDY.keys():
            raise InputError(f"{where}: study.{unknown.pop()} is not known. Known: {', '.join(STUDY)}.")
        try:
            Run(settings).method()
        except InputError as error:
            raise InputError(f"{where}, arm {shown(arm)}: {error}") from None
