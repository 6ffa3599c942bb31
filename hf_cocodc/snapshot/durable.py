"""Files that are complete or absent on the disk, and hashes that show whether they have changed."""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError, CocodcError, reason

_PIECE_BYTES = 1 << 22
_MOST_THREADS = 4


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers of a disk that takes no more."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust pass on a system error; that of the tokenizers has no class of its own."""
_OF_TORCH = ("inline_container", "iostream error")
"""What torch says where a file could not be written. It does not say why."""


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
            f"{folder} could not be saved: {words}. Earlier checkpoints are untouched; make room or change "
            "training.output_dir, then resume."
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
