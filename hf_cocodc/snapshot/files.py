"""A snapshot as files that travel: which ones, under which names, and how a region takes over another's checkpoint.

Only files with known names travel, as JSON, text or safetensors, never as a pickle. Trainer's own pickles (inner optimizer,
scheduler, scaler) are taken apart before, and written anew by the region that takes over.
"""

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from ..errors import CheckpointError, LinkError
from ..link.base import Link
from ..link.spreading import spread
from ..net.validation import whole
from . import checkpoint as disk
from . import folders, local_weights, manifest
from .checkpoint import put_together, take_apart

logger = logging.getLogger(__name__)

TREES = "trees"
"""Folder for states that were taken apart, while they travel."""
_STATE = r"(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)|optimizer_\d+"
"""States that Trainer and Accelerate pickle; a folder is sharded."""
_ITEMS = "$items"
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_KNOWN = re.compile(
    rf"{disk.FOLDER}/(start|state(-lane\d+)?)\.json|{disk.FOLDER}/(global|local)-lane\d+\.safetensors"
    rf"|{TREES}/({_STATE})\.(json|safetensors)"
    rf"|(?!{disk.FOLDER}/|{TREES}/)({_WORD}/)?{_WORD}\.(safetensors|json|txt|model|tiktoken|jinja|md)"
)
"""Names of the files that may reach another region: ours, states that were taken apart, the global model's and Trainer's
state.
"""
_LARGEST_FILE = 1 << 50
_LONGEST_NAME = 500

_CHUNK_BYTES = 1 << 26


def check_files(sizes: Any, source: int) -> dict[str, int]:
    """Names and sizes of the files that region `source` announces. Raises LinkError if it sends no such list, CheckpointError
    if no checkpoint has a file of such a name.
    """
    try:
        checked = {name: whole(size, most=_LARGEST_FILE) for name, size in sizes.items()}
    except (AttributeError, ValueError) as error:
        raise LinkError(f"region {source} does not say which files it sends ({error}).") from error
    for name in checked:
        if len(name) > _LONGEST_NAME or not _KNOWN.fullmatch(name):
            raise CheckpointError(
                f"region {source} sends a file named {name[:200]!r} with its checkpoint, which no checkpoint has: it is not "
                "written. Do all regions have the same version of hf_cocodc?"
            )
    return checked


def files_in(folder: Path) -> dict[str, Path]:
    """The files below a folder that may travel, by their names in a checkpoint."""
    paths = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    return {name: path for name, path in paths.items() if _KNOWN.fullmatch(name)}


@contextmanager
def files_to_send(checkpoint: Path) -> Iterator[dict[str, Path]]:
    """The files from which another region can continue: no random numbers, pickles taken apart, and of the local weights only
    what is not trained (buffers and frozen weights).
    """
    aside = checkpoint.with_name(f"{checkpoint.name}.sent")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with disk.saving(aside):
            (aside / TREES).mkdir(parents=True)
            for state in checkpoint.iterdir():
                if re.fullmatch(_STATE, state.name):
                    _take_apart(state, aside / TREES / state.name)
            (aside / disk.FOLDER).mkdir()
            for path in checkpoint.glob(local_weights.weights_file("*")):
                _leave_out(path, disk.trained(checkpoint), aside / disk.FOLDER / path.name)
        listed = manifest.read(checkpoint).files  # what a user has added stays
        own = {name: path for name, path in files_in(checkpoint).items() if name in listed}
        yield own | files_in(aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def make_own(checkpoint: Path) -> None:
    """Turn received files into a checkpoint, to start from its global weights. Raises CheckpointError if they are none."""
    trees = checkpoint / TREES
    for path in trees.glob("*.json"):
        with disk.refusing(path):
            _put_together(path.with_suffix(""), checkpoint / path.stem)
    shutil.rmtree(trees, ignore_errors=True)
    with disk.refusing(checkpoint / disk.FOLDER):
        disk.mark_taken_over(checkpoint)


def write_tree(state: Any, to: Path) -> None:
    """Write a state of tensors, numbers and text as `to`.json and `to`.safetensors. Raises CheckpointError if it is none."""
    try:
        tree, tensors = take_apart(_with_items(state))
        Path(f"{to}.json").write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")
        save_file(tensors, f"{to}.safetensors")
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{to.name} cannot be sent to another region: {error}. Copy the checkpoint by hand, or resume without that region."
        ) from error


def _leave_out(weights: Path, names: Collection[str], to: Path) -> None:
    """Copy a file of tensors without those named."""
    with safe_open(weights, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name not in names}  # noqa: SIM118
        save_file(kept, to, file.metadata())


def _take_apart(state: Path, to: Path) -> None:
    """Write a pickled state as JSON and safetensors; only tensors, numbers and words are unpickled."""
    pickled = state
    if state.is_dir():
        pickled = to.with_name(f"{to.name}.pickle")
        dcp_to_torch_save(state, pickled)
    content = torch.load(pickled, map_location="cpu", weights_only=True)
    if state.is_dir():
        pickled.unlink()
    write_tree(content, to)


def _put_together(tree: Path, state: Path) -> None:
    """Turn what `write_tree` wrote into the file that Trainer expects."""
    content = json.loads(Path(f"{tree}.json").read_text(encoding="utf-8"))
    _pickle(_without_items(put_together(content, load_file(f"{tree}.safetensors"))), state)


def _pickle(content: Any, path: Path) -> None:
    if path.suffix:
        torch.save(content, path)
        return
    whole = path.with_name(f"{path.name}.pickle")
    torch.save(content, whole)
    torch_save_to_dcp(whole, path)
    whole.unlink()


def _with_items(value: Any) -> Any:
    """Turn dicts with keys other than text, which JSON does not know, into lists of pairs."""
    if isinstance(value, dict):
        pairs = [[key, _with_items(each)] for key, each in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else {_ITEMS: pairs}
    return [_with_items(each) for each in value] if isinstance(value, list | tuple) else value


def _without_items(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = value.get(_ITEMS, value.items())
        return {key: _without_items(each) for key, each in pairs}
    return [_without_items(each) for each in value] if isinstance(value, list) else value


def take_over(link: Link, checkpoint: Path, holders: Sequence[int], run: int) -> None:
    """Send a checkpoint from the first region that has it to those that do not; a collective call of the leaders.

    Raises:
        CheckpointError: a file cannot be sent or has an unknown name, or the disk refuses.
    """
    source = min(holders)
    lacking = link.region not in holders
    if lacking:
        logger.warning(
            "region %d has no complete checkpoint of step %s: it takes over region %d's.",
            *(link.region, checkpoint.name.removeprefix(folders.PREFIX), source),
        )
    half = checkpoint.with_name(f"{checkpoint.name}.half")
    if link.region == source:
        with files_to_send(checkpoint) as files:
            _travel(link, source, files, None)
        return
    _travel(link, source, {}, half if lacking else None)
    if lacking:
        with disk.saving(checkpoint):
            make_own(half)
            folders.make_room(checkpoint, run)
            half.rename(checkpoint)
        folders.begin_run(checkpoint.parent, run)
        disk.seal(checkpoint)


def _travel(link: Link, source: int, files: dict[str, Path], into: Path | None) -> None:
    """Send files by their names in the checkpoint; write what arrives below `into`, if given."""
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
