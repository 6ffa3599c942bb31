"""A clock that stands still while this process does.

A process that was stopped, or whose machine was suspended, wakes up with all its waits overdue, and has not read yet what came
meanwhile. Whoever judged others by that time would blame them for its own absence.
"""

import functools
import os
import threading
import time

_TICK_S = 0.1
_COUNTED_S = 0.5


class Clock:
    """Somebody looks at it several times a second: of a longer gap between two looks, `_COUNTED_S` count."""

    def __init__(self) -> None:
        self._looking = threading.Lock()
        self._looked_at, self._stood_s = time.monotonic(), 0.0

    def look(self) -> float:
        """For how many seconds this process stood still since the last look."""
        return self._look()[1]

    @property
    def now(self) -> float:
        """Seconds. Equal to the monotonic clock until this process stands still."""
        return self._look()[0]

    def _look(self) -> tuple[float, float]:
        with self._looking:
            now = time.monotonic()
            stood_s = max(now - self._looked_at - _COUNTED_S, 0.0)
            self._looked_at, self._stood_s = now, self._stood_s + stood_s
            return now - self._stood_s, stood_s


def awake_s() -> float:
    """Seconds of the clock that all threads of this process share."""
    return _shared().now


@functools.cache
def _shared() -> Clock:
    clock = Clock()
    threading.Thread(target=_keep_looking, args=(clock,), name="hf_cocodc-clock", daemon=True).start()
    return clock


os.register_at_fork(after_in_child=_shared.cache_clear)  # a forked process has no thread that looks


def _keep_looking(clock: Clock) -> None:
    while True:
        time.sleep(_TICK_S)
        clock.look()
