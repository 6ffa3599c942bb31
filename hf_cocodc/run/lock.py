"""Locks: one process writes into a folder at a time.

The kernel ends a lock with the process that holds it, however that process ends. The file stays.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_registry = threading.Lock()
_held: dict[str, tuple[int, int]] = {}
"""File descriptor of each lock of this process, and how often it was taken."""


def region_lock(folder: Path) -> Path:
    """The lock of a region's folder, held by the process that trains there."""
    return folder / "cocodc" / "lock"


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold a lock inside the block; this process may take it again meanwhile. Raises InputError if another process holds it, or
    the folder cannot be written.
    """
    name = str(path.absolute())
    with _registry:
        descriptor, count = _held.get(name, (None, 0))
        if descriptor is None:
            descriptor = _take(path)
        _held[name] = descriptor, count + 1
    try:
        yield
    finally:
        with _registry:
            descriptor, count = _held.pop(name)
            if count > 1:
                _held[name] = descriptor, count - 1
            else:
                os.close(descriptor)


def refuse_held(path: Path) -> None:
    """Raise InputError if another process holds a lock, or its file cannot be read. Takes none, and writes nothing."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(_refusal(path, file.read(4096).decode("utf-8", errors="replace"))) from None
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def _take(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(
            f"{path.parent} cannot be written: {error.strerror}. Change training.output_dir, or make the folder writable."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode("utf-8", errors="replace")
        os.close(descriptor)
        raise InputError(_refusal(path, holder)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
        logger.warning(
            "%s lies on a file system without locks (%s): do not start a second run in this folder.",
            *(path.parent, error.strerror),
        )
        return descriptor
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder.encode(), 0)
    return descriptor


def _refusal(path: Path, holder: str) -> str:
    try:
        owner = json.loads(holder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        who = f"process {owner['pid']} on {owner['host']}, which started there at {since}"
        end = f"end it (kill {owner['pid']} on {owner['host']})"
    except (json.JSONDecodeError, KeyError, TypeError):  # it has only just taken the lock
        who, end = "another process", "end it"
    folder = path.parent.parent
    return (
        f"{folder} is in use by {who}: two runs in one folder would overwrite each other. Wait until it has ended, {end}, or "
        "choose another folder (training.output_dir)."
    )


def _forget() -> None:
    """In a forked child (of a data loader, say): it must not keep the lock when its parent has ended."""
    global _registry
    _registry = threading.Lock()
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
