"""`hf-cocodc report`: one page about one or several runs, from their journals."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError
from .checks import check_writable


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write one page about runs: losses, who waited for whom, what was sent",
        description="Write one HTML page about one run, or about several runs side by side, from the journals of their regions: "
        "losses, a timeline of regions and transfers, how time was spent, bandwidth, staleness, norms, settings. Runs may still "
        "be training. The page needs no network and has no script. Folders with regions of one run become one run.",
    )
    parser.add_argument(
        "folders",
        metavar="RUN_FOLDER",
        nargs="+",
        type=Path,
        help="output folder of a run, or of a region of it",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="default: report.html"
    )
    parser.add_argument(
        "--seconds",
        metavar=("FROM", "TO"),
        nargs=2,
        type=float,
        help="draw each transfer between these two times, in seconds since the start, instead of those around the longest wait "
        "and at the end",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    window = options.seconds
    if window is not None and not 0 <= window[0] < window[1] < float("inf"):
        raise InputError(
            f"--seconds {window[0]:g} {window[1]:g}: FROM must be at least 0, and less than TO. Both are finite."
        )
    check_writable("-o", options.output)
    from ..tools.report.page import page
    from ..tools.report.runs import load

    runs = load(options.folders)
    for each in runs:
        for sentence in each.unreadable:
            print(f"warning: {sentence}", file=sys.stderr)
    text = page(runs, None if window is None else tuple(window))
    options.output.write_text(text, encoding="utf-8", errors="replace")
    for each in runs:
        regions = ", ".join(map(str, each.regions))
        print(f"{each.name:<20}  {each.method}, step {each.step:,}, journals of region {regions}")
    print(f"report                {options.output}")
    return 0
