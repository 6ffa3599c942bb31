"""Checkpoints on disk: what is written, when one counts as complete, and how it is read.

::

    checkpoint-N/                     whatever Trainer or Accelerate write there (local weights, inner optimizer, ...)
        cocodc/state.json             format version, facts of the run, and the engine's state but for its tensors
        cocodc/global-lane0.safetensors   its tensors: global params, outer state, transfers in flight, residuals
        cocodc/state-lane1.json, ...  the same of further lanes, where the model is sharded
        cocodc/COMPLETE               written last: every file of the checkpoint with its size, ours with their SHA-256
        global/                       the global model, for `from_pretrained`

A checkpoint without COMPLETE is one whose saving was interrupted: it is never read. Nothing here is a pickle.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError
from ..parts.codecs.base import State

FORMAT = 1
"""Raised whenever what is written changes in a way that earlier versions would misread; older formats are still read."""
PREFIX = "checkpoint-"
FOLDER = "cocodc"
EXPORT = "global"
"""Where the global model lies in a checkpoint."""
COMPLETE = f"{FOLDER}/COMPLETE"
RUN = f"{FOLDER}/run"
"""In the folder that the checkpoints lie in: the number of the run that writes there now."""
_PASSING = "checkpoint-is-incomplete.txt"
"""Trainer's own mark while it saves after SIGTERM; it is gone when the checkpoint is used."""
_MARK = "$tensor"
_FLOAT = "$float"


def tensors_file(lane: int = 0) -> str:
    """Where the tensors of a lane lie in a checkpoint."""
    return f"{FOLDER}/global-lane{lane}.safetensors"


def state_file(lane: int = 0) -> str:
    """Where everything but the tensors of a lane lies in a checkpoint."""
    return f"{FOLDER}/state-lane{lane}.json" if lane else f"{FOLDER}/state.json"


def begin(checkpoint: Path) -> None:
    """Make a checkpoint's folder; from here on it is not complete until `seal`.

    Raises:
        CheckpointError: the disk refuses.
    """
    with _saving(checkpoint):
        (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
        (checkpoint / COMPLETE).unlink(missing_ok=True)


def write(checkpoint: Path, state: State, facts: dict[str, Any], lane: int = 0) -> None:
    """Write the engine's state into a checkpoint.

    Args:
        checkpoint: folder `checkpoint-N`, made by `begin`.
        state: of `Synchronizer.state_dict`.
        facts: JSON-able; what identifies the run (method and settings, region, number of regions).
        lane: whose tensors these are.

    Raises:
        CheckpointError: the disk is full or cannot be written; other checkpoints are untouched.
    """
    with _saving(checkpoint):
        tensors: dict[str, Tensor] = {}
        tree = _take_apart(state, "", tensors, {})
        _replace(checkpoint / tensors_file(lane), lambda path: save_file(tensors, path))
        text = json.dumps({"format": FORMAT, **facts, "state": tree}, indent=1, allow_nan=False)
        _replace(checkpoint / state_file(lane), lambda path: path.write_text(text, encoding="utf-8"))


def seal(checkpoint: Path) -> None:
    """Declare a checkpoint complete: everything in it is on the disk now, and listed with its size.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    with _saving(checkpoint):
        files = {}
        for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            if path.name == _PASSING:
                continue
            name = path.relative_to(checkpoint).as_posix()
            _sync(path)
            files[name] = {"bytes": path.stat().st_size}
            if name.startswith(f"{FOLDER}/"):
                files[name]["sha256"] = _sha256(path)  # type: ignore[assignment]
        for folder in [checkpoint, *(path for path in checkpoint.rglob("*") if path.is_dir())]:
            _sync(folder)
        text = json.dumps({"format": FORMAT, "run": run_of(checkpoint.parent), "files": files}, indent=1)
        _replace(checkpoint / COMPLETE, lambda path: path.write_text(text, encoding="utf-8"))
        _sync(checkpoint.parent)


def read(checkpoint: Path, lane: int = 0) -> tuple[State, dict[str, Any]]:
    """The engine's state and the facts it was written with.

    Raises:
        CheckpointError: incomplete, damaged, or of a format this version does not know.
    """
    wrong = damage(checkpoint)
    if wrong is not None:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed from: {wrong}. Resume from another checkpoint of the run."
        )
    listed = _mark(checkpoint)["files"]
    for name in (state_file(lane), tensors_file(lane)):
        if name not in listed:
            raise CheckpointError(
                f"{checkpoint} has no {name}: it was written by a region with fewer ranks. Launch the region as it was."
            )
        if _sha256(checkpoint / name) != listed[name]["sha256"]:
            raise CheckpointError(
                f"{checkpoint / name} is not what was saved: its SHA-256 differs from the one in {COMPLETE}. Resume from "
                "another checkpoint of the run."
            )
    try:
        facts = json.loads((checkpoint / state_file(lane)).read_text(encoding="utf-8"))
        # copies, for a matrix product may give other bits where the file's layout leaves a tensor unaligned
        tensors = {name: each.clone() for name, each in load_file(checkpoint / tensors_file(lane)).items()}
        state = _put_together(facts.pop("state"), tensors)
    except (json.JSONDecodeError, SafetensorError, KeyError, OSError) as error:
        raise CheckpointError(f"{checkpoint / FOLDER} cannot be read: {error}.") from error
    return state, facts


def num_writers(checkpoint: Path) -> int:
    """Regions of the run when it wrote a complete checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return int(json.loads((checkpoint / state_file()).read_text(encoding="utf-8"))["num_regions"])
    except (json.JSONDecodeError, KeyError, OSError) as error:
        raise CheckpointError(f"{checkpoint / state_file()} cannot be read: {error}.") from error


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its list of files; None where it is complete."""
    if not (checkpoint / COMPLETE).is_file():
        return f"{COMPLETE} is missing (its saving was interrupted, or hf_cocodc did not write it)"
    try:
        mark = _mark(checkpoint)
        version, files = mark["format"], mark["files"].items()
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
        return f"{COMPLETE} is damaged"
    if version > FORMAT:
        return f"its format is {version}, this hf_cocodc reads up to {FORMAT}; install a newer one"
    for name, entry in files:
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {entry['bytes']} were saved"
    return None


def unusable(checkpoint: Path) -> str | None:
    """Why the run that writes to this folder cannot go on from a checkpoint; None where it can."""
    wrong = damage(checkpoint)
    if wrong is None and _mark(checkpoint).get("run", 0) != run_of(checkpoint.parent):
        wrong = "it is of an earlier run in this folder; give its path to go on with that one"
    return wrong


def run_of(folder: Path) -> int:
    """The number of the run that writes to a folder; 0 where it has none."""
    return int((folder / RUN).read_text(encoding="utf-8")) if (folder / RUN).is_file() else 0


def begin_run(folder: Path, run: int) -> None:
    """From here on checkpoints in `folder` are those of `run`: ones of an earlier run stay, but are not gone on from.

    Raises:
        CheckpointError: the disk refuses.
    """
    with _saving(folder):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        _replace(folder / RUN, lambda path: path.write_text(str(run), encoding="utf-8"))


def continue_run(checkpoint: Path, folder: Path) -> None:
    """`begin_run` with the run that wrote `checkpoint`."""
    begin_run(folder, _mark(checkpoint).get("run", 0))


def checkpoints(folder: Path) -> dict[int, Path]:
    """Every `checkpoint-N` in a folder, complete or not, by its step, oldest first."""
    found = {}
    for path in folder.glob(f"{PREFIX}*"):
        step = path.name.removeprefix(PREFIX)
        if path.is_dir() and step.isdigit():
            found[int(step)] = path
    return dict(sorted(found.items()))


def rotate(folder: Path, limit: int | None, saved_everywhere: int, keep: set[int]) -> None:
    """Delete the oldest checkpoints until `limit` are left, but only such as no region can need any more.

    Args:
        folder: where they lie.
        limit: how many are to be left; all where it is None.
        saved_everywhere: step of the newest that is complete in every region: it stays, and so do later ones.
        keep: further steps that stay.
    """
    found = checkpoints(folder)
    surplus = len(found) - limit if limit else 0
    old = [step for step in found if step < saved_everywhere and step not in keep]
    for step in old[: max(surplus, 0)]:
        remove(found[step])


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint if there is one; half deleted it is not complete."""
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    if checkpoint.is_dir():
        shutil.rmtree(checkpoint)


def _mark(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))


@contextmanager
def _saving(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint} could not be saved: {error}. Earlier checkpoints are untouched; make room or change "
            "training.output_dir, then resume."
        ) from error


def _replace(path: Path, save: Any) -> None:
    """Write a file under another name and give it its own once it is on the disk, so that it is whole or absent."""
    half = path.with_name(f"{path.name}.half")
    try:
        save(half)
        _sync(half)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            sha.update(piece)
    return sha.hexdigest()


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    """`value` with its tensors named and put into `tensors`; one that is met twice is kept once."""
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = name
            on_host = value.cpu()
            alone = on_host.untyped_storage().nbytes() == on_host.nbytes
            tensors[name] = on_host if alone else on_host.clone()  # safetensors refuses views of one memory
        return {_MARK: seen[id(value)]}
    if isinstance(value, dict):
        return {key: _take_apart(each, _join(name, key), tensors, seen) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_take_apart(each, _join(name, i), tensors, seen) for i, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _MARK in value:
            return tensors[value[_MARK]]
        if _FLOAT in value:
            return float(value[_FLOAT])
        return {key: _put_together(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        return [_put_together(each, tensors) for each in value]
    return value


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)
