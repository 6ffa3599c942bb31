"""`hf-cocodc train --dry-run`: what a command would train and start, after all its checks."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..auto import warnings_of
from ..errors import InputError
from ..settings.recipe import Recipe
from ..training.precheck import outer_in_words
from .joining import name_of
from .status import keys_of, running

if TYPE_CHECKING:
    from ..training.launch import Launch


def free_number(recipe: Recipe, address: str) -> int:
    """The lowest number that no process of the recipe's run has; it is not claimed. Raises InputError if the run does not
    train, or has as many regions as it may have.
    """
    [state] = running(address, keys_of(address, recipe.regions.secret_file), name_of(recipe))
    taken = [each["region"] for each in (*state["members"], *state["newcomers"])]
    free = [each for each in range(state["most"]) if each not in taken]
    if not free:
        raise InputError(
            f"run {state['name']!r} has as many regions as it may have (regions.max={state['most']}). Start this one again when "
            "another has left, or raise regions.max when you start the run anew."
        )
    return free[0]


def show(
    recipe: Recipe, planned: "Sequence[Launch]", machine: int, resumes: bool, num_params: int | None
) -> None:
    """Check the folders as a run would, print what it would do, and write nothing. Raises InputError if a folder cannot be
    written, another run has it, or there is no such interface. `num_params`: that are trained, if they are known.
    """
    from ..net.addresses import own_address
    from ..run.lock import refuse_held, region_lock
    from ..tools.doctor.facts import disk
    from ..training.launch import log_name

    if recipe.regions.interface is not None:
        own_address("", recipe.regions.interface)
    for each in planned:
        place = disk(each.folder)
        if not place.is_writable:
            raise InputError(
                f"{each.folder} cannot be written: {place.folder} is not yours to write. Change training.output_dir, or make "
                "the folder writable."
            )
        refuse_held(each.folder / "cocodc" / f"{log_name(machine)}.lock")
        if machine == 0:
            refuse_held(region_lock(each.folder))
    regions = recipe.regions
    start = "the newest checkpoint that is good in every region, if there is one" if resumes else "step 0"
    none_given = "one that this command starts" if (regions.count or 1) > 1 else "none"
    numbers = ", ".join(str(each.region) for each in planned)
    rows = [
        # a run that a region joins has as many regions as it has by then
        ("would train", f"region {numbers}" if regions.join else f"region {numbers} of {regions.count or 1}"),
        ("from", "the state of the regions that train" if regions.join else start),
        ("parameters", "known to its region" if num_params is None else f"{num_params:,} to train"),
        ("steps", str(recipe.training.get("max_steps", "by training.num_train_epochs"))),
        ("outer", outer_in_words(recipe)),
        ("coordinator", regions.coordinator or none_given),
        *(("folder", str(each.folder)) for each in planned),
        *(("command", _command(each)) for each in planned),
    ]
    print("\n".join(f"{name:<13}{value}" for name, value in rows))
    for warning in warnings_of(recipe.outer, recipe.training.get("max_steps")):
        print(f"warning: {warning}")
    print("nothing was started or written; without --dry-run the command starts this")


def _command(launch: "Launch") -> str:
    """A command that a shell would run in the same way."""
    env = [
        f"{name}={shlex.quote(value)}" for name, value in launch.env.items() if os.environ.get(name) != value
    ]
    return " ".join([*env, shlex.join([Path(launch.command[0]).name, *launch.command[1:]])])
