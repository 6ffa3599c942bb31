"""A snapshot as files that travel: which ones, under which names, and how a region takes over another's checkpoint.

Only files with known names travel: JSON, text, safetensors, and the states of inner optimizers, schedulers and scalers as
`torch.save` writes them. Only `torch.load` with `weights_only=True` reads these; it runs no code of theirs.
"""

import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from ..errors import CheckpointError, LinkError, reason
from ..link.base import Link
from ..link.spreading import spread
from . import checkpoint as disk
from . import folders, local_weights, manifest
from .manifest import FOLDER, files_below, saving

logger = logging.getLogger(__name__)

_STATES = re.compile(r"(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)")
"""States that Trainer and Accelerate save, and load with `weights_only=True`."""
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_KNOWN = re.compile(
    rf"{FOLDER}/state(-lane\d+)?\.json|{FOLDER}/(global|local)-lane\d+\.safetensors"
    rf"|{_STATES.pattern}|{FOLDER}/optimizer_\d+\.pt"
    rf"|(?!{FOLDER}/)({_WORD}/)?{_WORD}\.(safetensors|json|txt|model|tiktoken|jinja|md)"
)
"""Names of the files that may reach another region: ours, states, the global model's and Trainer's state. A sharded optimizer, a
folder that has a pickle of another kind, travels as one file.
"""
_Sizes = dict[Annotated[str, Meta(max_length=500)], Annotated[int, Meta(ge=0, le=1 << 50)]]
"""Bytes of files by their names."""

_CHUNK_BYTES = 1 << 26


def check_files(sizes: Any, source: int) -> dict[str, int]:
    """Names and sizes of the files that region `source` announces, as JSON or what that means. Raises LinkError if it sends no
    such list, CheckpointError if no checkpoint has a file of such a name.
    """
    try:
        is_text = isinstance(sizes, bytes)
        checked = msgspec.json.decode(sizes, type=_Sizes) if is_text else msgspec.convert(sizes, _Sizes)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"region {source} does not say which files it sends ({error}).") from error
    for name in checked:
        if not _KNOWN.fullmatch(name):
            raise CheckpointError(
                f"region {source} sends a file named {name[:200]!r} with its checkpoint, which no checkpoint has: it is not "
                "written. Do all regions have the same version of hf_cocodc?"
            )
    return checked


def files_in(folder: Path) -> dict[str, Path]:
    """The files below a folder that may travel, by their names in a checkpoint."""
    return {name: path for name, path in files_below(folder).items() if _KNOWN.fullmatch(name)}


@contextmanager
def files_to_send(checkpoint: Path) -> Iterator[dict[str, Path]]:
    """The files from which another region can continue: no random numbers, and of the local weights only what is not trained
    (buffers and frozen weights).
    """
    aside = checkpoint.with_name(f"{checkpoint.name}.sent")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with saving(aside):
            (aside / FOLDER).mkdir(parents=True)
            join_shards(checkpoint, aside)
            trained = disk.read(checkpoint, with_values=False).synchronized
            for path in checkpoint.glob(local_weights.weights_file("*")):
                _leave_out(path, trained, aside / FOLDER / path.name)
        listed = manifest.read(checkpoint).files  # what a user has added stays
        own = {name: path for name, path in files_in(checkpoint).items() if name in listed}
        yield own | files_in(aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def join_shards(checkpoint: Path, into: Path) -> None:
    """Write each sharded optimizer of a checkpoint as one file, as it travels."""
    for state in checkpoint.glob("optimizer_*"):
        if state.is_dir():
            dcp_to_torch_save(state, into / FOLDER / f"{state.name}.pt")


def make_own(checkpoint: Path) -> None:
    """Turn received files into a checkpoint, to start from its global weights. Raises CheckpointError if they are none."""
    with disk.refusing(checkpoint):
        for path in checkpoint.iterdir():
            if _STATES.fullmatch(path.name):
                check_state(path)
        for path in (checkpoint / FOLDER).glob("optimizer_*.pt"):
            # that function reads whatever a pickle holds: it gets one of ours
            torch.save(torch.load(path, map_location="cpu", weights_only=True), path)
            torch_save_to_dcp(path, checkpoint / path.stem)
            path.unlink()
        disk.mark_taken_over(checkpoint)


def check_state(path: Path) -> None:
    """Read a state as Trainer will. Raises what `torch.load` raises if it holds anything but tensors, numbers and text."""
    torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def write_state(state: Any, path: Path) -> None:
    """Write the state of an inner optimizer, scheduler or scaler. Raises CheckpointError if another region could not load it."""
    try:
        torch.save(state, path)
        check_state(path)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path.name} cannot be sent to another region: {reason(error)}. Stop all regions, and resume them together."
        ) from error


def _leave_out(weights: Path, names: Collection[str], to: Path) -> None:
    """Copy a file of tensors without those named."""
    with safe_open(weights, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name not in names}  # noqa: SIM118
        save_file(kept, to, file.metadata())


def take_over(link: Link, checkpoint: Path, holders: Sequence[int], run: int) -> None:
    """Send a checkpoint from the first region that has it to those that do not; a collective call of the leaders.

    Raises:
        CheckpointError: a file cannot be sent or has an unknown name, what lies in its place cannot be moved away, or the disk
            refuses.
    """
    source = min(holders)
    if link.region not in holders:
        logger.warning(
            "region %d has no complete checkpoint of step %d: it takes over region %d's.",
            *(link.region, folders.step_of(checkpoint), source),
        )
        _travel(link, source, {}, checkpoint)
        make_own(checkpoint)
        folders.begin_run(checkpoint.parent, run)
        disk.seal(checkpoint)
    elif link.region == source:
        with files_to_send(checkpoint) as files:
            _travel(link, source, files, None)
    else:
        _travel(link, source, {}, None)


def _travel(link: Link, source: int, files: dict[str, Path], into: Path | None) -> None:
    """Send files by their names in the checkpoint; write what arrives below `into`, if given, once its place is clear."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    listed = spread(
        link, source, json.dumps(sizes).encode(), f"the list of files of region {source}'s checkpoint"
    )
    expected = check_files(listed, source)
    if into is not None:
        _clear(into)
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
                with saving(into):
                    (into / name).parent.mkdir(parents=True, exist_ok=True)
                    with (into / name).open("ab" if start else "wb") as file:
                        file.write(chunk)


def _clear(checkpoint: Path) -> None:
    """Clear the place of a checkpoint. Raises CheckpointError if what lies there stays: files of two checkpoints would mix."""
    with saving(checkpoint):
        folders.make_room(checkpoint)
    if os.path.lexists(checkpoint):
        raise CheckpointError(
            f"{checkpoint} cannot be moved away, and another region's checkpoint is taken over only into an empty place: files "
            "of two checkpoints would mix. Remove it by hand, then resume."
        )
