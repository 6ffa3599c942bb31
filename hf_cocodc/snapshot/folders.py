"""A region's folder of checkpoints: whose it is, which run writes there, and the links beside it.

A file in the folder names the region that saves there, because two regions would overwrite each other. The name of that file
has the number of the run, so that only one region of a run can make it.

`output_dir/checkpoint-N` links to `output_dir/region-R/checkpoint-N`: Transformers' `get_last_checkpoint(output_dir)` finds the
newest of these links. Regions on one disk share them: each makes those that are missing, and removes those to its own folder
that no longer lead to a complete checkpoint.
"""

import contextlib
import logging
import os
import re
import time
import zlib
from collections.abc import Collection
from pathlib import Path

from ..errors import CheckpointError
from . import manifest
from .durable import replace, saving
from .manifest import FOLDER

logger = logging.getLogger(__name__)

RUN = f"{FOLDER}/run"
"""In a folder of checkpoints: the number of the run that writes there now. In a checkpoint: of the run that began it."""
_UNSAVED = "unsaved"
"""Word after the number while a run that began from step 0 has no complete checkpoint in the folder."""
PREFIX = "checkpoint-"
_REGION = re.compile(r"region-\d+")
_NAMED = re.compile(r"checkpoint_\d+")
SAVED_BY = "saved-by-"
_DELETED = ".deleted"
_WRITE_S = 1.0
"""Seconds that another region may take to write into a file that it has just made."""


def run_of(folder: Path) -> int:
    """The number of the run that writes to a folder; 0 if there is none. Raises CheckpointError if its file is damaged."""
    return _run(folder)[0]


def is_unsaved(folder: Path) -> bool:
    """Whether the run that writes to a folder began there at step 0, without a complete checkpoint. Raises like `run_of`."""
    return _run(folder)[1]


def begin_run(folder: Path, run: int, unsaved: bool = False) -> None:
    """From now on checkpoints in `folder` belong to `run`; those of an earlier run stay, but are not continued from. Raises
    CheckpointError if the disk refuses.
    """
    text = f"{run} {_UNSAVED}" if unsaved else f"{run}"
    with saving(folder):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        replace(folder / RUN, lambda path: path.write_text(f"{text} {_check(text)}", encoding="ascii"))


def _run(folder: Path) -> tuple[int, bool]:
    """The number of the run that writes to a folder, and whether it is unsaved there."""
    path = folder / RUN
    if not path.exists():
        return 0, False
    with contextlib.suppress(OSError, ValueError):
        content, _, check = path.read_text(encoding="ascii").rpartition(" ")
        number, *word = content.split(" ")
        if check == _check(content) and word in ([], [_UNSAVED]):
            return int(number), bool(word)
    raise CheckpointError(
        f"{path} is damaged: it does not hold the number of the run whose checkpoints lie in {folder}. Copy the file of another "
        "region of the run, or give the path of a checkpoint to resume from."
    )


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def point(folder: Path) -> None:
    """Update the links beside `folder` to the complete checkpoints of its run, if its name is region-R."""
    if not _REGION.fullmatch(folder.name):
        return
    good = {path.name for path in checkpoints(folder).values() if unusable(path, hashes=False) is None}
    try:
        for name in good:
            link = folder.parent / name
            if not link.exists():
                half = folder.parent / f".{name}.{folder.name}"
                half.unlink(missing_ok=True)
                half.symlink_to(Path(folder.name) / name, target_is_directory=True)
                os.replace(half, link)
        for link in folder.parent.glob(f"{PREFIX}*"):
            if link.name not in good and target(link) == folder.name:
                link.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(
            "no link to the checkpoints in %s can be made in %s (%s): get_last_checkpoint does not find them there. Resume with "
            "trainer.train(resume_from_checkpoint=True), which needs no link.",
            *(folder, folder.parent, error),
        )


def target(path: Path) -> str | None:
    """Name of the region's folder to which a link of ours points; None if `path` is something else."""
    if not path.is_symlink():
        return None
    home, name = os.path.split(os.readlink(path))
    return home if name == path.name and _REGION.fullmatch(home) else None


def is_pointer(path: Path, folder: Path) -> bool:
    """Whether a path is one of the links beside a region's folder, or has the place of one: it is missing, or a copy of the
    output folder has a copied checkpoint there.
    """
    known = re.fullmatch(rf"{PREFIX}\d+", path.name) and _REGION.fullmatch(folder.name)
    beside = path.parent.absolute().resolve() == folder.absolute().parent.resolve()
    if not known or not beside:
        return False
    copied = manifest.is_sealed(path) and any(path.parent.glob(f"region-*/{path.name}"))
    return target(path) is not None or copied or not os.path.lexists(path)


