"""The cost of a storage as a link: its requests, and the rates at which a region writes and reads."""

import contextlib
import math
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...net.mailbox import PIECE, PIECES
from ...net.storage import Storage, StorageError
from ...threads import side_by_side
from .report import BenchReport, Row

TITLE = "a storage as a link"
SMALL_BYTES, REQUESTS = 64, 20
WRITE, READ, LIST, DELETE, UP, DOWN = "write", "read", "list", "delete", "write a payload", "read a payload"
"""What is measured, as the report names it."""


@dataclass(frozen=True, kw_only=True)
class StorageTimes:
    """The results of a measurement.

    Attributes:
        is_near: whether a request costs next to nothing (`Storage.is_near`).
        seconds: by what was measured, each single one.
        num_bytes: of a payload.
    """

    is_near: bool
    seconds: dict[str, list[float]]
    num_bytes: int


def measure(url: str, megabytes: float, repeat: int) -> StorageTimes:
    """Measure in a folder of its own below a URL, which is empty afterwards. Raises StorageError.

    Args:
        megabytes: size of a payload, which is written in pieces as a run does it, in 10^6 bytes.
        repeat: number of payloads written and read.
    """
    url = f"{url.rstrip('/')}/bench-{secrets.token_hex(8)}"
    objects = Storage(url)
    seconds: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        seconds.setdefault(what, []).append(time.perf_counter() - began)

    try:
        content = secrets.token_bytes(SMALL_BYTES)
        for number in range(REQUESTS):
            name = f"small/{number}"
            timed(WRITE, partial(objects.put, name, content))
            timed(READ, partial(_read, objects, name, content))
            timed(LIST, partial(objects.names, "small"))
            timed(DELETE, partial(objects.remove, name))
        num_bytes = round(megabytes * 1e6)
        pieces = [secrets.token_bytes(min(PIECE, num_bytes - at)) for at in range(0, num_bytes, PIECE)]
        named = [(f"large/{number}", piece) for number, piece in enumerate(pieces)]
        for _ in range(repeat):
            timed(UP, lambda: side_by_side([partial(objects.put, *each) for each in named], PIECES))
            timed(DOWN, lambda: side_by_side([partial(_read, objects, *each) for each in named], PIECES))
    finally:
        _empty(objects)
    return StorageTimes(is_near=objects.is_near, seconds=seconds, num_bytes=num_bytes)


def _read(objects: Storage, name: str, content: bytes) -> None:
    if objects.get(name) != content:
        raise StorageError(
            f"{objects.url}: {name!r} was written, and something else is read there, or nothing. Regions cannot meet in such "
            "a storage."
        )


def _empty(objects: Storage) -> None:
    """Remove what was written, as far as the storage lets it."""
    with contextlib.suppress(StorageError):
        for folder in ("small", "large"):
            for name in objects.names(folder):
                objects.remove(f"{folder}/{name}")


def report(url: str, results: StorageTimes) -> BenchReport:
    """The figures: the median of each, and what one in twenty exceeds."""
    rates = {UP: results.num_bytes, DOWN: results.num_bytes}
    rows: list[Row] = []
    for what, took in results.seconds.items():
        median = statistics.median(took)
        rate = 8 * rates[what] / median / 1e6 if what in rates else None
        rows.append({"what": what, "median ms": 1e3 * median, "p95 ms": 1e3 * _late(took), "Mbit/s": rate})
    notes = [
        f"{WRITE}, {READ}, {LIST}, {DELETE}: one request for an object of {SMALL_BYTES} bytes, {REQUESTS} times.",
        f"Payloads are written and read in pieces of {PIECE >> 20} MiB, {PIECES} at once: a region's own rates up and down.",
    ]
    setting = {"url": url, "megabytes": results.num_bytes / 1e6, "is_near": results.is_near}
    return BenchReport(TITLE, setting, rows, notes, samples=results.seconds)


def _late(seconds: list[float]) -> float:
    """The 95th of a hundred; of a few, the last."""
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]
