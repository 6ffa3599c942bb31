"""Locks: one process writes into a folder at a time.

The kernel ends a lock with the process that holds it, however that process ends; children that it has forked do not keep it. The
file stays.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import InputError

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def region_lock(folder: Path) -> Path:
    """The lock of a region's folder, held by the process that trains there."""
    return folder / "cocodc" / "lock"


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold a lock inside the block; this process may take it again meanwhile. Raises InputError if another process holds it, or
    the folder cannot be written.
    """
    # one object a file and process, which counts how often it is taken
    lock = FileLock(path.absolute(), timeout=0, thread_local=False, is_singleton=True)
    with contextlib.ExitStack() as block:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            block.enter_context(lock)
        except Timeout:
            raise InputError(_refusal(path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InputError(
                    f"{path.parent} cannot be written: {error.strerror}. Change training.output_dir (of launch: --logs), or make "
                    "the folder writable."
                ) from error
            logger.warning(
                "%s lies on a file system without locks (%s): do not start a second run in this folder.",
                *(path.parent, error.strerror),
            )
        else:
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            path.write_text(json.dumps(holder), encoding="utf-8")
        yield


def refuse_held(path: Path) -> None:
    """Raise InputError if a process holds a lock, or its file cannot be read. Keeps none, and makes no file."""
    if not path.exists():
        return
    try:
        FileLock(path.absolute(), timeout=0).acquire().lock.release()
    except Timeout:
        raise InputError(_refusal(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def _refusal(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        who = f"process {owner['pid']} on {owner['host']}, which started there at {since}"
        end = f"end it (kill {owner['pid']} on {owner['host']})"
    except (OSError, json.JSONDecodeError, KeyError, TypeError):  # it has only just taken the lock
        who, end = "another process", "end it"
    folder = path.parent.parent
    return (
        f"{folder} is in use by {who}: two runs in one folder would overwrite each other. Wait until it has ended, {end}, or "
        "choose another folder (training.output_dir)."
    )
