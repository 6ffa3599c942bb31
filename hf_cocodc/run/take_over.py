"""A region without a checkpoint takes over the checkpoint of another region.

Only files with known names cross the link, as JSON, text or safetensors: never a pickle. Trainer's own pickles (inner optimizer,
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

from ..errors import CheckpointError
from ..links.base import Link
from ..links.spreading import spread
from . import checkpoint as disk
from . import local_weights, manifest, numbering
from .export import put_beside
from .trees import put_together, take_apart

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 26
_TREES = "trees"
"""Folder of what was taken apart, while it travels."""
_STATES = ("optimizer.pt", "optimizer.bin", "optimizer_0", "scheduler.pt", "scaler.pt")
"""States that Trainer and Accelerate pickle; a folder is sharded."""
_ITEMS = "$items"
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_KNOWN = re.compile(
    rf"trainer_state\.json|{disk.FOLDER}/state(-lane\d+)?\.json|{disk.FOLDER}/global-lane\d+\.safetensors"
    rf"|{_TREES}/({'|'.join(map(re.escape, _STATES))})\.(json|safetensors)|{disk.FOLDER}/local-lane\d+\.safetensors"
    rf"|{manifest.EXPORT}/({_WORD}/)?{_WORD}\.(safetensors|json|txt|model|tiktoken|jinja|md)"
)
"""Names of the files that may cross the link."""


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
        with _parcel(checkpoint) as files:
            _travel(link, source, files, None)
        return
    _travel(link, source, {}, half if lacking else None)
    if lacking:
        with disk.saving(checkpoint):
            _make_own(half)
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
    for name in json.loads(listed):
        if not _KNOWN.fullmatch(name):
            raise CheckpointError(
                f"region {source} sends a file named {name!r} with its checkpoint, which no checkpoint has: it is not written. "
                "Do all regions have the same version of hf_cocodc? Is the store reached by others?"
            )
    if into is not None:
        shutil.rmtree(into, ignore_errors=True)
    for name, size in json.loads(listed).items():
        for start in range(0, max(size, 1), _CHUNK_BYTES):
            chunk = b""
            if name in files:
                with files[name].open("rb") as file:
                    file.seek(start)
                    chunk = file.read(_CHUNK_BYTES)
            chunk = spread(link, source, chunk, f"{name} of region {source}'s checkpoint")
            if into is not None:
                with disk.saving(into):
                    (into / name).parent.mkdir(parents=True, exist_ok=True)
                    with (into / name).open("ab") as file:
                        file.write(chunk)


@contextmanager
def _parcel(checkpoint: Path) -> Iterator[dict[str, Path]]:
    """The files that another region can continue from: no local weights or random numbers, and pickles taken apart.

    Of the local weights, only what is not trained goes with them: buffers, and frozen weights.
    """
    aside = checkpoint.with_name(f"{checkpoint.name}.sent")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with disk.saving(aside):
            (aside / _TREES).mkdir(parents=True)
            for name in _STATES:
                if (checkpoint / name).exists():
                    _take_apart(checkpoint / name, aside / _TREES / name)
            (aside / disk.FOLDER).mkdir()
            for path in checkpoint.glob(local_weights.weights_file("*")):
                _leave_out(path, disk.trained(checkpoint), aside / disk.FOLDER / path.name)
        found = {
            path.relative_to(folder).as_posix(): path
            for folder in (checkpoint, aside)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        yield {name: path for name, path in found.items() if _KNOWN.fullmatch(name)}
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _make_own(checkpoint: Path) -> None:
    """Turn the received files into a checkpoint: a region that takes over starts from the global weights."""
    trees = checkpoint / _TREES
    put_beside(checkpoint)
    for path in trees.glob("*.json"):
        _put_together(path.with_suffix(""), checkpoint / path.stem)
    shutil.rmtree(trees, ignore_errors=True)
    disk.mark_taken_over(checkpoint)


def _leave_out(weights: Path, names: Collection[str], to: Path) -> None:
    """Copy a file of tensors without those of these names."""
    with safe_open(weights, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name not in names}  # noqa: SIM118
        save_file(kept, to, file.metadata())


def _take_apart(state: Path, to: Path) -> None:
    """Write a pickled state as JSON and safetensors. Only tensors, numbers and words are read of it."""
    pickled = state
    if state.is_dir():
        pickled = to.with_name(f"{to.name}.pickle")
        dcp_to_torch_save(state, pickled)
    tree, tensors = take_apart(_with_items(torch.load(pickled, map_location="cpu", weights_only=True)))
    if state.is_dir():
        pickled.unlink()
    try:
        Path(f"{to}.json").write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{state} cannot be sent to another region: {error}. Copy the checkpoint by hand, or resume without that region."
        ) from error
    save_file(tensors, f"{to}.safetensors")


def _put_together(tree: Path, state: Path) -> None:
    """Write what `_take_apart` made of a state as Trainer expects it."""
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
    """The value with dicts whose keys are not all words as lists of pairs: JSON knows no other keys."""
    if isinstance(value, dict):
        pairs = [[key, _with_items(each)] for key, each in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else {_ITEMS: pairs}
    return [_with_items(each) for each in value] if isinstance(value, list | tuple) else value


def _without_items(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = value.get(_ITEMS, value.items())
        return {key: _without_items(each) for key, each in pairs}
    return [_without_items(each) for each in value] if isinstance(value, list) else value
