"""`hf-cocodc store`: run the store where regions meet."""

import argparse
import signal
from typing import Any

from ..errors import InputError
from ..meeting.addresses import is_loopback
from ..meeting.secret import secret_of
from ..settings import ENV_SECRET, RegionConfig, check_host
from .checks import add_secret, check


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "store",
        help="run the store where regions meet",
        description="Run the store where regions meet, until you press Ctrl-C. Every region must be able to reach the store. It "
        "carries no training traffic. One store can serve many runs, also at the same time.",
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
    add_secret(parser)
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="serve other machines without a secret: whoever reaches the store can then end or change every run there",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    check("--port", options.port, 0, 65_535)
    check_host("--host", options.host)
    keys = secret_of(RegionConfig(secret_file=options.secret_file))
    if keys is not None and options.insecure:
        raise InputError(f"--insecure with a secret: remove it, or the secret (--secret-file, {ENV_SECRET}).")
    if keys is None and not options.insecure and not is_loopback(options.host):
        raise InputError(
            f"--host {options.host} is reached by other machines, and whoever reaches a store without a secret can end or change "
            "every run there. Make a secret with `openssl rand -hex 32 > secret; chmod 600 secret`, and give it here "
            f"(--secret-file secret, or {ENV_SECRET}) and to every region (regions.secret_file, or {ENV_SECRET}). On a network "
            "that is yours alone: --insecure."
        )
    from ..meeting.sealed import mark, sealed
    from ..meeting.store import serve_store

    ends = {signal.SIGINT, signal.SIGTERM}
    # sigwait takes only signals that are blocked; threads of the store are to block them, too
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        server = serve_store(options.host, options.port)
        mark(sealed(server, keys))
        print(f"store listening on {options.host}:{server.port}; press Ctrl-C to end it", flush=True)
        signal.sigwait(ends)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0
