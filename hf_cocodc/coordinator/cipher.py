"""What processes of a run that have the secret send each other, beside what goes over the coordinator: AES-256-GCM.

One cipher is for one direction, and has a key that nothing else has. A message carries its number, so no two messages have the
same nonce, and what is bound to it (`about`) must be equal at both ends: a message cannot be put into another's place.
"""

import threading
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..errors import LinkError
from .secret import Keys

_NUMBER = 8
_TAG = 16
_END = 1 << 63
_NO_ROOM = b"\0\0\0\0"
"""The first bytes of a nonce: the number of the message follows, and a key has one sender."""


class Altered(LinkError):
    """A message is not as it was sent, or not from whom it should be."""


class Cipher:
    """Seals messages at one end, or opens them at the other: number (8 bytes), message in AES-256-GCM, its tag (16 bytes).

    Args:
        keys: nothing else has them.
        in_order: whether messages are opened in the order in which they were sealed, each once.

    Attributes:
        overhead: bytes by which a sealed message is longer.
    """

    overhead = _NUMBER + _TAG

    def __init__(self, keys: Keys, in_order: bool = False) -> None:
        self._aes = AESGCM(keys.raw)
        self._in_order = in_order
        self._num_sealed = self._num_opened = 0
        self._lock = threading.Lock()

    def seal(self, data: Any, about: bytes = b"") -> bytes:
        """A message for the other end. Any thread may call it.

        Args:
            data: bytes, or anything with a buffer of bytes.
            about: what it is bound to; not sent.

        Raises:
            LinkError: the key has sealed 2**63 messages.
        """
        with self._lock:
            number = self._num_sealed
            if number >= _END:
                raise LinkError("a connection has sent 2**63 messages: connect again.")
            self._num_sealed += 1
        told = number.to_bytes(_NUMBER, "big")
        return told + self._aes.encrypt(_NO_ROOM + told, data, about)

    def open(self, data: Any, about: bytes = b"") -> bytes:
        """The message that the other end has sealed. Raises Altered if it has not, or not with this `about`."""
        sealed = memoryview(data).cast("B")
        if len(sealed) < self.overhead:
            raise Altered(f"{len(sealed)} bytes are too few for a sealed message")
        told = bytes(sealed[:_NUMBER])
        if self._in_order and told != self._num_opened.to_bytes(_NUMBER, "big"):
            raise Altered("a message is missing, or has come twice")
        try:
            message = self._aes.decrypt(_NO_ROOM + told, sealed[_NUMBER:], about)
        except InvalidTag:
            raise Altered("a message was altered, or comes from somebody else") from None
        self._num_opened += 1
        return message


Ciphers = tuple[Cipher, Cipher]
"""What seals what this end sends, and what opens what comes."""


def ciphers(keys: Keys, is_first: bool, in_order: bool) -> Ciphers:
    """Those of one of two ends; exactly one of the two `is_first`. `keys`: no other conversation has them."""
    ways = [Cipher(keys.of("aes-gcm", way), in_order) for way in ("from the first", "to the first")]
    return (ways[0], ways[1]) if is_first else (ways[1], ways[0])
