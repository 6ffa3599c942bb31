"""Who listens to which kind of message, and the messages for which nobody listens yet."""

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from .caller import Member
from .orders import attempt

_MOST = 1000
"""Messages that wait for a listener at most."""
_MOST_BYTES = 4 << 20
"""Their bytes at most."""
Handler = Callable[[Member, dict[str, Any]], None]


class Handlers:
    """Calls handlers by the kinds of messages. For one thread."""

    def __init__(self) -> None:
        self._of: dict[str, list[Handler]] = {}
        self._unheard: deque[tuple[int, str, Member, dict[str, Any]]] = deque()
        self._num_bytes = 0

    def on(self, kind: str, handler: Handler) -> None:
        """Call it for each message of this kind; the first one also for those that wait."""
        is_first = kind not in self._of
        self._of.setdefault(kind, []).append(handler)
        if is_first:
            waiting = [each for each in self._unheard if each[1] == kind]
            self._unheard = deque(each for each in self._unheard if each[1] != kind)
            self._num_bytes -= sum(each[0] for each in waiting)
            for _, _, member, content in waiting:
                self.call(kind, member, content)

    def call(self, kind: str, member: Member, content: dict[str, Any], keep: bool = True) -> None:
        """Give a message to those who listen. If nobody does, it waits, unless not `keep`; the oldest make room for it."""
        for handler in self._of.get(kind, []):
            attempt(handler, member, content)
        if kind not in self._of and keep:
            num_bytes = len(json.dumps(content))
            self._unheard.append((num_bytes, kind, member, content))
            self._num_bytes += num_bytes
            while len(self._unheard) > _MOST or self._num_bytes > _MOST_BYTES:
                self._num_bytes -= self._unheard.popleft()[0]
