"""SIGINT and SIGTERM as a request: the first signal only calls a function."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TOGETHER_S = 5.0
"""SIGTERMs within so many seconds are one request: Slurm sends one to every process of a job, and launchers pass theirs on."""


def answer(name: str, region: int, leaves_alone: bool) -> str:
    """What a region says when a signal interrupts it; `leaves_alone`: the others are to train on."""
    does = (
        "sends what it has trained, and leaves; the others train on"
        if leaves_alone
        else "trains on until the others have heard of it; then all stop with a checkpoint"
    )
    return f"{name}: region {region} {does}. A second Ctrl-C, or a SIGTERM after {TOGETHER_S:g} s, ends this process at once.\n"


@contextlib.contextmanager
def first_signal(note: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, call note(name) at the first SIGINT or SIGTERM. A second signal has its usual effect.

    Only SIGTERMs that come together are one signal (`TOGETHER_S`).

    An existing SIGTERM handler (Trainer's just-in-time checkpoint) is called too. Does nothing outside the main thread,
    where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted_at = 0.0
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, previous in before.items():
            if signal.getsignal(number) in (handle, ignore_at_first):
                signal.signal(number, previous)

    def ignore_at_first(number: int, frame: Any) -> None:
        if time.monotonic() - noted_at >= TOGETHER_S:
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)

    def handle(number: int, frame: Any) -> None:
        nonlocal noted_at
        restore()
        noted_at = time.monotonic()
        signal.signal(signal.SIGTERM, ignore_at_first)
        note(signal.Signals(number).name)
        previous = before[signal.Signals(number)]
        if number == signal.SIGTERM and callable(previous):
            previous(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
