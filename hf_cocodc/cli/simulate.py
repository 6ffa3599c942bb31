"""`hf-cocodc simulate`: train all regions of a recipe in one process."""

import argparse
import contextlib
import io
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

from ..errors import InputError, short
from ..settings.recipe import add_recipe
from .checks import RATE, add_json, add_speeds, check, check_speeds, recipe_of, write_json
from .ending import report


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="train all regions of a recipe in one process",
        description="Train all regions of a recipe in one process, where they take turns. The results are exactly those of a "
        "real run, except where a schedule follows measured times (cocodc does, and dilocox at a low rank). With --step-s, "
        "--rtt-ms and --rate-mbit, the command also simulates how long steps and transfers take. Everything is written to "
        "OUTPUT_DIR/simulated.",
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

    preflight(recipe, recipe.regions.count or 1)
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
        with _labeled_output(recipe.regions.count or 1):
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


@contextlib.contextmanager
def _labeled_output(count: int) -> Iterator[None]:
    """Inside the block, each line that a region prints begins with its name. Of many regions only region 0 prints its log and
    its progress bars, and a warning is shown once.
    """
    from ..tools.report.summary import MANY

    has_many = count > MANY
    if has_many:
        print(f"{count} regions: the lines of region 0 follow. Each region has a journal.", flush=True)
    out, err = Labeled(sys.stdout, log_of_0=has_many), Labeled(sys.stderr, once=has_many)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.end()
            err.end()


class Labeled(io.TextIOBase):
    """A stream that puts the name of a region in front of each complete line that its thread writes; of a progress bar only the
    last state passes. The lines of other threads pass unchanged.

    Args:
        log_of_0: of the regions, only region 0 is heard.
        once: a line that a region has written before is left out, and so are progress bars of all but region 0.
    """

    def __init__(self, stream: IO[str], *, log_of_0: bool = False, once: bool = False) -> None:
        self._stream, self._log_of_0, self._once = stream, log_of_0, once
        self._seen: set[str] = set()
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        thread = threading.current_thread().name
        if not re.fullmatch(r"region \d+", thread):
            return self._stream.write(text)
        *lines, rest = (self._begun.get(thread, "") + text).split("\n")
        self._begun[thread] = rest
        for line in lines:
            self._pass_on(thread, line)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def end(self) -> None:
        """Pass on lines that were not completed."""
        for thread, rest in self._begun.items():
            if rest:
                self._pass_on(thread, rest)
        self._begun.clear()

    def _pass_on(self, thread: str, line: str) -> None:
        is_0 = thread == "region 0"
        if self._log_of_0 and not is_0:
            return
        is_bar, is_of_traceback = "\r" in line, line.startswith((" ", "Traceback"))
        if self._once and ((is_bar and not is_0) or (line in self._seen and not is_of_traceback)):
            return
        if self._once:
            self._seen.add(line)
        self._stream.write(f"[{thread}] {line.rpartition(chr(13))[2]}\n")
