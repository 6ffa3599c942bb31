"""Saving once more into the folder of a complete checkpoint, without a moment in which no complete one is there.

The new checkpoint is written beside the folder, as `NAME.next`. When it is complete, its files move into the folder, the list of
them (`COMPLETE`) last. A process that is killed while they move leaves `NAME.next/cocodc/COMPLETE`: whoever loads or saves next
goes on moving.
"""

import logging
import os
import shutil
from pathlib import Path

from . import manifest
from .durable import sync
from .folders import SAVED_BY, tidy_up
from .manifest import COMPLETE, FOLDER

logger = logging.getLogger(__name__)


def place_to_save(checkpoint: Path) -> Path:
    """Where to write a checkpoint: beside it, if it is there and complete; else in its own folder."""
    move_in(checkpoint)
    beside = _beside(checkpoint)
    if not manifest.is_sealed(checkpoint):
        return checkpoint
    try:
        if beside.exists():  # a killed process left it
            shutil.rmtree(beside)
        beside.mkdir()
    except OSError as error:
        logger.warning(
            "%s cannot be written beside the checkpoint in %s (%s): until the new one is complete, there is none.",
            *(beside, checkpoint, error),
        )
        return checkpoint
    return beside


def move_in(checkpoint: Path) -> None:
    """Move what lies complete beside a checkpoint into its folder; does nothing if nothing is there."""
    beside = _beside(checkpoint)
    if not manifest.is_sealed(beside):
        return
    new = manifest.read(beside).files
    old = manifest.read(checkpoint).files if manifest.is_sealed(checkpoint) else {}
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    kept = f"{FOLDER}/{SAVED_BY}"
    tidy_up([checkpoint / name for name in old.keys() - new.keys() if not name.startswith(kept)])
    for name in new:
        if (beside / name).exists():  # else it has moved before
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(beside / name, checkpoint / name)
    for folder in {(checkpoint / name).parent for name in (*new, COMPLETE)}:
        sync(folder)
    os.replace(beside / COMPLETE, checkpoint / COMPLETE)
    sync(checkpoint / FOLDER)
    shutil.rmtree(beside, ignore_errors=True)


def _beside(checkpoint: Path) -> Path:
    whole = checkpoint.absolute()
    return whole.with_name(f"{whole.name}.next")
