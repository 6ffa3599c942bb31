"""The secret that the regions of a run share, and the keys that follow from it."""

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from ..errors import InputError, shown
from ..settings import ENV_SECRET, RegionConfig

logger = logging.getLogger(__name__)

_LEAST = 16
"""Characters of a secret. People who record a message with a tag can try secrets as fast as their machines compute."""
_MOST = 4096
_TAG_BYTES = 16
_WAY_OUT = "Make one with `openssl rand -hex 32`, and give every region and the coordinator the same"


class Keys:
    """A key, and the keys that follow from it (HKDF with SHA-256, RFC 5869). It is never shown.

    Args:
        raw: 32 bytes.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @classmethod
    def from_secret(cls, secret: str) -> "Keys":
        return cls(hmac.digest(b"hf_cocodc", secret.encode(), hashlib.sha256))

    def of(self, *names: object) -> "Keys":
        """Keys for the purpose that the names describe. They reveal neither these keys nor the keys for another purpose."""
        info = _joined(str(name).encode() for name in names)
        return Keys(hmac.digest(self.raw, info + b"\1", hashlib.sha256))

    def tag(self, *parts: bytes) -> bytes:
        """16 bytes for these parts, which nobody can make without the keys (HMAC with SHA-256)."""
        return hmac.digest(self._of_tags, _joined(parts), hashlib.sha256)[:_TAG_BYTES]

    @cached_property
    def _of_tags(self) -> bytes:
        return self.of("tag").raw

    def __repr__(self) -> str:
        return "Keys(hidden)"

    def __reduce__(self) -> str:
        raise TypeError("keys are not written anywhere")


def _joined(parts: Iterable[bytes]) -> bytes:
    """All parts in one, so that no other parts give the same."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def secret_of(regions: RegionConfig, env: Mapping[str, str] | None = None) -> Keys | None:
    """The keys of the secret in `regions.secret_file` or in the environment; None if there is none.

    Raises:
        InputError: the file cannot be read, the secret is too short, or the two differ.
    """
    env = os.environ if env is None else env
    told = env.get(ENV_SECRET)
    found = {} if told is None else {ENV_SECRET: told.strip()}
    if regions.secret_file is not None:
        found[f"regions.secret_file={shown(regions.secret_file)}"] = _read(regions.secret_file)
    for where, secret in found.items():
        if secret != secret.encode(errors="ignore").decode():
            raise InputError(f"{where}: a secret is text in UTF-8, and this one is not. {_WAY_OUT}.")
        if not _LEAST <= len(secret) <= _MOST:
            raise InputError(
                f"{where}: a secret has {_LEAST} .. {_MOST} characters, and this one has {len(secret)}. {_WAY_OUT}."
            )
    if len(set(found.values())) > 1:
        raise InputError(f"{' and '.join(found)} hold different secrets. Make them equal, or remove one.")
    return next((Keys.from_secret(secret) for secret in found.values()), None)


def _read(name: str) -> str:
    try:
        with Path(name).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4 * _MOST + 1).decode()
    except (OSError, ValueError, RuntimeError) as error:
        rule = getattr(error, "strerror", None) or "it is no file of text"
        raise InputError(
            f"regions.secret_file={shown(name)} cannot be read: {rule}. {_WAY_OUT} file."
        ) from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("others on this machine may read the secret in %s: chmod 600 %s", name, name)
    return text.strip()
