"""What other threads want of a thread that waits for sockets."""

import contextlib
import logging
import queue
import selectors
import socket
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Orders:
    """Calls for the thread that waits at `selector`. Giving one wakes that thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        selector.register(self._woken, selectors.EVENT_READ, self)

    def give(self, order: Callable[[], Any]) -> None:
        """Have `order` called. Takes no lock of ours: a signal's handler may call it."""
        self._queue.put(order)
        with contextlib.suppress(OSError):  # the thread is awake, or has ended
            self._wake.send(b"\0")

    def carry_out(self) -> None:
        """Call what was ordered, in order; in the thread that waits at the selector."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while not self._queue.empty():
            attempt(self._queue.get())

    def close(self) -> None:
        self._wake.close()
        self._woken.close()


def attempt(call: Callable[..., Any], *given: Any) -> None:
    """Call; an error is logged. One call that fails must not end a thread that does many things."""
    try:
        call(*given)
    except Exception:
        logger.exception("%s failed for %r", getattr(call, "__qualname__", call), given)
