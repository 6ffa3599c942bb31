"""`hf-cocodc launch`: launch the regions of a script that trains with Trainer, TRL or Accelerate, on this machine."""

import argparse
import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..errors import InputError, shown
from ..settings import RegionConfig
from ..training.launch import OF_RECIPES, Launch, Program
from . import dry
from .part import part_of
from .supervising import Order, add_options, carry_out

_SWITCHES = ("--resume", "--join", "--dry-run", "-h", "--help")
"""Our options without a value."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "launch",
        usage="%(prog)s [OPTIONS] [-- ACCELERATE LAUNCH ARGS --] SCRIPT|-m MODULE [ARGS...]",
        help="launch a script of your own across regions",
        description="Start, watch and resume the regions of a script with CoCoDCCallback or OuterOptimizer, as hf-cocodc train "
        "does for a recipe. The script gets ARGS as they are, and needs to know of nothing: the environment says which region it "
        "is, and whether it resumes or joins. With GPUs, or with arguments between -- and --, which go to it, a region has an "
        "accelerate launch of its own; without, it is one process.",
    )
    add_options(parser)
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="folder for one log a region, FOLDER/region-R/log.txt (default: runs/SCRIPT)",
    )
    parser.set_defaults(run=run, parser=parser)


def program_at(argv: Sequence[str]) -> int:
    """Where the script or -m begins in the words of the command: all behind is the program's own."""
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "--":
            end = argv.index("--", at + 1) if "--" in argv[at + 1 :] else at
            return end + 1
        if word == "-m" or not word.startswith("-"):
            return at
        at += 1 if word in _SWITCHES or "=" in word else 2
    return len(argv)


def run(options: argparse.Namespace) -> int:
    program = _program(options)
    part = part_of(RegionConfig(), options)
    if part.split is not None:
        program = dataclasses.replace(program, split=part.split.wish)

    def show(planned: Sequence[Launch], machine: int, joins: bool) -> None:
        dry.show(part, planned, machine, joins, options.resume and not joins)

    given = show if options.dry_run else None
    return carry_out(Order(part, program, options.words, options.resume, dry_run=given))


def _program(options: argparse.Namespace) -> Program:
    """What the regions run. Raises InputError if there is no script."""
    is_module = options.program[:1] == ["-m"]
    name = "".join(options.program[int(is_module) :][:1])
    if not name:
        options.parser.error("name a script, or a module after -m")
    if not is_module and (not Path(name).is_file() or Path(name).suffix in (".yaml", ".yml")):
        raise InputError(
            f"{shown(name)}: there is no such script. Name a Python file, or a module: hf-cocodc launch -m MODULE. A recipe is "
            "trained with hf-cocodc train."
        )
    top = name.partition(".")[0]
    if is_module and not (importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])):
        raise InputError(
            f"-m {shown(name)}: there is no module {shown(top)} in this environment or folder. Install it, or correct its name."
        )
    folder = options.logs or Path("runs", name.rpartition(".")[2] if is_module else Path(name).stem)
    is_ours = options.program[:2] == OF_RECIPES
    words = options.program if is_ours else ["-m", "hf_cocodc.training.region", *options.program]
    return Program(words, options.launcher, folder)
