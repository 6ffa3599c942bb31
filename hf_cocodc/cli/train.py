"""`hf-cocodc train`: launch the regions of a recipe on this machine, all of them or only one."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ..settings.recipe import add_recipe
from ..training.building import output_dir
from ..training.launch import OF_RECIPES, Launch, Program
from . import dry
from .checks import recipe_of
from .handed import take
from .joining import name_of
from .part import part_of
from .supervising import Order, add_options, carry_out


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        usage="%(prog)s [RECIPE] [OPTIONS] [-- ACCELERATE LAUNCH ARGS]",
        help="train a recipe across regions",
        description="Train a recipe. Without --region, this machine runs all regions. With --region and --coordinator, it runs "
        "only one. With --join and --coordinator it needs no RECIPE: it takes that of the run. With GPUs, or with "
        "arguments after --, which go to it, a region has an accelerate launch of its own; without GPUs, or with "
        "training.use_cpu, it is one process. Where there are fewer GPUs than regions, the regions share them.",
    )
    add_recipe(parser, is_needed=False)
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    recipe = take(options) if options.recipe is None else recipe_of(options)
    if recipe is None:
        return 0
    part = part_of(recipe.regions, options, name_of(recipe))
    sets = list(options.overrides)
    for key in ("count", "coordinator", "run", "secret_file"):
        value = getattr(part.regions, key)
        if value != getattr(recipe.regions, key):
            sets.append(f"regions.{key}={json.dumps(value)}")  # [::1]:29650 is no text in YAML
    regions = dataclasses.replace(part.regions, join=part.join or None)
    part = dataclasses.replace(part, regions=regions)
    recipe = dataclasses.replace(recipe, regions=regions)
    words = [word for each in (*sets, "training.disable_tqdm=true") for word in ("--set", each)]
    program = Program(
        [*OF_RECIPES, options.recipe, *words],
        options.launcher,
        output_dir(recipe),
        use_cpu=bool(recipe.training.get("use_cpu")),
        split=None if part.split is None else part.split.wish,
    )

    def show(planned: Sequence[Launch], machine: int, joins: bool) -> None:
        from ..link.backends import refuse_backend
        from ..training.preflight import preflight

        if part.has_company:
            device = "cpu" if recipe.training.get("use_cpu") else "cuda"
            refuse_backend(recipe.regions.link, device, len(planned))
        rows = dry.rows_of(recipe, preflight(recipe, tries=True))
        dry.show(part, planned, machine, joins, options.resume and not joins, rows)

    given = recipe.training.get("max_steps")
    max_steps = given if isinstance(given, int) else -1  # its region says what is wrong with another
    return carry_out(
        Order(part, program, options.words, options.resume, max_steps, show if options.dry_run else None)
    )
