"""Small messages between two processes of a run, over the coordinator: how they tell each other where they listen."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .members import Member, Whereabouts
from .port import TOKEN_BYTES
from .validation import whole

_MOST_LETTERS = 4096
_MOST_ADDRESSES = 16
_LONGEST_HOST = 255


def from_plain(plain: Mapping[str, Any]) -> Whereabouts:
    """What another process tells. Raises ValueError if it is no `Whereabouts`."""
    try:
        token, share, places = bytes.fromhex(plain["token"]), bytes.fromhex(plain["share"]), plain["at"]
        sizes = len(token), len(share)
        if (
            not isinstance(places, list)
            or not 1 <= len(places) <= _MOST_ADDRESSES
            or sizes != 2 * (TOKEN_BYTES,)
        ):
            raise ValueError(f"{str(plain)[:200]} says nowhere")
        addresses = []
        for host, port in places:
            if not isinstance(host, str) or not 0 < len(host) <= _LONGEST_HOST:
                raise ValueError(f"{str(host)[:80]!r} is no host")
            addresses.append((host, whole(port, 1, 65535)))
        return Whereabouts(tuple(addresses), token, share)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{str(plain)[:200]} says nowhere ({error!r})") from error


class Letters:
    """What other processes have sent this one, until somebody takes it."""

    def __init__(self) -> None:
        self._letters: dict[tuple[Member, str], Whereabouts] = {}
        self._changed = threading.Condition()

    def put(self, sender: Member, content: Mapping[str, Any]) -> None:
        """Keep what another process has sent. Content that is no letter is ignored."""
        key = content.get("key")
        if isinstance(key, str):
            with self._changed, contextlib.suppress(ValueError):
                self._letters[sender, key] = from_plain(content)
                while len(self._letters) > _MOST_LETTERS:
                    del self._letters[next(iter(self._letters))]
                self._changed.notify_all()

    def take(self, sender: Member, key: str, timeout_s: float) -> Whereabouts:
        """Wait for what `sender` sends under `key`. Raises TimeoutError if it does not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: (sender, key) in self._letters, timeout_s):
                raise TimeoutError(f"it has not said within {timeout_s:g} s where it listens")
            return self._letters.pop((sender, key))


class Introduction(NamedTuple):
    """Lets two processes tell each other where they listen. `key` is the same at both ends, and they never use it again."""

    other: Member
    key: str
    send: Callable[[Member, dict[str, Any]], None]
    letters: Letters
    timeout_s: float

    def tell(self, own: Whereabouts) -> Whereabouts:
        """Where the other process listens. Raises TimeoutError if it does not say."""
        self.send(self.other, {"key": self.key, **own.to_plain()})
        return self.letters.take(self.other, self.key, self.timeout_s)
