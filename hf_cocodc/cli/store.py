"""`hf-cocodc store`: run the store where regions meet."""

import argparse
import signal
from typing import Any

from ..settings import check_host
from .checks import check


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "store",
        help="run the store where regions meet",
        description="Run the store where regions meet, until you press Ctrl-C. Every region must be able to reach the store. It "
        "carries no training traffic. One store can serve many runs, also at the same time.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this machine to listen on, for example that of the VPN; 0.0.0.0 for all of them (default: 127.0.0.1, "
        "which no other machine reaches)",
    )
    parser.add_argument(
        "--port", type=int, default=29650, help="port to listen on; 0 takes a free port (default: 29650)"
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    check("--port", options.port, 0, 65_535)
    check_host("--host", options.host)
    from ..meeting.store import serve_store

    server = serve_store(options.host, options.port)
    print(f"store listening on {options.host}:{server.port}; press Ctrl-C to end it", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0
