"""How the two ends of a new gloo group tell each other where they are, before the group exists."""

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ..coordinator.messages import Member

if TYPE_CHECKING:
    from .pairs import Connection, Pending

_ADDRESS_BYTES = 1024
"""Room for what one end of a group tells the other: about 170 bytes."""
_LENGTH = 8
"""Bytes of a length in what gloo tells."""
_LONGEST_NAME = 255
_MOST_LETTERS = 4096


class Way(Protocol):
    """How the two ends of a new group reach each other before it exists."""

    def tell(self, key: str, value: bytes) -> None: ...

    def hear(self, key: str) -> bytes: ...


class Introduction(dist.Store):
    """What the two ends of a new group tell each other. gloo sets one value, and gets both.

    gloo copies as many bytes of a value as it says itself, so what is none of gloo's never reaches it.
    """

    def __init__(self, way: Way) -> None:
        super().__init__()
        self._way = way
        self._known: dict[str, bytes] = {}
        self.addresses: list[bytes] = []
        """Where this end listens, and then where the other one does, as the system's calls name it."""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo gives bytes
        self._known[key] = value
        self.addresses.append(_address(value))
        self._way.tell(key, value)

    def get(self, key: str) -> bytes:
        if key not in self._known:
            value = self._way.hear(key)
            if [_form(value)] != [_form(own) for own in self._known.values()]:
                raise ValueError(f"what the other end tells is no introduction: {value[:40]!r}")
            self._known[key] = value
            self.addresses.append(_address(value))
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Nothing: `get` waits."""


def _form(introduction: bytes) -> tuple[int, bytes, int] | None:
    """Of an introduction: length and family of the address, and the bytes of what follows; None if it is none.

    It begins with the length of a host's name and the name, then comes the length of the address and the address.
    """
    name = int.from_bytes(introduction[:_LENGTH], sys.byteorder)
    at = _LENGTH + name
    size = int.from_bytes(introduction[at : at + _LENGTH], sys.byteorder)
    rest = len(introduction) - at - _LENGTH - size
    if name > _LONGEST_NAME or rest < 0:
        return None
    return size, introduction[at + _LENGTH : at + _LENGTH + 2], rest


def _address(introduction: bytes) -> bytes:
    """The address in an introduction that has the right form."""
    at = 2 * _LENGTH + int.from_bytes(introduction[:_LENGTH], sys.byteorder)
    return introduction[at : at + int.from_bytes(introduction[at - _LENGTH : at], sys.byteorder)]


class Letters:
    """The small messages that other processes have sent this one through the coordinator, until somebody takes them."""

    def __init__(self) -> None:
        self._letters: dict[tuple[Member, str], bytes] = {}
        self._changed = threading.Condition()

    def put(self, sender: Member, content: Mapping[str, Any]) -> None:
        """Keep what another process has sent. Content that is no introduction is ignored."""
        key, value = content.get("key"), content.get("value")
        if isinstance(key, str) and isinstance(value, str):
            with self._changed, contextlib.suppress(ValueError):
                self._letters[sender, key] = bytes.fromhex(value)
                while len(self._letters) > _MOST_LETTERS:
                    del self._letters[next(iter(self._letters))]
                self._changed.notify_all()

    def take(self, sender: Member, key: str, timeout_s: float) -> bytes:
        """Wait for what `sender` sends under `key`. Raises TimeoutError if it does not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: (sender, key) in self._letters, timeout_s):
                raise TimeoutError(f"it did not come within {timeout_s:g} s")
            return self._letters.pop((sender, key))


class ByLetter:
    """The ends of a new group tell each other where they are through the coordinator.

    Args:
        other: the process at the other end.
        key: the same at both ends; no other group of these two processes ever has it.
        send: sends content to that process.
        letters: what that process sends.
        timeout_s: how long to wait for it.
    """

    def __init__(
        self,
        other: Member,
        key: str,
        send: Callable[[Member, dict[str, Any]], None],
        letters: Letters,
        timeout_s: float,
    ) -> None:
        self._other, self._key, self._send = other, key, send
        self._letters, self._timeout_s = letters, timeout_s

    def tell(self, key: str, value: bytes) -> None:
        self._send(self._other, {"key": self._key, "value": value.hex()})

    def hear(self, key: str) -> bytes:
        return self._letters.take(self._other, self._key, self._timeout_s)


class OnControl:
    """They use the control connection of the pair: one round trip, without a store."""

    def __init__(self, control: "Connection", tag: int, timeout_s: float) -> None:
        self._control, self._tag = control, tag
        self._timeout = timedelta(seconds=timeout_s)
        self._pending: list[Pending] = []

    def tell(self, key: str, value: bytes) -> None:
        mine, theirs = (torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8) for _ in range(2))
        mine[:2] = torch.tensor(divmod(len(value), 256))
        mine[2 : 2 + len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        # a send ends when the other end receives, so nobody waits for one before asking for the other's
        for operation, memory in (("recv", theirs), ("send", mine)):
            self._pending.append(self._control.start(operation, memory, self._tag))

    def hear(self, key: str) -> bytes:
        for each in self._pending:
            self._control.wait(each.work, self._timeout)
        high, low, *rest = self._pending[0].memory.tolist()
        return bytes(rest[: 256 * high + low])
