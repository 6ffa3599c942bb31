"""A region without a checkpoint takes over the checkpoint of another region."""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from ..links.base import Link
from . import checkpoint as disk
from . import manifest

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 26


def take_over(link: Link, is_main: bool, checkpoint: Path, holders: Sequence[int], run: int) -> None:
    """Send a checkpoint from the first region that has it to the regions that do not. A collective call.

    Args:
        link: reaches the other regions.
        is_main: whether this rank writes for its region.
        checkpoint: its folder in this region.
        holders: regions that have it complete.
        run: number of the run that wrote it.
    """
    source = min(holders)
    lacking = link.region not in holders
    writes = lacking and is_main
    if lacking:
        logger.warning(
            "region %d has no complete checkpoint of step %s: it takes over region %d's.",
            *(link.region, checkpoint.name.removeprefix(disk.PREFIX), source),
        )
    files = _shared_files(checkpoint) if link.region == source else {}
    listed = _spread(link, source, json.dumps(files).encode(), "the list of files of its checkpoint")
    half = checkpoint.with_name(f"{checkpoint.name}.half")
    if writes:
        shutil.rmtree(half, ignore_errors=True)
    for name, size in json.loads(listed).items():
        if writes:
            (half / name).parent.mkdir(parents=True, exist_ok=True)
        for start in range(0, size, _CHUNK_BYTES):
            chunk = b""
            if link.region == source:
                with (checkpoint / name).open("rb") as file:
                    file.seek(start)
                    chunk = file.read(_CHUNK_BYTES)
            chunk = _spread(link, source, chunk, f"{name} of its checkpoint")
            if writes:
                with (half / name).open("ab") as file:
                    file.write(chunk)
    if writes:
        _make_own(half)
        disk.make_room(checkpoint, run)
        half.rename(checkpoint)
        disk.begin_run(checkpoint.parent, run)
        disk.seal(checkpoint)


def _shared_files(checkpoint: Path) -> dict[str, int]:
    """Files that another region can continue from, with their sizes: all but local weights and random numbers."""
    exported = {path.name for path in (checkpoint / disk.EXPORT).iterdir()}
    names = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    return {
        name: size
        for name, size in names.items()
        if name not in exported and name != manifest.COMPLETE and not name.startswith("rng_state")
    }


def _make_own(checkpoint: Path) -> None:
    """Turn the received files into a checkpoint: a region that takes over starts from the global weights."""
    for path in (checkpoint / disk.EXPORT).iterdir():
        shutil.copyfile(path, checkpoint / path.name)
    disk.mark_taken_over(checkpoint)


def _spread(link: Link, source: int, data: bytes, what: str) -> bytes:
    """The bytes of region `source`, in every region."""
    what = f"region {source}'s {what}"
    length = torch.tensor([len(data)], dtype=torch.int64)
    link.broadcast(length.view(torch.float32), f"the length of {what}", source)
    size = int(length)
    padded = bytearray(data if link.region == source else size)
    padded += bytes(-size % 4)
    if not padded:
        return b""
    flat = torch.frombuffer(padded, dtype=torch.float32)
    link.broadcast(flat, what, source)
    return bytes(padded[:size])
