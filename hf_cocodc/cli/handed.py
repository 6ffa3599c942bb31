"""`hf-cocodc train --join` without a recipe: the run gives it, and the command says what differs on this machine."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, short, shown
from ..settings import RegionConfig
from ..settings.environment import ENV_COORDINATOR, ENV_RUN
from ..settings.handed import PLACES, Handed, at, content_of, doubtful, read_handed, received
from ..settings.reading import override_key, yaml_of
from ..settings.recipe import Recipe
from ..training.building import output_dir
from ..training.precheck import PATHS, check_sections
from .joining import of_run, recipe_at, refuse_to_join
from .part import MachinePart

_FOLDER = "training.output_dir"
_BATCH, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_OF_ASKING = ("start_timeout_s", "secret_file", "coordinator", "run")
"""Settings of `regions` that count before there is a recipe."""


def take(options: argparse.Namespace) -> Recipe | None:
    """The recipe of the run that `options` are to join, with their changes, after every check that needs no torch. It is
    written beside the run's folder, unless nothing is to be written. Afterwards, `options` name this file, without changes.
    Returns None, and says so, if the run has finished.

    Raises:
        InputError: `options` do not join a run; there are several; it has no recipe, or one that is not for this machine.
        MeetingError: no coordinator answers, or one with another secret or version; the run does not train.
    """
    part = _asking(options)
    if not part.join:
        raise InputError(
            "name a recipe: hf-cocodc train RECIPE. Only to join a run that trains, none is needed: hf-cocodc train --join "
            "--coordinator HOST:PORT takes that of the run."
        )
    refuse_to_join(options.resume, part.regions.coordinator)
    address = str(part.regions.coordinator)
    found = of_run(part, address, recipe_at)
    if found is None:
        return None
    name, handed = found[0], received(found[1])
    if not handed.text:
        raise InputError(
            f"run {name!r} does not hand over its recipe: {short(handed.why, 200)}. Get the file from whoever has started the "
            "run: hf-cocodc train RECIPE --join --coordinator HOST:PORT."
        )
    where = f"the recipe of run {name!r}, as the coordinator at {address} gives it"
    content = read_handed(handed, where)
    content["regions"] = {**content.get("regions", {}), "run": name}
    content["training"] = {_FOLDER.partition(".")[2]: f"runs/{name}", **content["training"]}
    recipe = Recipe.from_dict(content, where, options.overrides)
    _check_folder(name, options)
    folder = output_dir(recipe)
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    path = folder.parent / f"{folder.name or 'run'}.yaml"
    doubts = doubtful(recipe, [*options.overrides, _FOLDER])  # the folder is of this command
    if not doubts:
        _refuse_missing(recipe, handed, name, options)
        check_sections(recipe)
        _refuse_batch(recipe, handed, options)
    if not options.dry_run:
        path = _write(path, recipe, name, address)
    if doubts:
        raise _refusal(doubts, name, path, address, options)
    print(f"recipe of run {name!r}{'' if options.dry_run else f', written to {path}'}", flush=True)
    options.recipe, options.overrides = str(path), []
    return recipe


def _asking(options: argparse.Namespace) -> MachinePart:
    """What is known of the run before its recipe."""
    given: dict[str, Any] = {}
    for override in options.overrides:
        override_key(given, override)
    regions = given.get("regions") or {}
    early = RegionConfig(**{name: regions[name] for name in _OF_ASKING if name in regions})
    coordinator = options.coordinator or early.coordinator or os.environ.get(ENV_COORDINATOR)
    secret_file = options.secret_file or early.secret_file
    name = options.run_name or early.run or os.environ.get(ENV_RUN) or None
    regions = RegionConfig(
        coordinator=coordinator,
        secret_file=secret_file,
        run=name,
        start_timeout_s=early.start_timeout_s,
    )
    return MachinePart(regions, options.region, True, bool(options.join) or regions.joins(os.environ), name)


def _check_folder(name: str, options: argparse.Namespace) -> None:
    """Raise InputError if the run's name cannot be a folder: it is somebody else's choice."""
    is_given = any(each.partition("=")[0].strip() == _FOLDER for each in options.overrides)
    if not is_given and (name.startswith((".", "-", "~")) or not name.isprintable() or "/" in name):
        raise InputError(
            f"the name of run {shown(name)} is no name for a folder. Choose one: --set {_FOLDER}=FOLDER."
        )


def _refuse_missing(recipe: Recipe, handed: Handed, name: str, options: argparse.Namespace) -> None:
    """Raise InputError for folders that are not on this machine."""
    mine = {each.partition("=")[0].strip() for each in options.overrides}
    missing = {
        key: value
        for key in PLACES
        if (value := at(recipe, key)) is not None
        and key not in mine
        and (key in handed.folders or value.startswith((*PATHS, "~")))
        and not os.path.exists(value)
    }
    if not missing:
        return
    named = " and ".join(f"{key}={shown(value)}" for key, value in missing.items())
    sets = " ".join(f"--set {key}=FOLDER" for key in missing)
    same = [shown(Path(value).name) for key, value in missing.items() if key != PLACES[0]]
    rule = (
        f" Its last part must be {' and '.join(dict.fromkeys(same))} there, too, unless regions.may_differ names the key."
        if same
        else ""
    )
    raise InputError(
        f"run {name!r} trains with {named}, and there is no such folder or file here. Copy it, or say where it is on this "
        f"machine: {sets}.{rule}"
    )


def _devices(recipe: Recipe, options: argparse.Namespace) -> int | None:
    """How many GPUs a region of this command gets, 0 for the CPU; None if that is for accelerate's arguments to say."""
    from ..run.gpus import visible

    if options.launcher:
        return None
    return 0 if recipe.training.get("use_cpu") else len(visible())


