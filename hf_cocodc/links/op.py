"""A call of an elastic link, from when it is made until its result counts."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..meeting.presence import Member
from .calls import Call
from .view import View

Make = Callable[[View, tuple[int, ...]], Call]
"""Makes a call over a view, whose regions are given."""


@dataclass(eq=False)
class Op:
    """A call that its members make together, and the handle by which the training thread waits for it.

    Attributes:
        number: its place in the order of calls.
        what: names it in messages.
        members: who was there when it was made.
        changes: regions that had come in or left by then.
        call: makes the call over a view of the wire, whose regions are given.
        finish: makes the value of the call from what it returned, once that counts; called by the link's thread.
        losses: losses before the attempt that counts, or the present one.
        parties: the members of that attempt.
        bytes_sent: bytes that the attempt with a result has sent.
        void_bytes: bytes that void attempts have sent.
        awaited_at: when the training thread began to wait, by the monotonic clock; None while it does not.
        has: whether this member holds the result of the present attempt.
        stands: whether the result counts by a decision.
        found: the result, until it counts.
    """

    number: int
    what: str
    members: tuple[Member, ...]
    changes: int
    call: Make | None
    finish: Callable[["Op", Any], Any] | None
    losses: int = 0
    parties: tuple[Member, ...] = ()
    bytes_sent: int = 0
    void_bytes: int = 0
    awaited_at: float | None = None
    has: bool = False
    stands: bool = False
    found: Any = None
    _value: Any = None
    _error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def epoch(self) -> int:
        """Number of the epoch in which it completed."""
        return self.changes + self.losses

    def end(self) -> None:
        """Make the value from the result, and let the training thread have it."""
        assert self.finish is not None
        value = self.finish(self, self.found)
        # what they reference may reference the previous transfer, which references an earlier one
        self.call = self.finish = self.found = None
        self._value = value
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self) -> Any:
        self.awaited_at = time.monotonic()
        self._ended.wait()
        self.awaited_at = None
        if self._error is not None:
            raise self._error
        return self._value
