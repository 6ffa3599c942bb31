"""Ctrl-C while libraries are imported."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Inside the block, Ctrl-C ends this process without a traceback, and without anything else.

    For imports: Python reports an exception that is raised inside one, and libraries turn it into another.
    """
    usual = signal.default_int_handler
    # a shell lets a command in the background ignore Ctrl-C
    is_usual = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is usual
    )
    if is_usual:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        if is_usual:
            signal.signal(signal.SIGINT, usual)