def claim(folder: Path, run: int, region: int, members: Collection[int]) -> None:
    """Note that a region saves into a folder, before anything is written there. A folder of a region that is not among
    `members`, those that take part now, is free. Raises CheckpointError if it is another member's, or the disk refuses.
    """
    path = folder / FOLDER / f"{SAVED_BY}{run:x}"
    with saving(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
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


def forget_earlier(folder: Path, run: int) -> None:
    """Remove what earlier runs have noted in a folder, as long as it holds no complete checkpoint."""
    for path in (folder / FOLDER).glob(f"{SAVED_BY}*"):
        if path.name != f"{SAVED_BY}{run:x}":
            tidy_up([path])


def _region_in(path: Path) -> int | None:
    """The region that a file names; None if it names none."""
    until = time.monotonic() + _WRITE_S
    while not os.path.getsize(path) and time.monotonic() < until:
        time.sleep(0.01)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    return int(text) if text.isdecimal() else None


def unusable(checkpoint: Path, run: int | None = None, hashes: bool = True) -> str | None:
    """Why `run` (None: the one that writes to its folder now) cannot continue from a checkpoint; None if it can."""
    if is_of_another_run(checkpoint, run):
        return "it is of an earlier run in this folder; give its path to continue that run"
    return manifest.damage(checkpoint, hashes)


def is_of_another_run(checkpoint: Path, run: int | None = None) -> bool:
    """Whether a complete checkpoint is of another run than `run` (None: the one that writes to its folder now)."""
    try:
        wanted = run_of(checkpoint.parent) if run is None else run
        return manifest.is_sealed(checkpoint) and manifest.read(checkpoint).run != wanted
    except ValueError:
        return False  # the list is damaged


def checkpoints(folder: Path) -> dict[int, Path]:
    """Every `checkpoint-N` in a folder, complete or not, by its step, oldest first."""
    by_step = {}
    for path in folder.glob(f"{PREFIX}*"):
        step = path.name.removeprefix(PREFIX)
        if path.is_dir() and step.isdecimal():
            by_step[int(step)] = path
    return dict(sorted(by_step.items()))


def rotate(folder: Path, limit: int | None, saved_everywhere: int, keep: set[int]) -> None:
    """Delete the run's oldest checkpoints until `limit` are left; None keeps all. Those of an earlier run are not counted, and
    stay.

    Kept are those that a region may still need: `keep`, and from step `saved_everywhere` on, the newest complete in every
    region.
    """
    run = run_of(folder)
    by_step = {step: path for step, path in checkpoints(folder).items() if _writer(path) == run}
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


def make_room(checkpoint: Path, run: int | None = None) -> None:
    """Clear the place of a checkpoint of `run` (None: the one that writes to its folder now). A complete one is renamed,
    because a user may have put files into it; what a killed process left is deleted.
    """
    if not manifest.is_sealed(checkpoint):
        discard([checkpoint], checkpoint.parent)
        return
    other = is_of_another_run(checkpoint, run)
    name = checkpoint.name + (f".run{manifest.read(checkpoint).run}" if other else ".replaced")
    ours = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    matches = (ours.fullmatch(each.name) for each in checkpoint.parent.iterdir())
    newest = max((int(match[1] or 1) for match in matches if match), default=0)
    aside = checkpoint.with_name(f"{name}-{newest + 1}" if newest else name)
    logger.warning(
        "%s is %s: it is renamed to %s.", checkpoint, "of another run" if other else "there", aside
    )
    checkpoint.rename(aside)


def discard(checkpoints: Collection[Path], folder: Path) -> None:
    """Delete checkpoints of a folder, and what earlier calls could not delete there. A run goes on whatever the disk says: a file
    may be open elsewhere (NFS, an upload). It is tried again with the next checkpoint.
    """
    for checkpoint in checkpoints:
        aside, number = checkpoint.with_name(f".{checkpoint.name}{_DELETED}"), 1
        while os.path.lexists(aside):
            number += 1
            aside = checkpoint.with_name(f".{checkpoint.name}{_DELETED}-{number}")
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


def _writer(checkpoint: Path) -> int | None:
    """The number of the run that wrote a checkpoint, or began to; None if it cannot be read."""
    with contextlib.suppress(ValueError):
        return manifest.read(checkpoint).run if manifest.is_sealed(checkpoint) else run_of(checkpoint)
    return None
