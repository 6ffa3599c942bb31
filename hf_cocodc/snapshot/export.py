"""The global model in a checkpoint: beside our folder, as `save_pretrained` writes it; and once more in `global/`.

`global/` takes no space, because its files are hard links, and tells which files beside our folder are the global model's.
"""

import os
import shutil
from pathlib import Path

from . import manifest
from .durable import replace, saving
from .folders import PREFIX, run_of
from .manifest import EXPORT, FOLDER

SAVED = f"{FOLDER}/saved"
"""File in a region's folder: the run whose final model lies there, and that model's inner step."""


def put_into_folder(checkpoint: Path) -> None:
    """Give every file of a checkpoint, but our own, a second name in `global/`."""
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        if path.is_file() and name.parts[0] not in (FOLDER, EXPORT):
            _same(path, checkpoint / EXPORT / name)


def put_beside(checkpoint: Path) -> None:
    """Give every file in `global/` a second name in the checkpoint's own folder."""
    folder = checkpoint / EXPORT
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _same(path, checkpoint / path.relative_to(folder))


def note_saved(folder: Path, step: int) -> None:
    """Note that the run has saved its final model in a region's folder. Raises CheckpointError if the disk refuses."""
    with saving(folder):
        replace(folder / SAVED, lambda path: path.write_text(f"{run_of(folder)} {step}", encoding="ascii"))


def is_saved(folder: Path, step: int) -> bool:
    """Whether a finished run's folder has its model: `note_saved` says so, and every weight file has its size. A model of an
    earlier run may lie there too, or one that this run saved before it went on.
    """
    checkpoint = folder / f"{PREFIX}{step}"
    if manifest.damage(checkpoint, hashes=False) is not None:
        return False
    noted = (folder / SAVED).read_bytes() if (folder / SAVED).is_file() else b""
    if noted != f"{run_of(folder)} {step}".encode():
        return False
    matches = []
    for path in (checkpoint / EXPORT).rglob("*.safetensors"):
        saved = folder / path.relative_to(checkpoint / EXPORT)
        matches.append(saved.is_file() and saved.stat().st_size == path.stat().st_size)
    return bool(matches) and all(matches)


def _same(path: Path, other: Path) -> None:
    other.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, other)
    except OSError:  # the file system knows no hard links, or is full: the copy then says so
        shutil.copyfile(path, other)
