"""`hf-cocodc completion`: a script with which a shell completes commands, options and files."""

import argparse
from pathlib import Path
from typing import Any

from ..errors import InputError

SHELLS = ("bash", "zsh", "tcsh")
_OF_FILES = ("recipe", "file")
"""Arguments that are files, but may also be a word."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a shell completion script",
        description="Print a script that lets a shell complete the commands, options and files of hf-cocodc. Needs "
        "hf-cocodc[completion]. For bash: hf-cocodc completion bash > ~/.local/share/bash-completion/completions/hf-cocodc. For "
        "zsh: the same with zsh, into a file _hf-cocodc in a folder of $fpath.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise InputError(
            "completion needs the package shtab. Install it: pip install 'hf-cocodc[completion]'."
        ) from error
    from .main import parser

    root = parser()
    _complete_files(root, shtab.FILE)
    print(shtab.complete(root, options.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Mark every argument that is a file or a folder, in all commands; `files` is what shtab calls them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.dest in _OF_FILES or action.type is Path or action.metavar == "FILE":
            action.complete = files  # type: ignore[attr-defined]
