"""The command `hf-cocodc`, once it has been imported (see `hf_cocodc.__main__`)."""

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from .. import __version__
from ..errors import CocodcError, short, shown
from ..settings import quiet_torch
from . import bench, doctor, leave, plan, recipe, report, simulate, status, store, train

COMMANDS = (recipe, plan, doctor, train, simulate, store, status, leave, report, bench)


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
    parser.add_argument("--version", action="version", version=f"hf-cocodc {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(subparsers)
    options, unknown = parser.parse_known_args(argv[:dashes])
    if unknown:
        options.parser.error(f"unrecognized arguments: {short(' '.join(unknown))}")
    options.launcher = list(argv[dashes + 1 :])
    if options.launcher and options.run not in (train.run, plan.run):
        options.parser.error(
            "only hf-cocodc train and plan take arguments after --, because only they start accelerate launch. Remove them."
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. An error of this package becomes one paragraph and an exit code (see errors.py).

    So does an error of the operating system, for example about a full disk or an output that no one reads.
    """
    try:
        try:
            options = parse(sys.argv[1:] if argv is None else argv)
            quiet_torch()
            code = options.run(options)
        finally:
            sys.stdout.flush()  # also after --help, or a failure would come up only after this function
        return code
    except CocodcError as error:
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        _complain(_reason(error))
        for stream in (sys.stdout, sys.stderr):
            _give_up(stream)
        return 1
    except train.Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)


def _reason(error: OSError) -> str:
    words = error.strerror or str(error)
    if error.filename is not None:
        return f"{shown(error.filename)} cannot be used: {words}."
    if error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO):
        return f"the output cannot be written: {words}."
    return f"the operating system refuses: {words}."


def _give_up(stream: TextIO) -> None:
    """Send to nowhere what is left of a stream that cannot be written, or Python would fail at its end as well."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
