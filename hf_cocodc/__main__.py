"""Entry point of `hf-cocodc`, which is `python -m hf_cocodc`."""

import sys

from .interrupt import ends_at_once


def main() -> int:
    """Run the command. Ctrl-C ends it without a traceback even while it is imported."""
    with ends_at_once():
        from .cli.main import main as command
    return command()


if __name__ == "__main__":
    sys.exit(main())
