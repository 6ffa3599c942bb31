"""Regions that enter a run while it trains, and come back to it: what `hf-cocodc train --join` checks and says."""

import argparse
import os
import shlex
import time
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..recipes.recipe import Recipe
from ..settings import ENV_STORE

if TYPE_CHECKING:
    from ..meeting.claims import Claim

WAIT_S = 10.0


def refuse_to_join(resume: bool, store: str | None) -> None:
    """Check the options of a region that joins.

    Raises:
        InputError: it also shall resume, or nobody told it of a store.
    """
    if resume:
        raise InputError(
            "--join with --resume: a region that joins takes the others' state and not its own checkpoint. Remove one of them: "
            "--join if no region of the run trains now, otherwise --resume."
        )
    if store is None:
        raise InputError(
            f"--join needs the store at which the run's regions met: pass --store HOST:PORT (or {ENV_STORE}). A run that "
            "`hf-cocodc train` started on one machine has printed it."
        )


def claim_number(recipe: Recipe, address: str) -> "Claim":
    """Claim the lowest number that is free in the recipe's run; wait for the run as long as regions wait for each other.

    Raises:
        InputError: the run does not train, or has as many regions as it may have.
        LinkError: the store fails.
    """
    from ..meeting.claims import claim
    from ..meeting.live import read, read_alive
    from .status import reach

    store, name = reach(address, recipe.regions.secret_file), name_of(recipe)
    deadline = time.monotonic() + recipe.regions.start_timeout_s
    while (record := read_alive(store, name)) is None:
        if time.monotonic() > deadline:
            raise InputError(
                f"no region of run {name!r} trains at {address}: there is nothing to join. Start the run without --join (with "
                "--resume if it has trained before), or correct the name of the run (--run). A run without regions.min or "
                "regions.on_loss=continue cannot be joined."
            )
        print(f"waiting for run {name!r} at {address}", flush=True)
        time.sleep(min(WAIT_S, max(deadline - time.monotonic(), 0)))

    def members() -> tuple[int, ...]:
        now = read(store, name)
        return now.regions if now is not None else record.regions

    return claim(store, name, record.most, members)


def trains(recipe: Recipe, address: str, region: int) -> bool:
    """Whether the recipe's run trains already: a region that its scheduler starts again enters it without being told.

    Says so if another process of the region still takes part.
    """
    from ..meeting.live import read_alive
    from ..run.place import taken
    from .status import reach

    record = read_alive(reach(address, recipe.regions.secret_file), name_of(recipe))
    held = None if record is None else taken(record, region)
    if held is not None:
        print(f"{held} This command loads the model, and then tries to join.", flush=True)
    return record is not None


def name_of(recipe: Recipe) -> str:
    """The name of a recipe's run."""
    from ..training.building import output_dir

    return recipe.regions.name_of_run(os.environ) or output_dir(recipe).resolve().name


def way_back(options: argparse.Namespace, region: int, address: str | None) -> str:
    """The command that brings a lost region back."""
    words = ["hf-cocodc", "train", options.recipe]
    words += [word for override in options.overrides for word in ("--set", override)]
    words += ["--join", "--region", str(region), "--store", address or "HOST:PORT"]
    for flag, given in (("--run", options.run_name), ("--secret-file", options.secret_file)):
        words += [] if given is None else [flag, given]
    return shlex.join([*words, *(["--", *options.launcher] if options.launcher else [])])


def loss_in_words(lost: Any) -> str:
    """How a region ended that the others go on without."""
    error = lost.error()
    return (
        error[0] if error is not None else f"killed, or ended without an error message; see {lost.log.name}"
    )
