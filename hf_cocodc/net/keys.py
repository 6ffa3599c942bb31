"""The secret of a run, and the keys, certificates and ciphers that follow from it.

With its identity, each end of a connection to the coordinator proves that it has the secret (TLS 1.3): a key, and a certificate
which the key signs. Both follow from the secret, so every process makes the very same certificate, and takes no other.

What processes send each other otherwise is sealed with AES-256-GCM. One cipher is for one direction of one socket, and has a key
that nothing else has. Its messages are numbered, so no two have the same nonce, and none opens in another's place.

The keys of two processes follow from the secret, and from what only these two can make of their shares (X25519): whoever has
recorded all that was said, and learns the secret later, cannot make them.
"""

import contextlib
import datetime
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import ssl
import tempfile
from collections.abc import Iterator
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
"""A shorter secret could be guessed: whoever has recorded a conversation tries as fast as machines compute."""
SHARE_BYTES = 32

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hf_cocodc")])
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(2999, 12, 31)
"""No machine's clock keeps anybody out."""
_NONCE_BYTES = 12


class Keys:
    """A key of 32 bytes, and the keys that follow from it (HKDF with SHA-256, RFC 5869). It is never shown."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @classmethod
    def from_secret(cls, secret: str) -> "Keys":
        """The keys of a secret: 64 hex digits. Raises ValueError if it is none."""
        if not re.fullmatch(f"[0-9a-fA-F]{{{2 * SECRET_BYTES}}}", secret):
            raise ValueError("a secret has 64 hex digits")
        return cls(hmac.digest(b"hf_cocodc", bytes.fromhex(secret), hashlib.sha256))

    def of(self, *names: object) -> "Keys":
        """Keys for the purpose that the names describe. They reveal neither these keys nor the keys for another purpose."""
        parts = (str(name).encode() for name in names)
        info = b"".join(len(part).to_bytes(8, "big") + part for part in parts)  # no other names give the same
        return Keys(hmac.digest(self.raw, info + b"\1", hashlib.sha256))

    def __repr__(self) -> str:
        return "Keys(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("keys are not written anywhere")


class Share:
    """One process's half of the keys that it has with each other process. `public` is the half that others may know."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def keys_with(self, public: bytes, secret: Keys | None, *names: object) -> Keys:
        """The keys that this process and the one with the other half make, and nobody else, for the purpose that the names
        describe. Without the keys of the run's secret they are others. Raises ValueError if that is no half.
        """
        agreed = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        salt = b"" if secret is None else secret.of("pair").raw
        both = sorted((self.public.hex(), public.hex()))
        return Keys(hmac.digest(salt, agreed, hashlib.sha256)).of(*names, *both)


def new_secret() -> str:
    """32 random bytes, as a secret is written."""
    return secrets.token_hex(SECRET_BYTES)


class Identity:
    """A key and a certificate (DER), equal in every process with the secret; made by `identity`.

    `contexts`: of TLS 1.3, in which both ends prove themselves; that of the server, and that of its caller.
    """

    def __init__(self, keys: Keys) -> None:
        private = Ed25519PrivateKey.from_private_bytes(keys.of("identity").raw)
        certificate = (
            x509.CertificateBuilder(_NAME, _NAME, private.public_key(), 1, _FROM, _UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(private, None)  # of the same certificate, Ed25519 makes the same signature
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.DER)
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        with _file_of(pem) as path:
            self.contexts = {is_server: self._context(is_server, path) for is_server in (False, True)}

    def _context(self, is_server: bool, file: str) -> ssl.SSLContext:
        # of all who may sign certificates it trusts only this one; a default context would trust those of the system, too
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses prove nothing
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        context.load_cert_chain(file)
        if is_server:
            context.num_tickets = 0  # nobody resumes a session
        return context


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """A file with this content, for OpenSSL, which takes keys from files alone: in memory, where the system has such files."""
    file: Any
    if hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd"):
        file = os.fdopen(os.memfd_create("hf_cocodc"), "wb")
        path = f"/proc/self/fd/{file.fileno()}"
    else:
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - nobody else may read it
        path = file.name
    with file:
        file.write(content)
        file.flush()
        yield path


@functools.lru_cache(maxsize=64)
def identity(keys: Keys) -> Identity:
    """The identity that follows from the keys of a secret."""
    return Identity(keys)


class Altered(OSError):
    """What has come is not as it was sent, or not from whom it should be."""


class Cipher:
    """Seals messages at one end, opens them in the same order at the other (AES-256-GCM). For one thread at a time.

    `overhead`: bytes that it adds.
    """

    overhead = 16

    def __init__(self, keys: Keys) -> None:
        self._aes = AESGCM(keys.raw)
        self._number = 0

    def seal(self, data: Any) -> bytes:
        """The next message (any buffer of bytes) for the other end."""
        return self._aes.encrypt(self._nonce(), data, None)

    def open(self, sealed: Any) -> bytes:
        """The next message that the other end has sealed. Raises Altered if this is none."""
        try:
            return self._aes.decrypt(self._nonce(), sealed, None)
        except InvalidTag:
            raise Altered("what came was altered on its way, or comes from somebody else") from None

    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")


Ciphers = tuple[Cipher, Cipher]
"""(outgoing, incoming)."""


def ciphers(keys: Keys, is_first: bool) -> Ciphers:
    """The (outgoing, incoming) ciphers of one end; exactly one end `is_first`. No other conversation has these `keys`."""
    ways = [Cipher(keys.of("aes-gcm", way)) for way in ("from the first", "to the first")]
    return (ways[0], ways[1]) if is_first else (ways[1], ways[0])
