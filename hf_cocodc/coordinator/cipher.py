"""What members that have proven themselves send each other: each message with a tag, or encrypted.

One cipher is for one direction of one connection, and has a key that nothing else has. A message carries its number, so no
two messages have the same nonce, and what is bound to it (`about`) must be equal at both ends: a message cannot be put into
another's place.
"""

import hashlib
import hmac
import importlib
import threading
from typing import Any, Protocol

from ..errors import InputError, LinkError
from ..settings import ENV_SECRET
from .secret import Keys

_NUMBER = 8
_TAG = 16
_END = 1 << 63
_NO_ROOM = b"\0\0\0\0"
"""The first bytes of a nonce: the number of the message follows, and a key has one sender."""


class Altered(LinkError):
    """A message is not as it was sent, or not from whom it should be."""


class Cipher(Protocol):
    """Seals messages at one end, and opens them at the other.

    Attributes:
        overhead: bytes by which a sealed message is longer.
    """

    overhead: int

    def seal(self, data: Any, about: bytes = b"") -> bytes:
        """A message for the other end. Any thread may call it.

        Args:
            data: bytes, or anything with a buffer of bytes.
            about: what it is bound to; not sent.

        Raises:
            LinkError: the key has sealed 2**63 messages.
        """
        ...

    def open(self, data: Any, about: bytes = b"") -> bytes:
        """The message that the other end has sealed. Raises Altered if it has not, or not with this `about`."""
        ...


class _Numbered:
    """Numbers of messages. With `in_order`, messages are opened in the order in which they were sealed, each once."""

    overhead = _NUMBER + _TAG

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self._num_sealed = self._num_opened = 0
        self._lock = threading.Lock()

    def _next(self) -> bytes:
        with self._lock:
            number = self._num_sealed
            if number >= _END:
                raise LinkError("a connection has sent 2**63 messages: connect again.")
            self._num_sealed += 1
        return number.to_bytes(_NUMBER, "big")

    def _number_of(self, sealed: memoryview) -> bytes:
        if len(sealed) < self.overhead:
            raise Altered(f"{len(sealed)} bytes are too few for a sealed message")
        number = bytes(sealed[:_NUMBER])
        if self._in_order and number != self._num_opened.to_bytes(_NUMBER, "big"):
            raise Altered("a message is missing, or has come twice")
        return number

    def _opened(self) -> None:
        self._num_opened += 1


class Tagged(_Numbered):
    """Messages that others can read but not alter: number (8 bytes), HMAC with SHA-256 (16 bytes), message."""

    def __init__(self, keys: Keys, in_order: bool = False) -> None:
        super().__init__(in_order)
        self._key = keys.of("tagged").raw

    def seal(self, data: Any, about: bytes = b"") -> bytes:
        number, message = self._next(), bytes(data)
        return number + self._tag(number, message, about) + message

    def open(self, data: Any, about: bytes = b"") -> bytes:
        sealed = memoryview(data).cast("B")
        number, message = self._number_of(sealed), bytes(sealed[self.overhead :])
        tag = sealed[_NUMBER : self.overhead]
        if not hmac.compare_digest(self._tag(number, message, about), tag):
            raise Altered("a message was altered, or comes from somebody else")
        self._opened()
        return message

    def _tag(self, number: bytes, message: bytes, about: bytes) -> bytes:
        content = number + len(about).to_bytes(_NUMBER, "big") + about + message
        return hmac.digest(self._key, content, hashlib.sha256)[:_TAG]


class AesGcm(_Numbered):
    """Messages that others can neither read nor alter: number (8 bytes), message in AES-256-GCM, its tag (16 bytes)."""

    def __init__(self, keys: Keys, in_order: bool = False) -> None:
        super().__init__(in_order)
        self._aes = cryptography("hazmat.primitives.ciphers.aead").AESGCM(keys.of("aes-gcm").raw)

    def seal(self, data: Any, about: bytes = b"") -> bytes:
        number = self._next()
        return number + self._aes.encrypt(_NO_ROOM + number, data, about)

    def open(self, data: Any, about: bytes = b"") -> bytes:
        sealed = memoryview(data).cast("B")
        number = self._number_of(sealed)
        try:
            message = self._aes.decrypt(_NO_ROOM + number, sealed[_NUMBER:], about)
        except cryptography("exceptions").InvalidTag:
            raise Altered("a message was altered, or comes from somebody else") from None
        self._opened()
        return message


def check_encryption(keys: Keys | None) -> None:
    """Check that this process can encrypt with the keys of a secret, if there is one.

    Raises:
        InputError: it cannot.
    """
    if keys is None:
        raise InputError(
            f"regions.encrypt needs a secret: give every region the same (regions.secret_file or {ENV_SECRET}), or leave "
            "regions.encrypt out."
        )
    AesGcm(keys)


def cryptography(name: str) -> Any:
    """A module of the package `cryptography`, which only runs need that encrypt.

    Raises:
        InputError: it is not installed.
    """
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as error:
        raise InputError(
            f"regions.encrypt needs the package cryptography, which cannot be imported ({error}): pip install "
            "'hf-cocodc[encrypt]', or leave regions.encrypt out."
        ) from error
