"""`hf-cocodc simulate`: train all regions of a recipe in one process."""

import argparse
import contextlib
import io
import re
import signal
import sys
import threading
from typing import IO, Any

from ..errors import InputError, short
from ..settings.recipe import add_recipe
from .checks import RATE, add_json, add_speeds, check, check_speeds, recipe_of, write_json
from .ending import report


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="train all regions of a recipe in one process",
        description="Train all regions of a recipe in one process, where they take turns, and print what region 0 prints. The "
        "results are exactly those of a real run, except where a schedule follows measured times (cocodc does, and dilocox at a "
        "low rank). With --step-s, --rtt-ms and --rate-mbit, the command also simulates how long steps and transfers take. "
        "Everything is written to OUTPUT_DIR/simulated.",
    )
    add_recipe(parser)
    parser.add_argument("--regions", type=int, help="number of regions (default: the recipe's regions.count)")
    parser.add_argument("--step-s", type=float, metavar="S", help="simulated seconds of an inner step")
    parser.add_argument("--rtt-ms", type=float, metavar="MS", help="simulated round trip of the link in ms")
    parser.add_argument("--rate-mbit", type=float, metavar="MBIT", help=f"simulated {RATE}")
    add_speeds(parser, "simulated speeds")
    parser.add_argument(
        "--away",
        type=_away,
        default=(),
        metavar="R:A-B,...",
        help="simulated losses: 1:40-80 if region 1 is lost after inner step 40, and its process is there again at step 80; it "
        "takes part from the next landing on. The recipe needs regions.min",
    )
    add_json(parser, "the summary")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    overrides = ["training.disable_tqdm=true"]
    if options.regions is not None:
        overrides.append(f"regions.count={options.regions}")
    times = (options.step_s, options.rtt_ms, options.rate_mbit)
    if any(given is not None for given in times):
        if None in times:
            raise InputError("--step-s, --rtt-ms and --rate-mbit go together: give all three or none.")
        check("--step-s", options.step_s, 1e-9)
        check("--rtt-ms", options.rtt_ms, 0)
        check("--rate-mbit", options.rate_mbit, 1e-3)
    elif options.speeds or options.away:
        given = "--speeds" if options.speeds else "--away"
        raise InputError(f"{given} needs simulated time: give --step-s, --rtt-ms and --rate-mbit, too.")
    recipe = recipe_of(options, overrides)
    check_speeds(options.speeds, recipe.regions.count or 1)
    from ..link.lockstep import Absence  # torch takes seconds to import
    from ..training.preflight import preflight
    from ..training.region import end
    from ..training.simulation import VirtualLink, simulate, simulated_dir

    preflight(recipe)
    link = None
    if options.step_s is not None:
        link = VirtualLink(
            step_time_s=options.step_s,
            latency_s=options.rtt_ms / 2 / 1e3,
            bandwidth=options.rate_mbit * 1e6 / 8,
            speeds=options.speeds,
            away=tuple(Absence(*each) for each in options.away),
        )
    try:
        out, err = OfRegion0(sys.stdout), OfRegion0(sys.stderr)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            trainers = simulate(recipe, link=link)
    except KeyboardInterrupt:
        # a region is a thread that trains on: the end of the interpreter would abort it inside C++
        end(128 + signal.SIGINT)
    output = simulated_dir(recipe)
    figures = report([output / f"region-{region}" for region in range(len(trainers))], output)
    write_json(options, figures)
    return 0


def _away(text: str) -> tuple[tuple[int, int, int], ...]:
    """
    >>> _away("1:40-80,2:100-120")
    ((1, 40, 80), (2, 100, 120))
    """
    found = [re.fullmatch(r"(\d{1,4}):(\d{1,12})-(\d{1,12})", each) for each in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{short(text)} must be REGION:STEP-STEP, as in 1:40-80")
    return tuple((int(each[1]), int(each[2]), int(each[3])) for each in found if each)


class OfRegion0(io.TextIOBase):
    """A stream that leaves out what other regions print: each is a thread of its own, and says about the same."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        thread = threading.current_thread().name
        return len(text) if re.fullmatch(r"region [1-9]\d*", thread) else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
