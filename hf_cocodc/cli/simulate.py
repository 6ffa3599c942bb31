"""`hf-cocodc simulate`: train all regions of a recipe in one process."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..recipes.arguments import add_recipe
from ..recipes.recipe import Recipe
from .checks import check, check_writable
from .ending import report
from .labels import Labelled


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="train all regions of a recipe in one process",
        description="Train all regions of a recipe in one process, where they take turns. The results are exactly those of a "
        "real run, except where a schedule follows measured times (cocodc does, and dilocox at a low rank). With --step-time, "
        "--latency and --bandwidth, the command also simulates how long steps and transfers take. Everything is written to "
        "OUTPUT_DIR/simulated.",
        allow_abbrev=False,
    )
    add_recipe(parser)
    parser.add_argument("--regions", type=int, help="number of regions (default: the recipe's regions.count)")
    parser.add_argument(
        "--step-time", type=float, metavar="S", help="simulated time of an inner step, in seconds"
    )
    parser.add_argument(
        "--latency", type=float, metavar="S", help="simulated one-way latency of the link, in seconds"
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="MBIT", help="simulated rate at which a region sends, in Mbit/s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the summary to this file")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if options.json is not None:
        check_writable("--json", options.json)
    overrides = ["training.disable_tqdm=true", *options.overrides]
    if options.regions is not None:
        overrides.append(f"regions.count={options.regions}")
    times = (options.step_time, options.latency, options.bandwidth)
    if any(given is not None for given in times):
        if None in times:
            raise InputError("--step-time, --latency and --bandwidth go together: give all three or none.")
        check("--step-time", options.step_time, 1e-9)
        check("--latency", options.latency, 0)
        check("--bandwidth", options.bandwidth, 1e-3)
    recipe = Recipe.load(options.recipe, overrides)
    from ..training.preflight import preflight  # torch takes seconds to import
    from ..training.simulation import VirtualLink, simulate, simulated_dir

    preflight(recipe, recipe.regions.count or 1)
    link = None
    if options.step_time is not None:
        bandwidth = options.bandwidth * 1e6 / 8
        link = VirtualLink(step_time_s=options.step_time, latency_s=options.latency, bandwidth=bandwidth)
    with _labelled_output():
        trainers = simulate(recipe, link=link)
    output = simulated_dir(recipe)
    report([output / f"region-{region}" for region in range(len(trainers))], output, options.json)
    return 0


@contextlib.contextmanager
def _labelled_output() -> Iterator[None]:
    """Inside the block, each line that a region prints begins with its name."""
    out, err = Labelled(sys.stdout), Labelled(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.end()
            err.end()
