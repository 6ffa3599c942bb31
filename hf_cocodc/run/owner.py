"""Which region saves into a folder: two regions of a run would overwrite each other there.

A file in the folder names the region. Its own name has the number of the run, so that only one region of a run can make it.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path

from ..errors import CheckpointError
from .durable import replace, saving
from .manifest import FOLDER

_PREFIX = "saved-by-"
_WRITE_S = 1.0
"""Seconds in which another region that has just made the file has written into it."""


def claim(folder: Path, run: int, region: int, members: Collection[int]) -> None:
    """Note that a region saves into a folder, before anything is written there.

    Args:
        folder: of a checkpoint, or of all checkpoints.
        run: number of the run; unique to it.
        region: this one.
        members: the regions that take part now. A folder of any other one is free.

    Raises:
        CheckpointError: the folder is another region's, or the disk refuses.
    """
    path = folder / FOLDER / f"{_PREFIX}{run:x}"
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
    """Remove what earlier runs have noted in a folder, while it holds no complete checkpoint."""
    for path in (folder / FOLDER).glob(f"{_PREFIX}*"):
        if path.name != f"{_PREFIX}{run:x}":
            path.unlink(missing_ok=True)


def _region_in(path: Path) -> int | None:
    """The region that a file names; None if it names none."""
    until = time.monotonic() + _WRITE_S
    while not os.path.getsize(path) and time.monotonic() < until:
        time.sleep(0.01)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    return int(text) if text.isdecimal() else None
