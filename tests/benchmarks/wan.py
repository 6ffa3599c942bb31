"""Training over an emulated link on this machine, with every method: `python -m tests.benchmarks.wan`.

The regions are network namespaces. A link with the given round trip, rate and packet loss connects them; TCP is the kernel's
own. It needs Linux, and root only if the kernel allows no user namespaces. It takes some minutes; --steps and --methods make it
shorter.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_cocodc.cli.checks import check, check_writable
from hf_cocodc.errors import CocodcError
from hf_cocodc.methods import METHODS
from hf_cocodc.tools.bench.report import BenchReport, write

from .wan_training import Plan, measure


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--regions", type=int, default=2, help="number of regions (default: 2)")
    parser.add_argument(
        "--rtt-ms", type=float, default=100, help="round trip of the link in ms (default: 100)"
    )
    parser.add_argument(
        "--pair-mbit",
        type=float,
        default=1000,
        help="rate between each two regions in each direction, in Mbit/s (default: 1000)",
    )
    parser.add_argument(
        "--loss", type=float, default=0, help="probability that a packet is lost (default: 0)"
    )
    parser.add_argument(
        "--congestion",
        help="TCP congestion control, for example cubic or bbr (default: the setting of this machine)",
    )
    parser.add_argument(
        "--rate-limit",
        type=float,
        help="highest rate at which a region sends, in Mbit/s, like regions.rate_limit (default: no limit)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        default=list(METHODS),
        help=f"methods to train with: {', '.join(METHODS)} (default: all of them)",
    )
    parser.add_argument(
        "--steps", type=int, default=240, help="inner steps of each region, for each method (default: 240)"
    )
    parser.add_argument(
        "--sync-interval", type=int, default=20, help="sync_interval (H) of every method (default: 20)"
    )
    options = parser.parse_args(words)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    try:
        _measure(options)
    except CocodcError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _measure(options: argparse.Namespace) -> None:
    check("--regions", options.regions, 2, 100)
    check("--rtt-ms", options.rtt_ms, 0, 60_000)
    check("--pair-mbit", options.pair_mbit, 0.01, 100_000)
    check("--loss", options.loss, 0, 0.99)
    if options.rate_limit is not None:
        check("--rate-limit", options.rate_limit, 0.01)
    if options.json is not None:
        check_writable("--json", options.json)
    plan = Plan(
        regions=options.regions,
        rtt_s=options.rtt_ms / 1e3,
        rate=options.pair_mbit * 1e6,
        loss=options.loss,
        congestion=options.congestion,
        methods=options.methods,
        steps=options.steps,
        sync_interval=options.sync_interval,
        rate_limit=options.rate_limit,
    )
    reports: list[BenchReport] = []
    for report in measure(plan, lambda line: sys.stderr.write(f"{line}\n")):
        sys.stdout.write("\n".join(report.lines()) + "\n\n")
        sys.stdout.flush()
        reports.append(report)
        if options.json is not None:
            write(options.json, reports)


if __name__ == "__main__":
    sys.exit(main())
