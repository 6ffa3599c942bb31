"""`hf-cocodc coordinator`: run the coordinator of runs."""

import argparse
import contextlib
import os
import queue
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..coordinator.secret import secret_of
from ..errors import InputError
from ..net.addresses import is_loopback
from ..settings import RegionConfig
from ..settings.environment import ENV_SECRET
from ..settings.fields import check_host
from ..settings.regions import HOW_LONG
from .checks import check

if TYPE_CHECKING:
    from ..net.keys import Keys

_MOST_LINES = 1000
"""Lines of the log that wait while nobody reads them."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "coordinator",
        help="run the coordinator: regions meet there, and it decides who takes part",
        description="Run the coordinator until you press Ctrl-C. Regions meet there, and it decides who takes part when "
        "regions are lost, join or leave. Every region must be able to reach it. It carries no training traffic. One "
        "coordinator can serve many runs at the same time. While it is away, regions train on; only these decisions wait.",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this machine to listen on, for example that of the VPN; 0.0.0.0 for all of them (default: 127.0.0.1, "
        "which no other machine can reach)",
    )
    parser.add_argument(
        "--port", type=int, default=29650, help="port to listen on; 0 takes a free port (default: 29650)"
    )
    parser.add_argument(
        "--secret-file",
        action="append",
        default=[],
        metavar="FILE",
        help="file with a secret that the coordinator and a run share (hf-cocodc secret new FILE); may be given several times, "
        f"and there may be one in {ENV_SECRET}. Runs with different secrets do not see each other",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="serve other machines without a secret: anyone who reaches the coordinator can then end or change every run there",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="keep decisions in this file. Start the coordinator again with the same file: one that has lost it decides nothing "
        f"for the runs that train: once a loss is to be decided, they wait for that, then end ({HOW_LONG}; default: "
        "~/.local/state/hf_cocodc/coordinator-PORT.state; none with --port 0)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    check("--port", options.port, 0, 65_535)
    check_host("--host", options.host)
    secrets = _secrets(options.secret_file)
    if secrets and options.insecure:
        raise InputError(f"--insecure with a secret: remove it, or the secret (--secret-file, {ENV_SECRET}).")
    if not secrets and not options.insecure and not is_loopback(options.host):
        raise InputError(
            f"--host {options.host} is reached by other machines, and whoever reaches a coordinator without a secret can end or "
            "change every run there. Make a secret with `hf-cocodc secret new secret`, and give it here "
            f"(--secret-file secret, or {ENV_SECRET}) and to every region (regions.secret_file, or {ENV_SECRET}). On a network "
            "that is yours alone: --insecure."
        )
    from ..coordinator.server import serve

    _allow_many_connections()
    with _printing() as say:
        serve(options.host, options.port, secrets, options.state, say)
    return 0


def _secrets(files: list[str]) -> "list[Keys]":
    given = [secret_of(RegionConfig())]
    given += [secret_of(RegionConfig(secret_file=file), env={}) for file in files]
    return list({keys.raw: keys for keys in given if keys is not None}.values())


def _allow_many_connections() -> None:
    """Let this process open as many connections as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _printing() -> "Iterator[Any]":
    """Inside the block, a function prints lines. A terminal that stands still must not stop the coordinator."""
    lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)

    def work() -> None:
        while (line := lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                print(line, flush=True)

    thread = threading.Thread(target=work, name="hf_cocodc-log", daemon=True)
    thread.start()
    has_begun = False

    def say(line: str) -> None:
        nonlocal has_begun
        with contextlib.suppress(queue.Full):
            lines.put_nowait(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}" if has_begun else line)
        has_begun = True

    try:
        yield say
    finally:
        with contextlib.suppress(queue.Full):
            lines.put(None, timeout=1.0)
        thread.join(timeout=1.0)
    if thread.is_alive():
        os._exit(0)  # the interpreter would wait at its end for the output that stands still