def _refuse_batch(recipe: Recipe, handed: Handed, options: argparse.Namespace) -> None:
    """Raise InputError if a region here would train on another number of sequences in a step, and may not."""
    each, micro, devices = *_batch(recipe), _devices(recipe, options)
    if devices is None or not handed.batch or "batch" in recipe.regions.allowed:
        return
    here = each * micro * max(1, devices)
    if here == handed.batch:
        return
    on = f" x {devices} GPUs" if devices > 1 else ""
    per_step = each * max(1, devices)
    if handed.batch % per_step == 0:
        way_out = f"--set training.{_ACCUMULATION}={handed.batch // per_step}"
    else:
        way_out = f"--set training.{_BATCH}=N --set training.{_ACCUMULATION}=M"
    raise InputError(
        f"a region here would train on {each} x {micro}{on} = {here} sequences in an inner step (training.{_BATCH} x training."
        f"{_ACCUMULATION} x GPUs), and those of the run train on {handed.batch}. Make it the same: {way_out}."
    )


def _batch(recipe: Recipe) -> tuple[int, int]:
    """Sequences on a device, and how many such batches make a step; defaults of Trainer where the recipe has none."""
    each, micro = recipe.training.get(_BATCH, 8), recipe.training.get(_ACCUMULATION, 1)
    is_number = isinstance(each, int) and isinstance(micro, int) and min(each, micro) > 0
    return (each, micro) if is_number else (0, 0)  # what is wrong with it, the checks of training say


def _write(path: Path, recipe: Recipe, name: str, address: str) -> Path:
    """The file of a recipe: one of this name that holds it, or a new one. A file that is there never changes: a region that is
    started at the same time may be about to read it.
    """
    number, text = 0, yaml_of(content_of(recipe))
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        place = path.with_name(f"{path.stem}.{number}.yaml") if number else path
        head = (
            f"# The recipe of run {name!r}, as the coordinator at {address} gave it, with the changes for this machine.\n"
            f"# To bring the region back: hf-cocodc train {place} --join --coordinator {address}\n"
            "# Once all regions have stopped, each goes on with --region R --resume in place of --join; if they are N by now, "
            "with --regions N.\n"
        )
        try:
            with place.open("x", encoding="utf-8") as file:
                file.write(head + text)
            return place
        except FileExistsError:
            if place.is_file() and place.read_text(encoding="utf-8", errors="replace") == head + text:
                return place
        number += 1


def _refusal(
    doubts: Mapping[str, Any], name: str, path: Path, address: str, options: argparse.Namespace
) -> InputError:
    named = ", ".join(f"{key}={shown(value)}" for key, value in doubts.items())
    place = (
        f"It is written to {path}: read it, and if you trust it, name it"
        if not options.dry_run
        else ("Without --dry-run it is written to a file, to read it. If you trust it, name that")
    )
    return InputError(
        f"the recipe of run {name!r} has settings that can run code on this machine, or name files: {named}. They do not count "
        f"from a coordinator. {place}: hf-cocodc train {path} --join --coordinator {address}. Or give them yourself, with --set."
    )
