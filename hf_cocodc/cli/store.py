"""`hf-cocodc store`: where regions find each other."""

import argparse
import signal
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "store",
        help="run the store where regions find each other",
        description="Run the store where regions find each other, until interrupted. Every region must reach it; it carries "
        "no training traffic, and one store serves one run after another.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument(
        "--port", type=int, default=29650, help="port to listen on (default: 29650; 0 takes a free one)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from ..meeting.store import serve_store

    server = serve_store(options.host, options.port)
    print(f"store listening on {options.host}:{server.port}; end it with Ctrl-C", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0
