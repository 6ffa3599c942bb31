"""`hf-cocodc train --join` without a recipe: the run gives it, as a file to read."""

import argparse
import os
import re
from pathlib import Path

from ..errors import InputError, short
from ..settings import RegionConfig
from ..settings.environment import ENV_COORDINATOR, ENV_RUN
from .joining import of_run, recipe_at, refuse_to_join
from .part import MachinePart


def fetch(options: argparse.Namespace) -> int:
    """Write the recipe of the run that `options` are to join to a file. It does not count before the user has named it: it may
    name code and files of this machine, and comes from somebody else. Returns 0, and says so, if the run has finished.

    Raises:
        InputError: with the file; or `options` do not join a run; there are several; it has no recipe.
        MeetingError: no coordinator answers, or one with another secret or version; the run does not train.
    """
    address = options.coordinator or os.environ.get(ENV_COORDINATOR)
    name = options.run_name or os.environ.get(ENV_RUN) or None
    regions = RegionConfig(coordinator=address, secret_file=options.secret_file, run=name)
    if not (options.join or regions.joins(os.environ)):
        raise InputError(
            "name a recipe: hf-cocodc train RECIPE. Only to join a run that trains, none is needed: hf-cocodc train --join "
            "--coordinator HOST:PORT writes that of the run to a file."
        )
    refuse_to_join(options.resume, address)
    assert address is not None
    found = of_run(MachinePart(regions, options.region, True, True, name), address, recipe_at)
    if found is None:
        return 0
    run, told = found
    text = told.get("text")
    if not isinstance(text, str):
        raise InputError(
            f"run {run!r} does not hand over its recipe: {short(told.get('why'), 200)}. Get the file from whoever has started "
            "the run: hf-cocodc train RECIPE --join --coordinator HOST:PORT."
        )
    path = Path("runs", f"{re.sub(r'[^a-zA-Z0-9._-]+|^[.-]+', '_', run)}.yaml")
    if not options.dry_run:
        _write(path, text)
    raise InputError(
        f"the recipe of run {run!r} {'would be' if options.dry_run else 'is'} in {path}. Read it, because it can name code and "
        "files, and change its folders and batch for this machine. Then name it in the same command: hf-cocodc train "
        f"{path} --join --coordinator {address}"
    )


def _write(path: Path, text: str) -> None:
    """Raises InputError if there is another file: the user may have changed it, or a region trains it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if path.read_text(encoding="utf-8", errors="replace") != text:
            raise InputError(
                f"{path} is there already, and is not the recipe that the run has now. Name it (hf-cocodc train {path} --join "
                "...), or remove it."
            ) from None
