"""The global model in a checkpoint: as `save_pretrained` writes it, beside our folder; and once more in `global/`.

The folder costs nothing, for its files are hard links. It also tells which files beside our folder are the global model's.
"""

import os
import shutil
from pathlib import Path

from . import manifest
from .durable import replace, saving
from .folders import PREFIX, run_of
from .manifest import EXPORT, FOLDER

SAVED = f"{FOLDER}/saved"
"""In the folder of a region: the number of the run whose model lies there, and the inner step that it is of."""


def put_into_folder(checkpoint: Path) -> None:
    """Give all files that lie in a checkpoint now, but our own, a second name in `global/`."""
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        if path.is_file() and name.parts[0] not in (FOLDER, EXPORT):
            _same(path, checkpoint / EXPORT / name)


def put_beside(checkpoint: Path) -> None:
    """Give all files in `global/` a second name in the checkpoint's own folder."""
    folder = checkpoint / EXPORT
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _same(path, checkpoint / path.relative_to(folder))


def note_saved(folder: Path, step: int) -> None:
    """Note that the run has saved its model in a region's folder, at the end, after `step` inner steps.

    Raises:
        CheckpointError: the disk refuses.
    """
    with saving(folder):
        replace(folder / SAVED, lambda path: path.write_text(f"{run_of(folder)} {step}", encoding="ascii"))


def is_saved(folder: Path, step: int) -> bool:
    """Whether the folder of a run that has finished has its model: as `note_saved` says, every weight's file, with its size.

    A model may also lie there that an earlier run has saved, or the same run before it went on.
    """
    checkpoint = folder / f"{PREFIX}{step}"
    if manifest.damage(checkpoint, hashes=False) is not None:
        return False
    noted = (folder / SAVED).read_bytes() if (folder / SAVED).is_file() else b""
    if noted != f"{run_of(folder)} {step}".encode():
        return False
    found = []
    for path in (checkpoint / EXPORT).rglob("*.safetensors"):
        saved = folder / path.relative_to(checkpoint / EXPORT)
        found.append(saved.is_file() and saved.stat().st_size == path.stat().st_size)
    return bool(found) and all(found)


def _same(path: Path, other: Path) -> None:
    other.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, other)
    except OSError:  # the file system knows no hard links, or is full: the copy then says so
        shutil.copyfile(path, other)
