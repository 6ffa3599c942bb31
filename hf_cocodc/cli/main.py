"""The command `hf-cocodc`, once it has been imported (see `hf_cocodc.__main__`)."""

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from .. import __version__
from ..errors import CocodcError, InputError, short, shown
from ..settings.environment import quiet_torch
from . import (
    bench,
    coordinator,
    doctor,
    launch,
    leave,
    plan,
    pull,
    recipe,
    report,
    secret,
    simulate,
    status,
    train,
)
from .checks import STDOUT, check_writable
from .supervising import Interrupted

COMMANDS = (
    recipe,
    plan,
    doctor,
    train,
    launch,
    simulate,
    coordinator,
    secret,
    status,
    leave,
    pull,
    report,
    bench,
)


EXIT_CODES = """\
exit codes:
  0    done, also where the others have finished without a lost region; this
       region has left in good order, and the others train on; or its run has
       finished before it came in, or back
  1    the link, the coordinator or another region failed, did not come or could
       not be reached: it may pass, and a supervisor starts the region again
  2    refused, with the way out: a recipe, an option, a checkpoint, a disk that
       is full; regions that differ; a coordinator with another secret or version
  3    all regions have stopped together, with a checkpoint to resume from
  129  ended by a closed terminal
  130  interrupted with Ctrl-C; 143 by SIGTERM (coordinator ends with 0 at both)
"""
_MOST_CHARACTERS = 600
"""Of what argparse says: it repeats an argument as it is, however long."""


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends with a word on exit codes, and whose errors have a bounded length."""

    def __init__(self, epilog: str = "Exit codes: see hf-cocodc --help.", **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, epilog=epilog, formatter_class=_Formatter)

    def error(self, message: str) -> NoReturn:
        super().error(short(message, _MOST_CHARACTERS))


class _Formatter(argparse.HelpFormatter):
    """Wraps everything but the exit codes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text == EXIT_CODES else super()._fill_text(text, width, indent)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    made = _Parser(
        prog="hf-cocodc",
        description="Low-communication training across regions, for the Hugging Face stack.",
        epilog=EXIT_CODES,
    )
    made.add_argument("--version", action="version", version=f"hf-cocodc {__version__}")
    subparsers = made.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(subparsers)
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command and its options. `words` are all of them; `launcher` gets the arguments for accelerate launch, after the
    first --, and `program` the script of `launch` with its arguments. argparse itself accepts -- only directly after the recipe.
    """
    made = parser()
    cut = launch.program_at(argv) if argv[:1] == ["launch"] else len(argv)
    dashes = argv.index("--") if "--" in argv[:cut] else cut
    options, unknown = made.parse_known_args(argv[:dashes])
    if unknown:
        options.parser.error(_split_override(argv[:dashes]) or f"unrecognized arguments: {' '.join(unknown)}")
    options.launcher, options.program = list(argv[dashes + 1 : cut]), list(argv[cut:])
    options.words = list(argv)
    if options.run is launch.run and options.launcher[-1:] == ["--"]:
        options.launcher.pop()
    if options.launcher and options.run not in (train.run, plan.run, launch.run):
        options.parser.error(
            "only hf-cocodc train, launch and plan take arguments after --, because only they start accelerate launch. Remove "
            "them."
        )
    return options


def _split_override(argv: Sequence[str]) -> str | None:
    """What to say of a --set whose value is an argument of its own; None if there is none."""
    for flag, key, value in zip(argv, argv[1:], argv[2:], strict=False):
        if flag == "--set" and "=" not in key and not value.startswith("--"):
            key, value = short(key), short(value)
            return f"--set {key} {value} must be one argument: --set {key}={value}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. An error of this package, or of the operating system (a full disk, an output that no one reads), becomes
    one paragraph and an exit code (see errors.py).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed: nobody reads it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            encoding = sys.getfilesystemencoding()
            if encoding != "utf-8":  # letters of words would be lost, and files of other names be meant
                "".join(words).encode(encoding)
            options = parse(words)
            quiet_torch()
            if getattr(options, "json", None) is not None:
                check_writable("--json", options.json)
            options.stdout = sys.stdout
            with _text_beside(options):
                code = options.run(options)
        finally:
            sys.stdout.flush()  # also after --help, or a failure would come up only after this function
        return code
    except CocodcError as error:
        _complain(str(error))
        return error.exit_code
    except UnicodeEncodeError as error:
        _complain(
            f"{ascii(error.object[error.start : error.end])} is no text in the encoding of this environment "
            f"({error.encoding}). Set PYTHONUTF8=1, or LC_ALL=C.UTF-8."
        )
        return InputError.exit_code
    except OSError as error:
        _complain(_reason(error))
        for stream in (sys.stdout, sys.stderr):
            _give_up(stream)
        return 1
    except Interrupted as interrupted:
        with contextlib.suppress(OSError):
            print("interrupted", file=sys.stderr)
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _text_beside(options: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Inside the block, stdout is free for JSON if --json wants it: text goes to stderr."""
    wants_json = getattr(options, "json", None) == STDOUT
    return contextlib.redirect_stdout(sys.stderr) if wants_json else contextlib.nullcontext()


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)


def _reason(error: OSError) -> str:
    words = error.strerror or str(error)
    if words.startswith("No usable temporary directory"):
        return f"no folder for temporary files can be written ({words.partition(' in ')[2]}). Set TMPDIR to one that can be."
    if error.filename is not None:
        return f"{shown(error.filename)} cannot be used: {words}."
    if error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO):
        return f"the output cannot be written: {words}."
    return f"the operating system refuses: {words}."


def _give_up(stream: TextIO) -> None:
    """Discard what is left of a stream that cannot be written, or Python would fail at its end as well."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
