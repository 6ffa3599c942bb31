"""The last file of a checkpoint: the list of all others, with their sizes and hashes. It shows what is missing or has changed.

Every file is hashed when the checkpoint is saved, and hashed again before a resume loads anything of it. Each time costs about a
second per GB and thread (`durable.sha256_of_all`), during which the region does not train. Users may edit cards, and add files
that no resume reads.

A checkpoint without this list was interrupted while it was saved, and is never read.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import reason
from ..net.validation import Count
from .durable import replace, sha256_of_all, sync

FORMAT = 3
"""Raise it when earlier versions would misread the files, or this one theirs: it reads no other."""
FOLDER = "cocodc"
COMPLETE = f"{FOLDER}/COMPLETE"
_PASSING = "checkpoint-is-incomplete.txt"
"""Trainer's own mark while it saves after SIGTERM; Trainer removes it later."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".pkl", ".distcp"}
_LOADED = re.compile(
    r"model(_\d+|-\d+-of-\d+)?\.safetensors(\.index\.json)?"
    r"|pytorch_model(_\d+|-\d+-of-\d+|_fsdp(_\d+)?(_rank\d+)?)?\.bin(\.index\.json)?"
    r"|adapter_model\.(safetensors|bin)|(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)|(sampler|dl_state_dict)(_\d+)?\.bin"
    r"|rng_state(_\d+)?\.pth|(random_states|custom_checkpoint)_\d+\.pkl"
)
"""Files that Trainer or Accelerate load from a checkpoint's own folder if they find them there."""
_FOLDERS = re.compile(rf"{FOLDER}|default|pytorch_model_fsdp(_\d+)?|optimizer_\d+")
"""Folders that we, PEFT, Trainer or Accelerate load from. Further adapters have folders of their names."""


class File(msgspec.Struct, frozen=True, rename={"size": "bytes"}):
    """A file on the list: its bytes, and the SHA-256 of its content."""

    size: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The list of a checkpoint's files, by name; `format` is their version, `run` the run that wrote them (0: none)."""

    format: int
    files: dict[str, File]
    run: Count = 0


def write(checkpoint: Path, run: int) -> None:
    """Wait until all files of a checkpoint are on the disk, then list them with their sizes and hashes."""
    aside = {checkpoint / COMPLETE, checkpoint / _PASSING}
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path not in aside]
    for path in paths:
        sync(path)
    for folder in [checkpoint, *(path for path in checkpoint.rglob("*") if path.is_dir())]:
        sync(folder)
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256}
        for path, sha256 in zip(paths, sha256_of_all(paths), strict=True)
    }
    content = {"format": FORMAT, "run": run, "files": files}
    text = json.dumps({**content, "sha256": _sha256(content)}, indent=1)
    replace(checkpoint / COMPLETE, lambda path: path.write_text(text, encoding="utf-8"))
    sync(checkpoint.parent)


def read(checkpoint: Path) -> Manifest:
    """The list of a checkpoint's files. Raises ValueError, which says why, if the checkpoint is none that this version reads."""
    if not checkpoint.is_dir():
        raise ValueError("there is no such folder")
    if not is_sealed(checkpoint):
        raise ValueError(
            f"{COMPLETE} is missing (saving was interrupted, or hf_cocodc did not write the checkpoint)"
        )
    try:
        content = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))
        number = msgspec.convert(content["format"], int)
        if number == FORMAT:  # else the other entries may mean something else
            if content.pop("sha256") != _sha256(content):
                raise ValueError("its content differs from its own SHA-256")
            return msgspec.convert(content, Manifest)
    except (OSError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"{COMPLETE} is damaged ({reason(error)})") from error
    other = "a newer" if number > FORMAT else "the older"
    raise ValueError(f"its format is {number}, this hf_cocodc reads {FORMAT}; install {other} one")


def is_sealed(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved to its end; its files may have changed since then."""
    return (checkpoint / COMPLETE).is_file()


def unreadable(checkpoint: Path) -> str | None:
    """Why a checkpoint is none that this version reads, by its list alone; None if it is one."""
    try:
        read(checkpoint)
    except ValueError as error:
        return str(error)
    return None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, what was expected and what is there; None if all is well. Reads every file.

    What a training script has saved beside Trainer's files counts, too: the script may read it. Cards, which only people read,
    do not.
    """
    try:
        listed = read(checkpoint).files
        files = {name: file for name, file in listed.items() if not name.endswith(".md")}
        return _changed(checkpoint, files) or _added(checkpoint, listed) or _edited(checkpoint, files)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error}"


def _changed(checkpoint: Path, files: Mapping[str, File]) -> str | None:
    """A file that is missing or has another size."""
    for name, file in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != file.size:
            return f"{name} has {path.stat().st_size} bytes, {file.size} were saved"
    return None


def _added(checkpoint: Path, files: Mapping[str, File]) -> str | None:
    """A file that is not on the list and would change what a resume loads."""
    folders = {name.split("/")[0] for name in files if "/" in name and Path(name).suffix in _WEIGHTS}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        folder, _, inside = name.partition("/")
        known = folder in folders or _FOLDERS.fullmatch(folder)
        loaded = known and path.suffix in _WEIGHTS if inside else _LOADED.fullmatch(name)
        if loaded and name not in files and path.is_file():
            return f"{name} was not there when the checkpoint was saved"
    return None


def _edited(checkpoint: Path, files: Mapping[str, File]) -> str | None:
    """A file whose hash is another."""
    current = sha256_of_all([checkpoint / name for name in files])
    for (name, file), sha256 in zip(files.items(), current, strict=True):
        if sha256 != file.sha256:
            return f"{name} has changed since it was saved: its SHA-256 is {sha256[:12]}, {file.sha256[:12]} was saved"
    return None


def _sha256(content: dict[str, Any]) -> str:
    """Of the list itself, whatever its layout in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
