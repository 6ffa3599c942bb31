"""A model on its way from a region to somebody who pulls it, over two connections to the coordinator: both ends of it.

`Given` has names and sizes, the bytes of the files follow, then `Sums` with their hashes.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ..coordinator.caller import CoordinatorConnection
from ..coordinator.messages import Given, Sums
from ..errors import InputError, LinkError, short
from ..net.view import Throttle
from .files import check_files

STALLED_S = 90.0
"""Longer than the coordinator's: it ends both connections first."""
_CHUNK = 1 << 18
_POLL_S = 0.2


def send(
    connection: CoordinatorConnection,
    given: Given,
    files: Mapping[str, Path],
    rate: float | None,
    look: Callable[[], None],
) -> None:
    """Send files, and wait until the other end has them, or has gone.

    Args:
        rate: bytes per second to send at most; None for no limit.
        look: called several times a second; what it raises goes to the caller.

    Raises:
        ConnectionEnded: the other end has gone before it had all.
    """
    connection.send(given)
    sums: dict[str, str] = {}
    throttle = Throttle(rate)
    most = _CHUNK if rate is None else max(min(int(rate * _POLL_S), _CHUNK), 1)
    for name, path in files.items():
        sha = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(most):
                sha.update(chunk)
                look()
                throttle.wait(len(chunk))
                connection.send_bytes(chunk, STALLED_S, look)
        sums[name] = sha.hexdigest()
    connection.send(Sums(sha256=sums))
    connection.wait_for_end(STALLED_S, look)


def receive(connection: CoordinatorConnection, given: Given, folder: Path) -> int:
    """Write what is given into a folder; returns the bytes of the files.

    Raises:
        LinkError: it ends too soon, or is damaged.
        InputError: the disk has no room, or what comes is no model.
    """
    sizes = check_files(given.files, given.region)
    total, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if total > free:
        raise InputError(
            f"the model has {total / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free at {short(folder.parent, 200)}. Make room, or "
            "name a folder elsewhere."
        )
    sums: dict[str, str] = {}
    for name, size in sizes.items():
        path, sha, left = folder / name, hashlib.sha256(), size
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            while left:
                chunk = connection.receive_bytes(min(left, _CHUNK), STALLED_S)
                sha.update(chunk)
                file.write(chunk)
                left -= len(chunk)
        sums[name] = sha.hexdigest()
    said = connection.receive(STALLED_S)
    if not isinstance(said, Sums) or said.sha256 != sums:
        raise LinkError(f"what region {given.region} has sent was altered on its way: its hashes differ.")
    return total
