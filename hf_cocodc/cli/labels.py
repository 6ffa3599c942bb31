"""Label what several regions of one process print."""

import io
import re
import threading
from typing import IO


class Labelled(io.TextIOBase):
    """A stream that puts the name of a region in front of each line that the region's thread writes.

    The lines of other threads pass unchanged. A line is passed on when it is complete; of a progress bar only its last state.

    Args:
        stream: where the lines go.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        thread = threading.current_thread().name
        if not re.fullmatch(r"region \d+", thread):
            return self._stream.write(text)
        *lines, rest = (self._begun.get(thread, "") + text).split("\n")
        self._begun[thread] = rest
        for line in lines:
            self._pass_on(thread, line)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def end(self) -> None:
        """Pass on lines that were not completed."""
        for thread, rest in self._begun.items():
            if rest:
                self._pass_on(thread, rest)
        self._begun.clear()

    def _pass_on(self, thread: str, line: str) -> None:
        self._stream.write(f"[{thread}] {line.rpartition(chr(13))[2]}\n")
