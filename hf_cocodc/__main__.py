"""Entry point of `hf-cocodc`, which is `python -m hf_cocodc`."""

import os
import signal
import sys


def main() -> int:
    """Run the command. Ctrl-C ends it without a traceback even while it is imported."""
    usual = signal.default_int_handler
    # a shell lets a command in the background ignore Ctrl-C
    is_usual = signal.getsignal(signal.SIGINT) is usual
    if is_usual:
        # Python's own import would report an exception that is raised inside it
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from .cli.main import main as command

    if is_usual:
        signal.signal(signal.SIGINT, usual)
    return command()


if __name__ == "__main__":
    sys.exit(main())
