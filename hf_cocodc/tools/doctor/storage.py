"""Findings about a storage in which regions meet."""

import shlex
import time
from collections.abc import Callable
from secrets import token_bytes, token_hex

from ...coordinator.in_storage import serving_in
from ...errors import CocodcError
from ...net.keys import Keys
from ...net.storage import Storage, StorageError
from .coordinator import NEW_SECRET
from .facts import OK, WARN, WRONG, Finding

_SLOW_S = 1.0


def examine(url: str, keys: Keys | None) -> list[Finding]:
    """Whether this machine can write, create, read, list and delete there, and whether a process serves there."""
    if keys is None:
        words = "none: whoever reads the storage reads what regions send, and whoever writes there changes the run."
        findings = [Finding("secret", WARN, words, NEW_SECRET)]
    else:
        findings = [
            Finding("secret", OK, "given: whoever reads the storage reads nothing of what regions send")
        ]
    try:
        if Storage(url).is_missing:
            words = (
                f"{url}: this machine has no such folder. Correct the URL, or make the folder for a new run"
            )
            return [
                *findings,
                Finding("storage", WRONG, words, f"mkdir {shlex.quote(url.removeprefix('file://'))}"),
            ]
        objects = Storage(url)
        took, serves = _tried(objects), serving_in(objects)
    except CocodcError as error:
        return [*findings, Finding("storage", WRONG, str(error))]
    shown = ", ".join(f"{what} {_in_words(took_s)}" for what, took_s in took.items())
    slowest_s = max(took_s for what, took_s in took.items() if what != "create")  # no transfer creates one
    level, slow = (WARN, ". Transfers wait for several requests") if slowest_s > _SLOW_S else (OK, "")
    findings.append(Finding("storage", level, f"{url}: {shown}{slow}"))
    who = "a region serves there" if serves else "nobody serves yet: the first region that starts will"
    return [*findings, Finding("coordinator", OK, who)]


def _in_words(seconds: float) -> str:
    """
    >>> _in_words(0.0123), _in_words(6.09)
    ('12.3 ms', '6.1 s')
    """
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _tried(objects: Storage) -> dict[str, float]:
    """Seconds that each kind of request took. Raises StorageError if one does not do what it should."""
    name, content, took = f"doctor/{token_hex(8)}", token_bytes(16), {}

    def timed(what: str, request: Callable[[], object], expected: object) -> None:
        began = time.perf_counter()
        found = request()
        took[what] = time.perf_counter() - began
        if found != expected:
            raise StorageError(
                f"{objects.url}: to {what} an object gave {found!r}, and not {expected!r}. Regions cannot meet in such a storage."
            )

    try:
        timed("create", lambda: objects.create(name, content), True)
        timed("read", lambda: objects.get(name), content)
        timed("list", lambda: objects.names("doctor").count(name.partition("/")[2]), 1)
        if objects.create(name, token_bytes(16)):
            raise StorageError(
                f"{objects.url}: it creates what is there already. Regions cannot meet in such a storage."
            )
        timed("write", lambda: objects.put(name, content), None)
    finally:
        timed("delete", lambda: objects.remove(name), None)
    return took
