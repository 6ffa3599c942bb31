"""Waiting for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
"""No machine is too slow for it."""


def eventually(holds: Callable[[], T]) -> T:
    """Wait until something holds; returns what it found."""
    until = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.01)
    return found
