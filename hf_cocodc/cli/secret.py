"""`hf-cocodc secret new`: make the secret that the regions of a run share with their coordinator."""

import argparse
import os
from typing import Any

from ..errors import InputError, expanded, shown
from ..settings.environment import ENV_SECRET


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "secret",
        help="make the secret that the regions of a run share",
        description="The secret is 32 random bytes, as 64 hex digits. Anyone who has it can take part. Nobody else can take "
        "part, or read what regions and coordinator send each other.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a new one")
    new.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="new file for the secret, which only you may read (default: print the secret)",
    )
    new.set_defaults(run=run, parser=new)


def run(options: argparse.Namespace) -> int:
    from ..net.keys import new_secret

    if options.file is None:
        print(new_secret())
        return 0
    path = expanded(options.file)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(
            f"{shown(options.file)} is there already, and may be the secret of a run. Give another name, or remove it."
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{shown(options.file)} cannot be written: {why}. Give another name.") from error
    with os.fdopen(file, "w") as opened:
        opened.write(new_secret() + "\n")
    print(
        f"a new secret is in {path}, which only you may read. Copy it to every machine of the run, and before each command "
        f"there:\nexport {ENV_SECRET}=$(cat {path})"
    )
    return 0
