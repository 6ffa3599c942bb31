"""Checks of options, before anything heavy is imported or measured. Each error names the option."""

import argparse
import math
import os
from pathlib import Path

import psutil

from ..errors import InputError, short
from ..settings import ENV_SECRET


def add_secret(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the secret of a store."""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help=f"file with the secret that the store and its runs share, at least 16 characters (or the secret in {ENV_SECRET})",
    )


def check(flag: str, value: float, least: float, most: float = math.inf) -> None:
    """Check that the value of an option is finite and lies in least .. most."""
    if not least <= value <= most or math.isinf(value):
        rule = f"must be at least {least:g}" if most == math.inf else f"must lie in {least:g} .. {most:g}"
        raise InputError(f"{flag} {value:g} {rule}{' and finite' if math.isinf(value) else ''}.")


def check_memory(flag: str, value: float, num_bytes: float) -> None:
    """Check that this machine has the memory that the value of an option needs."""
    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise InputError(
            f"{flag} {value:g} needs about {num_bytes / 1e9:.1f} GB, but {free / 1e9:.1f} GB of memory are free. Lower {flag}."
        )


def check_writable(flag: str, path: Path) -> None:
    """Check that a file can be written, without changing it."""
    try:
        is_new = not os.path.lexists(path)  # a link whose file is not there yet stays
        path.open("ab").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        rule = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{flag} {short(path)} cannot be written: {rule}. Name a file in a folder that exists and is yours to write."
        ) from error
