"""A region's folder of checkpoints: whose it is, and which run writes there.

A file in the folder names the region that saves there, because two regions would overwrite each other. The name of that file
has the number of the run, so that only one region of a run can make it.

`output_dir/checkpoint-N` links to `output_dir/region-R/checkpoint-N`, so that Transformers' `get_last_checkpoint(output_dir)`
finds it. Regions on one disk share these links.
"""

import contextlib
import itertools
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Collection
from pathlib import Path

from ..errors import CheckpointError
from . import manifest
from .manifest import COMPLETE, FOLDER, SAVED_BY, replace, saving, sync

logger = logging.getLogger(__name__)

RUN = f"{FOLDER}/run"
"""In a folder of checkpoints: the number of the run that writes there now. In a checkpoint, its list has the number."""
PREFIX = "checkpoint-"
_NAMED = re.compile(r"checkpoint_\d+")
_DELETED = ".deleted"
_WRITE_S = 1.0
"""Seconds that another region may take to write into a file that it has just made."""


def run_of(folder: Path) -> int:
    """The number of the run that writes to a folder; 0 if there is none. Raises CheckpointError if its file is damaged."""
    path = folder / RUN
    if not path.exists():
        return 0
    with contextlib.suppress(OSError, ValueError):
        content, _, check = path.read_text(encoding="ascii").rpartition(" ")
        if check == _check(content):
            return int(content)
    raise CheckpointError(
        f"{path} is damaged: it does not hold the number of the run whose checkpoints lie in {folder}. Copy the file of another "
        "region of the run, or give the path of a checkpoint to resume from."
    )


def begin_run(folder: Path, run: int) -> None:
    """From now on checkpoints in `folder` belong to `run`; those of an earlier run stay, but are not continued from. Raises
    CheckpointError if the disk refuses.
    """
    with saving(folder):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        replace(folder / RUN, lambda path: path.write_text(f"{run} {_check(str(run))}", encoding="ascii"))


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def point(folder: Path) -> None:
    """Link the complete checkpoints of the run that writes to a region's folder beside it, and remove other links to there."""
    good = {path.name for path in usable(folder).values()}
    try:
        for link in folder.parent.glob(f"{PREFIX}*"):
            if (
                link.name not in good
                and link.is_symlink()
                and os.readlink(link) == f"{folder.name}/{link.name}"
            ):
                link.unlink(missing_ok=True)
        for link in (folder.parent / name for name in good):
            if not link.exists():
                link.unlink(missing_ok=True)
                with contextlib.suppress(FileExistsError):  # another region's, which is as good
                    link.symlink_to(f"{folder.name}/{link.name}", target_is_directory=True)
    except OSError as error:
        logger.warning(
            "no link to the checkpoints in %s can be made in %s (%s): get_last_checkpoint does not find them there. Resume with "
            "trainer.train(resume_from_checkpoint=True), which needs no link.",
            *(folder, folder.parent, error),
        )


