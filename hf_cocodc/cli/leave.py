"""`hf-cocodc leave`: let a region leave a run in good order."""

import argparse
import time
from typing import Any

from ..errors import InputError, LinkError
from .status import add_place, reach, running

PATIENCE_S = 15.0


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "leave",
        help="let a region leave a run in good order",
        description="Ask a region to leave a run. It sends what it has trained, the others take that in and train on without it, "
        "and its process ends with exit code 0. It can come back (hf-cocodc train --join). Only in runs with regions.min or "
        "regions.on_loss=continue.",
    )
    parser.add_argument("--region", type=int, required=True, help="number of the region")
    add_place(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    from ..meeting.live import Request

    store = reach(options.store, options.secret_file)
    found = running(store, options.store, options.run_name)
    if len(found) > 1:
        names = ", ".join(record.name for record in found)
        raise InputError(f"several runs train at {options.store}: {names}. Name one with --run.")
    [record] = found
    if options.region not in record.regions:
        raise InputError(
            f"region {options.region} takes no part in run {record.name!r}. Its members are: "
            f"{', '.join(map(str, record.regions))}."
        )
    request = Request(store, record, options.region)
    request.write("hf-cocodc leave")
    deadline = time.monotonic() + PATIENCE_S
    while not request.is_heard:
        if time.monotonic() > deadline:
            request.take_back()
            raise LinkError(
                f"region {options.region} of run {record.name!r} has not answered for {PATIENCE_S:.0f} s: it may be frozen, or "
                "cut off from the store. Look at hf-cocodc status, or end its process: the others go on without it."
            )
        time.sleep(0.2)
    left = len(record.members) - 1
    below = (
        f" Fewer than regions.min={record.least} are left: they wait for others."
        if left < record.least
        else ""
    )
    print(f"region {options.region} sends what it has trained, and leaves run {record.name!r}.{below}")
    return 0
