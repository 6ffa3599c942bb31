"""What lies at a store is checked before it is believed: other programs, and other versions, may write there."""

import json
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import LinkError, MeetingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_DIGITS = 15
_DEEPEST = 64
_AGAIN_S = 60.0
_LONGEST_POLL_S = 0.02


def pause(began: float) -> None:
    """Between two looks at a store, by a caller that began to look at this moment of the monotonic clock.

    A short wait ends in time, and a long one costs nothing.
    """
    time.sleep(min((time.monotonic() - began) / 16 + 1e-4, _LONGEST_POLL_S))


def foreign(key: str, found: object) -> MeetingError:
    """The error for a value that no region of this version writes."""
    return MeetingError(
        f"the store holds {str(found)[:60]!r} under {key}, which no region of this version of hf_cocodc writes. Another program "
        "or another version uses the same store: start a store of your own (hf-cocodc store), and the same version everywhere."
    )


def text_of(value: bytes, key: str) -> str:
    """What the store holds under `key`, as text. Raises MeetingError if no region of ours has written it."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise foreign(key, value) from None


def number_of(value: bytes, key: str) -> int:
    """What the store holds under `key`, as a whole number from 0; 0 if it holds nothing. Raises like `text_of`."""
    digits = value.partition(b" ")[0]  # a sealed store writes more behind it
    if value and not (digits.isdigit() and len(digits) <= _MOST_DIGITS):
        raise foreign(key, value)
    return int(digits or b"0")


def read_json(value: bytes, key: str) -> Any:
    """Parse what the store holds under `key`. Raises like `text_of`."""
    text = text_of(value, key)
    try:
        content = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()  # half of a character cannot be shown
    except (ValueError, RecursionError):
        raise foreign(key, value) from None
    if not _is_flat(content):
        raise foreign(key, value)
    return content


def _is_flat(content: Any) -> bool:
    """Whether JSON is nested less deep than would break what compares it or shows it."""
    level = [content]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return False


class Reader:
    """Reads for a thread that must go on: what is not ours counts as absent. It warns of that, once a minute at most."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def read(self, parse: Callable[[bytes, str], T], found: bytes, key: str) -> T | None:
        """What `parse` makes of a value and its key; None if there is none, or `parse` raises LinkError."""
        try:
            return parse(found, key) if found else None
        except LinkError as error:
            self.warn(error)
            return None

    def warn(self, error: LinkError) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _AGAIN_S
            logger.warning("%s Training goes on without it.", error)
