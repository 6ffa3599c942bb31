"""Checks of options, before anything heavy is imported or measured. Each error names the option."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ..errors import InputError, short
from ..settings.environment import ENV_SECRET
from ..settings.recipe import Recipe
from ..training.precheck import check_sections

RATE = "rate at which a region sends, to all others together, in Mbit/s"
"""What --rate-mbit means, in every command."""
STDOUT = Path("-")
"""The file of --json that stands for the standard output. All other output of a command then goes to stderr."""


def recipe_of(options: argparse.Namespace, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of `add_recipe`, with `overrides` after its own, after every check that needs no torch. Raises InputError if
    it cannot be read, or cannot work.
    """
    recipe = Recipe.load(options.recipe, [*options.overrides, *overrides])
    check_sections(recipe)
    return recipe


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --json, which becomes `options.json`: None, a file, or `STDOUT`."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"also write {what} to this file; - for the standard output",
    )


def write_json(options: argparse.Namespace, content: Any) -> None:
    """Write to the file of --json; nothing if it is not given."""
    if options.json is None:
        return
    text = json.dumps(content, indent=1) + "\n"
    if options.json == STDOUT:
        options.stdout.write(text)
    else:
        options.json.write_text(text, encoding="utf-8")


def add_coordinator(parser: argparse.ArgumentParser, what: str, required: bool = False) -> None:
    """Add the option for a coordinator's address."""
    parser.add_argument("--coordinator", metavar="HOST:PORT|URL", required=required, help=what)


def add_secret(parser: argparse.ArgumentParser) -> None:
    """Add the option for a coordinator's secret."""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret that the coordinator and its runs share (see hf-cocodc secret new); or put the secret itself "
        f"in {ENV_SECRET}",
    )


def add_speeds(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --speeds, which becomes `options.speeds`, a tuple; `what` they are."""
    parser.add_argument(
        "--speeds",
        type=_speeds,
        default=(),
        metavar="X,Y,...",
        help=f"{what} of the regions, as multiples of that with which an inner step takes --step-s: 3,1 if region 0 is three "
        "times as fast as region 1 (default: 1 for each region that is not named)",
    )


def _speeds(text: str) -> tuple[float, ...]:
    """
    >>> _speeds("3,1")
    (3.0, 1.0)
    """
    try:
        speeds = tuple(map(float, text.split(",")))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise argparse.ArgumentTypeError(f"{short(text)} must be positive numbers, as in 3,1")
    return speeds


def check_speeds(speeds: Sequence[float], regions: int) -> None:
    """Raise InputError if there are more of --speeds than regions."""
    if len(speeds) > regions:
        raise InputError(
            f"--speeds names {len(speeds)} regions, and there are {regions}. Remove a speed, or give --regions {len(speeds)}."
        )


def check(flag: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise InputError unless the value of an option is finite and lies in least .. most."""
    if not least <= value <= most or math.isinf(value):
        rule = f"must be at least {least:g}" if most == math.inf else f"must lie in {least:g} .. {most:g}"
        raise InputError(f"{flag} {value:g} {rule}{' and finite' if math.isinf(value) else ''}.")


def check_memory(flag: str, value: float, num_bytes: float) -> None:
    """Raise InputError unless this machine has the memory that the value of an option needs."""
    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise InputError(
            f"{flag} {value:g} needs about {num_bytes / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free. Lower {flag}."
        )


def check_writable(flag: str, path: Path) -> None:
    """Raise InputError unless a file can be written; it stays as it is."""
    if path == STDOUT:
        return
    try:
        is_new = not os.path.lexists(path)  # a link whose file is not there yet stays
        path.open("ab").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        rule = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{flag} {short(path)} cannot be written: {rule}. Name a file in a folder that exists and is yours to write."
        ) from error
