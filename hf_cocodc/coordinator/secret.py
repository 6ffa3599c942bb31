"""The secret that the regions of a run share, and the keys that follow from it."""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError, shown
from ..settings import ENV_SECRET, RegionConfig

logger = logging.getLogger(__name__)

_BYTES = 32
"""Of a secret. A shorter one could be guessed: whoever has recorded a conversation tries as fast as machines compute."""
_MOST = 4096
_WAY_OUT = "Make one with `hf-cocodc secret new FILE`, and give every region and the coordinator the same"


class Keys:
    """A key, and the keys that follow from it (HKDF with SHA-256, RFC 5869). It is never shown.

    Args:
        raw: 32 bytes.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @classmethod
    def from_secret(cls, secret: str) -> "Keys":
        """The keys of a secret: 64 hex digits. Raises ValueError if it is none."""
        if not re.fullmatch(f"[0-9a-fA-F]{{{2 * _BYTES}}}", secret):
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


def new_secret() -> str:
    """32 random bytes, as a secret is written."""
    return secrets.token_hex(_BYTES)


def secret_of(regions: RegionConfig, env: Mapping[str, str] | None = None) -> Keys | None:
    """The keys of the secret in `regions.secret_file` or in the environment; None if there is none.

    Raises:
        InputError: the file cannot be read, what is given is no secret, or the two differ.
    """
    env = os.environ if env is None else env
    told = env.get(ENV_SECRET)
    found = {} if told is None else {ENV_SECRET: told.strip()}
    if regions.secret_file is not None:
        found[f"regions.secret_file={shown(regions.secret_file)}"] = _read(regions.secret_file)
    keys = None
    for where, secret in found.items():
        try:
            keys = Keys.from_secret(secret)
        except ValueError:
            raise InputError(
                f"{where}: a secret is {_BYTES} random bytes, written as {2 * _BYTES} hex digits, and this one is not (it has "
                f"{len(secret)} characters). {_WAY_OUT}."
            ) from None
    if len({secret.lower() for secret in found.values()}) > 1:
        raise InputError(f"{' and '.join(found)} hold different secrets. Make them equal, or remove one.")
    return keys


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
