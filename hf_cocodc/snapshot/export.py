"""Whether the final model of a run lies in its region's folder."""

from pathlib import Path

from . import manifest
from .durable import replace, saving
from .folders import PREFIX, run_of
from .manifest import FOLDER

SAVED = f"{FOLDER}/saved"
"""File in a region's folder: the run whose final model lies there, and that model's inner step."""


def note_saved(folder: Path, step: int) -> None:
    """Note that the run has saved its final model in a region's folder. Raises CheckpointError if the disk refuses."""
    with saving(folder):
        replace(folder / SAVED, lambda path: path.write_text(f"{run_of(folder)} {step}", encoding="ascii"))


def is_saved(folder: Path, step: int) -> bool:
    """Whether a finished run's folder has its model: `note_saved` says so, and every weight file has its size. A model of an
    earlier run may lie there too, or one that this run saved before it went on.
    """
    checkpoint = folder / f"{PREFIX}{step}"
    if manifest.unreadable(checkpoint) is not None:
        return False
    noted = (folder / SAVED).read_bytes() if (folder / SAVED).is_file() else b""
    if noted != f"{run_of(folder)} {step}".encode():
        return False
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    return bool(sizes) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )
