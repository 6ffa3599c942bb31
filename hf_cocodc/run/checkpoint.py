"""Checkpoints on disk: what is written, when a checkpoint counts as complete, and how it is read.

::

    checkpoint-N/                     files of Trainer or Accelerate (local weights, inner optimizer, ...)
        cocodc/state.json             format version, facts of the run, and the engine's state without its tensors
        cocodc/global-lane0.safetensors   its tensors: global params, outer state, transfers in flight, residuals
        cocodc/state-lane1.json, ...  the same for further lanes, if the model is sharded
        cocodc/COMPLETE               written last: every file of the checkpoint with its size, ours with their SHA-256
        global/                       the global model, for `from_pretrained`

A checkpoint without COMPLETE was interrupted while it was saved; it is never read. We read no pickle.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import CheckpointError
from .trees import put_together, take_apart

FORMAT = 1
"""Raise it when earlier versions would misread the files. Older formats are still read."""
PREFIX = "checkpoint-"
FOLDER = "cocodc"
EXPORT = "global"
"""Folder of the global model in a checkpoint."""
COMPLETE = f"{FOLDER}/COMPLETE"
RUN = f"{FOLDER}/run"
"""In the folder of the checkpoints: the number of the run that writes there now."""
_PASSING = "checkpoint-is-incomplete.txt"
"""Trainer's own mark while it saves after SIGTERM; Trainer removes it later."""
_TAKEN_OVER = "joining"
"""Name of `Facts.taken_over` in format 1."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What identifies the run of a checkpoint.

    Attributes:
        step: inner steps made.
        region: region that wrote it.
        num_regions: number of regions at that time.
        num_lanes: lanes of the region.
        settings: all settings of the method.
        finished: whether the run had finished.
        journal: bytes of the journal that belong to the run up to here.
        taken_over: whether it was copied from another region, and this region's own part is missing.
    """

    step: int
    region: int
    num_regions: int
    num_lanes: int
    settings: dict[str, Any]
    finished: bool
    journal: int
    taken_over: bool = False

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Facts":
        """Raises KeyError if a fact is missing."""
        named = {**content, "taken_over": content.get(_TAKEN_OVER, False)}
        return cls(**{each.name: named[each.name] for each in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        named = asdict(self)
        return {**{name: named[name] for name in named if name != "taken_over"}, _TAKEN_OVER: self.taken_over}


class Saved(NamedTuple):
    """Our part of a checkpoint, as read.

    Attributes:
        state: of `Synchronizer.state_dict`.
        facts: of the run that wrote it.
    """

    state: dict[str, Any]
    facts: Facts


def tensors_file(lane: int = 0) -> str:
    """File of a lane's tensors in a checkpoint."""
    return f"{FOLDER}/global-lane{lane}.safetensors"


def state_file(lane: int = 0) -> str:
    """File of a lane's state, without its tensors, in a checkpoint."""
    return f"{FOLDER}/state-lane{lane}.json" if lane else f"{FOLDER}/state.json"


def begin(checkpoint: Path) -> None:
    """Make a checkpoint's folder. The checkpoint is not complete before `seal`.

    Raises:
        CheckpointError: the disk refuses.
    """
    with _saving(checkpoint):
        (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
        (checkpoint / COMPLETE).unlink(missing_ok=True)


def write(checkpoint: Path, saved: Saved, lane: int = 0) -> None:
    """Write the engine's state into a checkpoint.

    Args:
        checkpoint: folder `checkpoint-N`, made by `begin`.
        saved: the state and the facts.
        lane: the lane of the state.

    Raises:
        CheckpointError: the disk is full or cannot be written; other checkpoints are untouched.
    """
    with _saving(checkpoint):
        tree, tensors = take_apart(saved.state)
        _replace(checkpoint / tensors_file(lane), lambda path: save_file(tensors, path))
        content = {"format": FORMAT, **saved.facts.to_json(), "state": tree}
        text = json.dumps(content, indent=1, allow_nan=False)
        _replace(checkpoint / state_file(lane), lambda path: path.write_text(text, encoding="utf-8"))


def seal(checkpoint: Path) -> None:
    """Declare a checkpoint complete: all of its files are on the disk now, and listed with their sizes.

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


def read(checkpoint: Path, lane: int = 0) -> Saved:
    """The engine's state and the facts of its run.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or of a format that this version does not know.
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
                f"{checkpoint} has no {name}: a region with fewer ranks wrote it. Launch the region with as many ranks as then."
            )
        if _sha256(checkpoint / name) != listed[name]["sha256"]:
            raise CheckpointError(
                f"{checkpoint / name} has changed since it was saved: its SHA-256 differs from the one in {COMPLETE}. Resume "
                "from another checkpoint of the run."
            )
    try:
        content = json.loads((checkpoint / state_file(lane)).read_text(encoding="utf-8"))
        # copies: a matrix product may give other bits if the file's layout leaves a tensor unaligned
        tensors = {name: each.clone() for name, each in load_file(checkpoint / tensors_file(lane)).items()}
        return Saved(put_together(content["state"], tensors), Facts.from_json(content))
    except (json.JSONDecodeError, SafetensorError, KeyError, OSError) as error:
        raise CheckpointError(f"{checkpoint / FOLDER} cannot be read: {error}.") from error


def mark_taken_over(checkpoint: Path) -> None:
    """Write into a copied checkpoint that it is another region's."""
    for path in (checkpoint / FOLDER).glob("state*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, _TAKEN_OVER: True}), encoding="utf-8")


def num_writers(checkpoint: Path) -> int:
    """Number of regions of the run when it wrote a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    try:
        return int(json.loads((checkpoint / state_file()).read_text(encoding="utf-8"))["num_regions"])
    except (json.JSONDecodeError, KeyError, OSError) as error:
        raise CheckpointError(f"{checkpoint / state_file()} cannot be read: {error}.") from error


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its list of files; None if it is complete."""
    if not (checkpoint / COMPLETE).is_file():
        return f"{COMPLETE} is missing (saving was interrupted, or hf_cocodc did not write the checkpoint)"
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
    """Why the run that writes to this folder cannot continue from a checkpoint; None if it can."""
    wrong = damage(checkpoint)
    if wrong is None and _mark(checkpoint).get("run", 0) != run_of(checkpoint.parent):
        wrong = "it is of an earlier run in this folder; give its path to continue that run"
    return wrong


def run_of(folder: Path) -> int:
    """The number of the run that writes to a folder; 0 if there is none."""
    return int((folder / RUN).read_text(encoding="utf-8")) if (folder / RUN).is_file() else 0


def begin_run(folder: Path, run: int) -> None:
    """From now on checkpoints in `folder` belong to `run`. Checkpoints of an earlier run stay, but are not continued from.

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
    """Delete the oldest checkpoints until `limit` are left, but keep those that a region may still need.

    Args:
        folder: the folder of the checkpoints.
        limit: number of checkpoints to keep; None for all.
        saved_everywhere: step of the newest checkpoint that is complete in every region: it stays, and so do later ones.
        keep: further steps that stay.
    """
    found = checkpoints(folder)
    surplus = len(found) - limit if limit else 0
    old = [step for step in found if step < saved_everywhere and step not in keep]
    for step in old[: max(surplus, 0)]:
        remove(found[step])


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, if there is one. A checkpoint that is half deleted is not complete."""
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


def _replace(path: Path, save: Callable[[Path], Any]) -> None:
    """Write a file under another name, and rename it when it is on the disk: the file is complete or absent."""
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
