"""A region without a checkpoint takes over the checkpoint of another region, over the link (see `parcel`)."""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, LinkError
from ..links.base import Link
from ..links.spreading import spread
from . import checkpoint as disk
from . import manifest, numbering
from .parcel import check_files, make_own, parcel

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 26


def take_over(link: Link, checkpoint: Path, holders: Sequence[int], run: int) -> None:
    """Send a checkpoint from the first region that has it to the regions that do not. A collective call of the leaders.

    Args:
        link: reaches the other regions' leaders.
        checkpoint: its folder in this region.
        holders: regions that have it, undamaged.
        run: number of the run that wrote it.

    Raises:
        CheckpointError: the global model has changed since it was saved; a file cannot be sent, or its name is not known; or
            the disk refuses.
    """
    source = min(holders)
    lacking = link.region not in holders
    if lacking:
        logger.warning(
            "region %d has no complete checkpoint of step %s: it takes over region %d's.",
            *(link.region, checkpoint.name.removeprefix(disk.PREFIX), source),
        )
    half = checkpoint.with_name(f"{checkpoint.name}.half")
    if link.region == source:
        wrong = manifest.damage_of_export(checkpoint)
        if wrong is not None:
            raise CheckpointError(
                f"no region can take over {checkpoint}: {wrong}. Restore it, or move the checkpoint away to use an older one."
            )
        with parcel(checkpoint) as files:
            _travel(link, source, files, None)
        return
    _travel(link, source, {}, half if lacking else None)
    if lacking:
        with disk.saving(checkpoint):
            make_own(half)
            disk.make_room(checkpoint, run)
            half.rename(checkpoint)
        numbering.begin_run(checkpoint.parent, run)
        disk.seal(checkpoint)


def _travel(link: Link, source: int, files: dict[str, Path], into: Path | None) -> None:
    """Send files by their names in the checkpoint; write those that arrive below `into`, if given."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    listed = spread(
        link, source, json.dumps(sizes).encode(), f"the list of files of region {source}'s checkpoint"
    )
    expected = check_files(_parsed(listed), source)
    if into is not None:
        shutil.rmtree(into, ignore_errors=True)
    for name, size in expected.items():
        for start in range(0, max(size, 1), _CHUNK_BYTES):
            chunk = b""
            if name in files:
                with files[name].open("rb") as file:
                    file.seek(start)
                    chunk = file.read(_CHUNK_BYTES)
            chunk = spread(link, source, chunk, f"{name} of region {source}'s checkpoint", _CHUNK_BYTES)
            if len(chunk) != min(size - start, _CHUNK_BYTES):
                raise LinkError(f"region {source} sends {name} with another length than it has said.")
            if into is not None:
                with disk.saving(into):
                    (into / name).parent.mkdir(parents=True, exist_ok=True)
                    with (into / name).open("ab") as file:
                        file.write(chunk)


def _parsed(listed: bytes) -> Any:
    """What the bytes mean as JSON; None if they are none."""
    try:
        return json.loads(listed)
    except (ValueError, RecursionError):
        return None
