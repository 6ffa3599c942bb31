"""Entry point of `hf-cocodc`, which is `python -m hf_cocodc`."""

import os
import signal
import sys


def main() -> int:
    """Run the command. Ctrl-C ends it without a traceback even while it is imported: Python reports an exception that is raised
    inside an import, and libraries turn it into another.
    """
    usual = signal.getsignal(signal.SIGINT)
    is_usual = usual is signal.default_int_handler  # a shell lets a command in the background ignore Ctrl-C
    if is_usual:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from .cli.main import main as command

    if is_usual:
        signal.signal(signal.SIGINT, usual)
    return command()


if __name__ == "__main__":
    sys.exit(main())
