"""Regions that enter a run while it trains, and come back to it: what `hf-cocodc train --join` checks and says."""

import argparse
import shlex
from typing import Any

from ..errors import InputError
from ..settings import ENV_STORE


def refuse_to_join(resume: bool, region: int | None, store: str | None) -> None:
    """Check the options of a region that joins.

    Raises:
        InputError: it also shall resume, or nobody told it of a store, or of its number.
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
    if region is None:
        raise InputError("--join needs the number of the region that enters the run: pass --region R.")


def way_back(options: argparse.Namespace, region: int, address: str | None) -> str:
    """The command that brings a lost region back."""
    words = ["hf-cocodc", "train", options.recipe]
    words += [word for override in options.overrides for word in ("--set", override)]
    words += ["--join", "--region", str(region), "--store", address or "HOST:PORT"]
    if options.run_name is not None:
        words += ["--run", options.run_name]
    return shlex.join([*words, *(["--", *options.launcher] if options.launcher else [])])


def loss_in_words(lost: Any) -> str:
    """How a region ended that the others go on without."""
    error = lost.error()
    return (
        error[0] if error is not None else f"killed, or ended without an error message; see {lost.log.name}"
    )
