"""What is complete on the disk, or absent: files, and checkpoints, whose last file lists all others with their hashes.

A checkpoint without this list was interrupted while it was saved, and is never read. The list shows what is missing or has
changed. Every file is hashed when the checkpoint is saved, and hashed again before a resume loads anything of it. Each time costs
about a second per GB and thread (`sha256_of_all`), during which the region does not train. Users may edit cards, and add files
that no resume reads.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from ..errors import CheckpointError, CocodcError, reason
from ..validation import Count

FORMAT = 3
"""Raise it when earlier versions would misread the files, or this one theirs: it reads no other."""
FOLDER = "cocodc"
COMPLETE = f"{FOLDER}/COMPLETE"
SAVED_BY = f"{FOLDER}/saved-by-"
"""Begin of the name of a file by which a region claims a folder (`folders.claim`); the number of the run follows."""
_UNLISTED = re.compile(rf"{COMPLETE}|{FOLDER}/[^/]*\.half|{SAVED_BY}.*|checkpoint-is-incomplete\.txt")
"""Marks, which are no part of a checkpoint, and what a killed `replace` has left. The last one is Trainer's while it saves after
SIGTERM; Trainer removes it later.
"""
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

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers of a disk that takes no more."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust pass on a system error; that of the tokenizers has no class of its own."""
_OF_TORCH = ("inline_container", "iostream error")
"""What torch says where a file could not be written. It does not say why."""
_PIECE_BYTES = 1 << 22
_MOST_THREADS = 4


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
    paths = {name: path for name, path in files_below(checkpoint).items() if not _UNLISTED.fullmatch(name)}
    for path in [*paths.values(), checkpoint, *(path for path in checkpoint.rglob("*") if path.is_dir())]:
        sync(path)
    files = {
        name: {"bytes": path.stat().st_size, "sha256": sha256}
        for (name, path), sha256 in zip(paths.items(), sha256_of_all([*paths.values()]), strict=True)
    }
    content = {"format": FORMAT, "run": run, "files": files}
    text = json.dumps({**content, "sha256": _sha256(content)}, indent=1)
    replace(checkpoint / COMPLETE, lambda path: path.write_text(text, encoding="utf-8"))
    sync(checkpoint.parent)


def files_below(folder: Path) -> dict[str, Path]:
    """All files below a folder, by their names in it."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


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
        come = (f"{name} was not there when the checkpoint was saved" for name in added(checkpoint, listed))
        return _changed(checkpoint, files) or next(come, None) or _edited(checkpoint, files)
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


def added(checkpoint: Path, files: Mapping[str, File]) -> Iterator[str]:
    """Names of files that are not on the list and would change what a resume loads."""
    folders = {name.split("/")[0] for name in files if "/" in name and Path(name).suffix in _WEIGHTS}
    for name, path in files_below(checkpoint).items():
        folder, _, inside = name.partition("/")
        known = folder in folders or _FOLDERS.fullmatch(folder)
        loaded = known and path.suffix in _WEIGHTS if inside else _LOADED.fullmatch(name)
        if loaded and name not in files:
            yield name


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


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Turn a disk error, of whichever library, into a CheckpointError that says what to do."""
    try:
        yield
    except CocodcError:
        raise
    except Exception as error:
        words = _of_the_disk(error)
        if words is None:
            raise
        raise CheckpointError(
            f"{folder} could not be saved: {words}. Earlier complete checkpoints stay, unless a warning above says "
            "otherwise. Make room, or save elsewhere (training.output_dir in a recipe), then resume."
        ) from error


def _of_the_disk(error: Exception) -> str | None:
    """What is wrong with the disk; None for another error. A network error has no number, or another one."""
    words = str(error)
    if isinstance(error, OSError):
        return words if error.errno is not None else None
    number = _OF_RUST.search(words)
    if isinstance(error, SafetensorError) or (number is not None and int(number[1]) in FULL):
        return words
    if isinstance(error, RuntimeError) and any(each in words for each in _OF_TORCH):
        return f"the disk is full, or takes no more (torch: {reason(error)})"
    return None


def replace(path: Path, save: Callable[[Path], Any]) -> None:
    """Write a file under another name, and rename it once it is on the disk: the file is complete or absent."""
    half = path.with_name(f"{path.name}.half")
    try:
        save(half)
        sync(half)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    sha, piece = hashlib.sha256(), bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            sha.update(memoryview(piece)[:count])
    return sha.hexdigest()


def sha256_of_all(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file. Up to four threads share the files, each at about a second per GB."""
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="hf_cocodc-hash") as pool:
        return list(pool.map(sha256, paths))
