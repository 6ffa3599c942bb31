"""The number of the run that writes checkpoints to a folder: a run never continues from another one's."""

import contextlib
import zlib
from pathlib import Path

from ..errors import CheckpointError
from .durable import replace, saving
from .manifest import FOLDER

RUN = f"{FOLDER}/run"
"""In the folder of the checkpoints: the number of the run that writes there now. In a checkpoint: of the run that began it."""
_UNSAVED = "unsaved"
"""Word after the number, as long as the run that began from step 0 has no complete checkpoint in the folder."""


def run_of(folder: Path) -> int:
    """The number of the run that writes to a folder; 0 if there is none.

    Raises:
        CheckpointError: the file with the number is damaged.
    """
    return _run(folder)[0]


def is_unsaved(folder: Path) -> bool:
    """Whether the run that writes to a folder began there from step 0, and has no complete checkpoint there yet.

    Raises:
        CheckpointError: the file with the number of the run is damaged.
    """
    return _run(folder)[1]


def begin_run(folder: Path, run: int, unsaved: bool = False) -> None:
    """From now on checkpoints in `folder` belong to `run`. Checkpoints of an earlier run stay, but are not continued from.

    Args:
        folder: of the checkpoints.
        run: number of the run.
        unsaved: see `is_unsaved`.

    Raises:
        CheckpointError: the disk refuses.
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
        said, _, check = path.read_text(encoding="ascii").rpartition(" ")
        number, *word = said.split(" ")
        if check == _check(said) and word in ([], [_UNSAVED]):
            return int(number), bool(word)
    raise CheckpointError(
        f"{path} is damaged: it does not hold the number of the run whose checkpoints lie in {folder}. Copy the file of another "
        "region of the run, or give the path of a checkpoint to resume from."
    )


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
