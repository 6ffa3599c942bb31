"""A store whose keys and values carry tags that only regions with the secret can make.

A stranger who reaches the server sees no names, and cannot write a value that anyone believes: a value with a wrong tag counts as
absent, and is replaced. A tag covers the key and the value. So a stranger can delete a value, or put back one that the same key
has had; nothing more. All who reach the server can read values: they are no secrets.
"""

import hmac
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..errors import LinkError, MeetingError
from ..settings import ENV_SECRET
from .secret import Keys
from .values import number_of, pause

T = TypeVar("T")

SEAL = "hf_cocodc/seal"
"""The only key that is never sealed: it says with which secret the store was begun."""
_OPEN = "open"
_SEALED = "sealed:"
_TAG_CHARS = 32
_NOTHING = "\0"
_TRIES = 100


class SealedStore(dist.Store):
    """A store that others of the same secret share.

    Args:
        store: what lies below: of another process, which need not be trusted.
        keys: of the secret.
        prefix: of all keys here.
    """

    def __init__(self, store: dist.Store, keys: Keys, prefix: str = "") -> None:
        super().__init__()
        self.below, self.keys, self.prefix = store, keys, prefix

    def set(self, key: str, value: str | bytes) -> None:
        self.below.set(self._name(key), self._seal(key, _bytes(value)))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value; waits for it. Raises like `wait`."""
        return self._await(lambda: self._look(key), [key])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See dist.Store: an empty `expected` means that there is none, or an empty one."""
        name, expects, seals = self._name(key), _bytes(expected), self._seal(key, _bytes(desired))
        if expects:
            found = self._compare_set(name, self._seal(key, expects), seals)
            value = self._open(key, found)
            return expects if value is None else value
        there = b""
        for _ in range(_TRIES):
            found = self._compare_set(name, there, seals)
            value = self._open(key, found)
            if value or found == seals:
                return value or b""
            there = (
                b"" if found == there else found
            )  # nothing is there any more; or an empty value, or one that is not ours
        raise LinkError(f"somebody overwrites {self._path(key)!r} at the store all the time.")

    def add(self, key: str, amount: int) -> int:
        """Add to a number that only `add` and `number_of` read; returns the sum."""
        until = time.monotonic() + _timeout_of(self.below).total_seconds()
        while time.monotonic() < until:  # any number of others may count at the same moment
            value = self._look(key) or b""
            total = number_of(value, self._path(key)) + amount
            # the sums of two processes must differ, or both would believe that they have written theirs
            wanted = f"{total} {uuid.uuid4().hex}".encode()
            if self.compare_set(key, value, wanted) == wanted:
                return total
        raise LinkError(f"somebody overwrites {self._path(key)!r} at the store all the time.")

    def check(self, keys: Sequence[str]) -> bool:
        if not self.below.check([self._name(key) for key in keys]):
            return False
        return all(self._look(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises DistStoreError if one of the keys is not there in time."""
        self._await(lambda: self.check(keys) or None, keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self.below.delete_key(self._name(key))

    def _await(
        self, look: Callable[[], T | None], keys: Sequence[str], timeout: timedelta | None = None
    ) -> T:
        """Look until there is something, and return it."""
        began, most_s = time.monotonic(), (timeout or _timeout_of(self.below)).total_seconds()
        while (found := look()) is None:
            if time.monotonic() - began > most_s:
                names = ", ".join(self._path(key) for key in keys)
                raise dist.DistStoreError(f"wait timeout after {most_s:g} s, keys: {names}")
            pause(began)
        return found

    def _look(self, key: str) -> bytes | None:
        """The value now; None if there is none of ours."""
        found = self._compare_set(self._name(key), _NOTHING.encode(), _NOTHING.encode())
        return self._open(key, found)

    def _path(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _name(self, key: str) -> str:
        return f"s/{self.keys.tag(b'key', self._path(key).encode()).hex()}"

    def _seal(self, key: str, value: bytes) -> bytes:
        return self.keys.tag(b"value", self._path(key).encode(), value).hex().encode() + value

    def _open(self, key: str, found: bytes) -> bytes | None:
        value = found[_TAG_CHARS:]
        return value if hmac.compare_digest(found, self._seal(key, value)) else None

    def _compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        return self.below.compare_set(name, expected, desired)  # type: ignore[arg-type]  # a store takes bytes, too


def sealed(store: dist.Store, keys: Keys | None) -> dist.Store:
    """The store as regions with these keys use it; the store itself without keys."""
    return store if keys is None else SealedStore(store, keys.of("store"))


def within(prefix: str, store: dist.Store) -> dist.Store:
    """A store with a prefix before all keys. torch's own would call a sealed store, and not keep it."""
    if isinstance(store, SealedStore):
        return SealedStore(store.below, store.keys, store._path(prefix))
    return dist.PrefixStore(prefix, store)


def mark(store: dist.Store) -> str:
    """Say, if nobody of ours has, with which secret the store was begun; returns what it says."""
    held = b""
    for _ in range(_TRIES):
        found = _below(store).compare_set(SEAL, held, _seal_of(store))  # type: ignore[arg-type]
        if said := _mark_in(found):
            return said
        held = b"" if found == held else found
    raise LinkError(f"somebody overwrites {SEAL!r} at the store all the time.")


def mark_again(store: dist.Store) -> None:
    """Say so again, for a process that has used a sealed store all the time: what strangers have written hinders newcomers."""
    if isinstance(store, SealedStore):
        store.below.set(SEAL, _seal_of(store))


def check(store: dist.Store, begins: bool = True) -> None:
    """Check that the store was begun with the secret of this process, or without one if it has none.

    Args:
        store: of this process.
        begins: whether this process begins a store that nobody has begun. A command that only looks leaves that to a run.

    Raises:
        MeetingError: with another; in words.
    """
    ours = _seal_of(store)
    found = mark(store) if begins else _mark_in(_below(store).compare_set(SEAL, _NOTHING, _NOTHING))
    if found in (ours, ""):
        return
    give = f"regions.secret_file (where a command has no recipe: --secret-file) or {ENV_SECRET}"
    if ours == _OPEN and found.startswith(_SEALED):
        said = f"with a secret, and this process has none. Give it the same: {give}"
    elif found == _OPEN:
        said = (
            "without a secret, and this process has one. Start a new store with the secret, and give it to every region"
            f" ({give}); or remove it here"
        )
    else:
        said = (
            f"with another secret. Give every region the store's ({give}); for a new secret start a new store"
        )
    raise MeetingError(f"the store at {address_of(store)} was begun {said}.")


def _seal_of(store: dist.Store) -> str:
    return _SEALED + store.keys.tag(b"seal").hex() if isinstance(store, SealedStore) else _OPEN


def _mark_in(found: bytes) -> str:
    """What somebody of ours has said there; empty if nobody has."""
    said = found.decode(errors="replace")
    return said if said == _OPEN or said.startswith(_SEALED) else ""


def _below(store: dist.Store) -> dist.Store:
    return store.below if isinstance(store, SealedStore) else store


def address_of(store: dist.Store) -> str:
    """Where a store is, in words."""
    below = _below(store)
    return f"{below.host}:{below.port}" if isinstance(below, dist.TCPStore) else "in this process"


def _timeout_of(store: dist.Store) -> timedelta:
    return store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
