"""What a link keeps of a call, from when it is made until its result counts. Its thread makes the attempts (`tcp`)."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..net.view import View
from .rules import Begin, Call


class Attempt(Protocol):
    """One attempt of a call. `bytes_sent`: payload bytes that this region has sent for it so far."""

    @property
    def bytes_sent(self) -> int: ...

    def run(self) -> Any:
        """Make the attempt. Raises LinkError if it failed; the message names the call and the region."""
        ...


Make = Callable[[View, tuple[int, ...]], Attempt]
"""Makes an attempt over a view, whose regions are given."""


@dataclass(eq=False)
class Pending:
    """A call, and the handle by which the training thread waits for it.

    Attributes:
        finish: makes the value of the call from the result, once that counts; called by the link's thread.
        call: what the rules know of it, once it has completed.
        bytes_sent, void_bytes: bytes that the attempt with a result has sent, and the void ones.
        awaited_at: when the training thread began to wait, by the monotonic clock; None while it does not.
        found: the result, until it counts.
    """

    what: str
    make: Make | None
    finish: Callable[["Pending", Any], Any] | None
    call: Call | None = None
    bytes_sent: int = 0
    void_bytes: int = 0
    awaited_at: float | None = None
    found: Any = None
    _value: Any = None
    _error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> Call:
        """What the rules know of a call that has completed."""
        assert self.call is not None
        return self.call

    @property
    def parties(self) -> tuple[int, ...]:
        """The regions that took part."""
        return tuple(member.region for member in self.done.parties)

    def end(self) -> None:
        """Make the value from the result, and let the training thread have it."""
        assert self.finish is not None
        try:
            value = self.finish(self, self.found)
        except BaseException as error:
            self.fail(error)
            raise
        # what they reference may reference the previous transfer, which references an earlier one
        self.make = self.finish = self.found = None
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


@dataclass(eq=False)
class InHand:
    """The attempt in hand. `view` and `attempt` are None until the link's thread has begun it."""

    begin: Begin
    pending: Pending
    view: View | None = None
    attempt: Attempt | None = None
