"""`--dry-run`: what a command would train and start, after all its checks."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..auto import warnings_of
from ..errors import InputError
from ..settings.recipe import Recipe
from ..training.precheck import outer_in_words
from .part import MachinePart

if TYPE_CHECKING:
    from ..training.launch import Launch


def show(
    part: MachinePart,
    planned: "Sequence[Launch]",
    machine: int,
    joins: bool,
    resumes: bool,
    more: Sequence[tuple[str, str]] = (),
) -> None:
    """Check the folders as a run would, print what it would do, with `more` lines, and write nothing. Raises InputError if a
    folder cannot be written, another run has it, or there is no such interface.
    """
    from ..net.addresses import own_address
    from ..run.lock import refuse_held, region_lock
    from ..tools.doctor.facts import disk
    from ..training.launch import log_name

    if part.regions.interface is not None:
        own_address("", part.regions.interface)
    for each in planned:
        place = disk(each.folder)
        if not place.is_writable:
            raise InputError(
                f"{each.folder} cannot be written: {place.folder} is "
                f"{'not yours to write' if place.folder.is_dir() else 'no folder'}. Change training.output_dir (of launch: "
                "--logs), or make the folder writable."
            )
        refuse_held(each.folder / "cocodc" / f"{log_name(machine)}.lock")
        if machine == 0:
            refuse_held(region_lock(each.folder))
    start = "the newest checkpoint that is good in every region, if there is one" if resumes else "step 0"
    none_given = "one that this command starts" if part.count > 1 else "none"
    numbers = ", ".join(str(each.region) for each in planned)
    rows = [
        # a run that a region joins has as many regions as it has by then
        ("would train", f"region {numbers}" if joins else f"region {numbers} of {part.count}"),
        ("from", "the state of the regions that train" if joins else start),
        *more,
        ("coordinator", part.regions.coordinator or none_given),
        *(("folder", str(each.folder)) for each in planned),
        *(("command", each) for each in dict.fromkeys(_command(each) for each in planned)),
    ]
    print("\n".join(f"{name:<13}{value}" for name, value in rows))
    print("nothing was started or written; without --dry-run the command starts this")


def rows_of(recipe: Recipe, num_params: int | None) -> list[tuple[str, str]]:
    """What a recipe says of a run; `num_params`: that are trained, if they are known."""
    warnings = warnings_of(recipe.outer, recipe.training.get("max_steps"))
    steps = recipe.training.get("max_steps", -1)
    return [
        ("parameters", "known to its region" if num_params is None else f"{num_params:,} to train"),
        ("steps", str(steps) if steps > 0 else "by training.num_train_epochs"),
        ("outer", outer_in_words(recipe)),
        *(("warning", each) for each in warnings),
    ]


def _command(launch: "Launch") -> str:
    """A command that a shell would run in the same way."""
    env = [
        f"{name}={shlex.quote(value)}" for name, value in launch.env.items() if os.environ.get(name) != value
    ]
    return " ".join([*env, shlex.join([Path(launch.command[0]).name, *launch.command[1:]])])