def claim(folder: Path, run: int, region: int, members: Collection[int]) -> None:
    """Note that a region saves into a folder, before anything is written there. A folder of a region that is not among
    `members`, those that take part now, is free. Raises CheckpointError if it is another member's, or the disk refuses.
    """
    path = folder / f"{SAVED_BY}{run:x}"
    with saving(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        tidy_up([each for each in folder.glob(f"{SAVED_BY}*") if each != path])  # of earlier runs
        try:
            with path.open("x", encoding="ascii") as file:
                file.write(f"{region}\n")
            return
        except FileExistsError:
            other = _region_in(path)
        if other is not None and other not in (region, *members):
            replace(path, lambda half: half.write_text(f"{region}\n", encoding="ascii"))
            return
    if other != region:
        who = "another region" if other is None else f"region {other}"
        raise CheckpointError(
            f"region {region} is to save into {folder}, where {who} of this run saves: they would overwrite each other. Nothing "
            f"was written. Give every region a folder of its own, for example {folder / f'region-{region}'}."
        )


def _region_in(path: Path) -> int | None:
    """The region that a file names; None if it names none."""
    until = time.monotonic() + _WRITE_S
    while not os.path.getsize(path) and time.monotonic() < until:
        time.sleep(0.01)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    return int(text) if text.isdecimal() else None


def unusable(checkpoint: Path, run: int | None = None) -> str | None:
    """Why `run` (None: the one that writes to its folder now) cannot continue from a checkpoint, by its list alone; None if it
    can.
    """
    try:
        if manifest.read(checkpoint).run != (run_of(checkpoint.parent) if run is None else run):
            return "it is of an earlier run in this folder; give its path to continue that run"
    except ValueError as error:
        return str(error)
    return None


def is_of_another_run(checkpoint: Path, run: int | None = None) -> bool:
    """Whether this version reads a checkpoint, and another run than `run` wrote it (None: the one that writes there now)."""
    return manifest.unreadable(checkpoint) is None and unusable(checkpoint, run) is not None


def checkpoints(folder: Path) -> dict[int, Path]:
    """Every `checkpoint-N` in a folder, complete or not, by its step, oldest first."""
    by_step = {step_of(path): path for path in folder.glob(f"{PREFIX}*") if step_of(path) and path.is_dir()}
    return dict(sorted(by_step.items()))


def usable(folder: Path, run: int | None = None) -> dict[int, Path]:
    """Those checkpoints in a folder from which `run` can continue (see `unusable`)."""
    return {step: path for step, path in checkpoints(folder).items() if unusable(path, run) is None}


def step_of(checkpoint: Path) -> int:
    """The inner step of `checkpoint-N`; 0 if a path has another name."""
    step = checkpoint.name.removeprefix(PREFIX)
    return int(step) if step.isdecimal() and checkpoint.name.startswith(PREFIX) else 0


def rotate(folder: Path, limit: int | None, saved_everywhere: int, keep: set[int]) -> None:
    """Delete the run's oldest checkpoints until `limit` are left; None keeps all. What we began and never completed counts, too.
    Complete ones of an earlier run do not, nor do those of a plain Trainer: they stay.

    Kept are those that a region may still need: `keep`, and from step `saved_everywhere` on, the newest complete in every
    region.
    """
    by_step = {
        step: path
        for step, path in checkpoints(folder).items()
        if unusable(path) is None or ((path / FOLDER).is_dir() and not manifest.is_sealed(path))
    }
    surplus = len(by_step) - limit if limit else 0
    old = [step for step in by_step if step < saved_everywhere and step not in keep]
    discard([by_step[step] for step in old[: max(surplus, 0)]], folder)


def rotate_named(folder: Path, limit: int) -> None:
    """Delete the oldest of the checkpoints that Accelerate has named in a folder (`checkpoint_N`), until `limit` are left."""
    names = {
        int(path.name.partition("_")[2]): path
        for path in folder.glob("checkpoint_*")
        if _NAMED.fullmatch(path.name)
    }
    discard([names[number] for number in sorted(names)[:-limit]], folder)


def make_room(checkpoint: Path) -> None:
    """Clear the place of a checkpoint. A complete one is renamed: it may be another run's, or a user may have put files into it;
    so is what no run of ours began. What a killed process left is deleted.
    """
    if not checkpoint.exists():
        return
    if (checkpoint / FOLDER).is_dir() and not manifest.is_sealed(checkpoint):
        discard([checkpoint], checkpoint.parent)
        return
    aside = _free(checkpoint.with_name(f"{checkpoint.name}.replaced"))
    logger.warning("%s is there already: it is renamed to %s.", checkpoint, aside)
    checkpoint.rename(aside)


def _free(path: Path) -> Path:
    """This path, or the first of `path-2`, `path-3`, ... at which nothing is there."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], others) if not os.path.lexists(each))


def discard(checkpoints: Collection[Path], folder: Path) -> None:
    """Delete checkpoints of a folder, and what earlier calls could not delete there. A run goes on whatever the disk says: a file
    may be open elsewhere (NFS, an upload). It is tried again with the next checkpoint.
    """
    for checkpoint in checkpoints:
        aside = _free(checkpoint.with_name(f".{checkpoint.name}{_DELETED}"))
        try:
            checkpoint.rename(aside)  # none that is half deleted has a checkpoint's name
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning(
                "%s cannot be deleted (%s): it stays until the next checkpoint.", checkpoint, error
            )
    for aside in folder.glob(f".*{_DELETED}*"):
        inside = sorted(aside.rglob("*"), key=lambda path: len(path.parts), reverse=True)
        tidy_up([*inside, aside])


def tidy_up(paths: Collection[Path]) -> None:
    """Delete files, and folders that are empty by then; a warning names the first one that cannot be deleted."""
    failed: tuple[Path, OSError] | None = None
    for path in paths:
        try:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except OSError as error:
            failed = failed or (path, error)
    if failed is not None:
        logger.warning("%s cannot be deleted (%s): it is tried again with the next checkpoint.", *failed)


def place_to_save(checkpoint: Path) -> Path:
    """Where to write a checkpoint: beside it, if it is there and complete; else in its own folder. That counts as complete no
    longer then, for Accelerate writes into it before our hook does.

    A loop may save into one folder again and again: at each moment a complete checkpoint is there. The new one is written as
    `NAME.next`. When it is complete, its files move into the folder, the list of them last. A process that is killed while they
    move leaves `NAME.next/cocodc/COMPLETE`: whoever loads or saves next goes on moving.
    """
    move_in(checkpoint)
    beside = _beside(checkpoint)
    if not manifest.is_sealed(checkpoint):
        return checkpoint
    try:
        if beside.exists():  # a killed process left it
            shutil.rmtree(beside)
        beside.mkdir()
    except OSError as error:
        if error.errno in manifest.FULL:  # the new one would find no room either
            raise
        logger.warning(
            "%s cannot be made beside the checkpoint in %s (%s): the new one overwrites it. From now until the save ends, this "
            "folder holds no complete checkpoint.",
            *(beside, checkpoint, error),
        )
        (checkpoint / COMPLETE).unlink()
        return checkpoint
    return beside


def move_in(checkpoint: Path) -> None:
    """Move what lies complete beside a checkpoint into its folder; does nothing if nothing is there."""
    beside = _beside(checkpoint)
    if manifest.unreadable(beside) is not None:
        return
    new, old = manifest.read(beside).files, {}
    with contextlib.suppress(ValueError):  # none, or a damaged one
        old = manifest.read(checkpoint).files
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    # a load would read them; what else is there may be a user's
    unlisted = set(manifest.added(checkpoint, new))
    # a process that was killed here has deleted the old list, but not all files that were on it
    if not old and unlisted:
        logger.warning(
            "%s: %s would be loaded with the new files, and goes.", checkpoint, ", ".join(sorted(unlisted))
        )
    tidy_up([checkpoint / name for name in sorted(unlisted & old.keys() if old else unlisted)])
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
