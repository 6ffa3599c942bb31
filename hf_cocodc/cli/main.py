"""Entry point of `hf-cocodc`."""

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import CocodcError
from . import bench, simulate, store, train

COMMANDS = (train, simulate, store, bench)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command and its options. The arguments after the first -- become `launcher`.

    argparse itself accepts -- only directly after the recipe, not after options that follow the recipe.
    """
    dashes = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="hf-cocodc",
        description="Low-communication training across regions, for the Hugging Face stack.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(subparsers)
    options = parser.parse_args(argv[:dashes])
    options.launcher = list(argv[dashes + 1 :])
    if options.launcher and options.run is not train.run:
        parser.error(
            "only hf-cocodc train takes arguments after --, because only train starts accelerate launch. Remove them."
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. An error of this package becomes one paragraph and an exit code (see errors.py)."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        return options.run(options)
    except CocodcError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
