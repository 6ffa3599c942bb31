"""Where the secret of a run comes from: a file that only its owner reads, or the environment."""

import logging
import os
import stat
from collections.abc import Mapping

from ..errors import InputError, expanded, shown
from ..net.keys import SECRET_BYTES, Keys
from ..settings import RegionConfig
from ..settings.environment import ENV_SECRET, ENV_SECRET_FILE

logger = logging.getLogger(__name__)

_MOST = 4096
_WAY_OUT = "Make one with `hf-cocodc secret new FILE`, and give every region and the coordinator the same"


def secret_of(regions: RegionConfig, env: Mapping[str, str] | None = None) -> Keys | None:
    """The keys of the secret in `regions.secret_file` or in the environment (itself, or its file); None if there is none.

    Raises:
        InputError: the file cannot be read, what is given is no secret, or the two differ.
    """
    env = os.environ if env is None else env
    from_environment = env.get(ENV_SECRET)
    secrets = {} if from_environment is None else {ENV_SECRET: from_environment.strip()}
    file = regions.secret_file or env.get(ENV_SECRET_FILE)
    if file is not None:
        secrets[f"regions.secret_file={shown(file)}"] = _read(file)
    keys = None
    for where, secret in secrets.items():
        try:
            keys = Keys.from_secret(secret)
        except ValueError:
            raise InputError(
                f"{where}: a secret is {SECRET_BYTES} random bytes, written as {2 * SECRET_BYTES} hex digits, and this one "
                f"is not (it has {len(secret)} characters). {_WAY_OUT}."
            ) from None
    if len({secret.lower() for secret in secrets.values()}) > 1:
        raise InputError(f"{' and '.join(secrets)} hold different secrets. Make them equal, or remove one.")
    return keys


def _read(name: str) -> str:
    path = expanded(name)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4 * _MOST + 1).decode()
    except (OSError, ValueError) as error:
        rule = getattr(error, "strerror", None) or "it is no file of text"
        raise InputError(
            f"regions.secret_file={shown(name)} cannot be read: {rule}. {_WAY_OUT} file."
        ) from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("others on this machine may read the secret in %s: chmod 600 %s", name, name)
    return text.strip()
