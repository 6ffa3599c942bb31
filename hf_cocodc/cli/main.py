"""Entry point of `hf-cocodc`."""

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import CocodcError
from . import simulate, store, train

COMMANDS = (train, simulate, store)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error of ours is one paragraph and an exit code (2 input, 1 while running)."""
    parser = argparse.ArgumentParser(
        prog="hf-cocodc",
        description="Low-communication training across regions, for the Hugging Face stack.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(subparsers)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except CocodcError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
