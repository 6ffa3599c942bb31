"""`hf-cocodc leave`: let a region leave a run in good order."""

import argparse
import contextlib
from typing import Any

from ..errors import InputError, LinkError
from .status import add_place, keys_of, the_run

PATIENCE_S = 15.0


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "leave",
        help="let a region leave a run in good order",
        description="Ask a region to leave a run. It sends what it has trained, the others apply that and train on without it, "
        "and its process ends with exit code 0. It can rejoin later (hf-cocodc train --join). Not in runs with "
        "regions.on_loss=stop.",
    )
    parser.add_argument("--region", type=int, required=True, help="number of the region")
    add_place(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    from ..coordinator.caller import CoordinatorConnection, error_of
    from ..coordinator.messages import AskLeave, Refuse

    address, region = options.coordinator, options.region
    if region < 0:
        raise InputError(f"--region {region} does not exist: regions are numbered from 0.")
    keys = keys_of(address, options.secret_file)
    state = the_run(address, keys, options.run_name)
    name = state["name"]
    with contextlib.closing(CoordinatorConnection(address, name, "command", keys)) as connection:
        connection.send(AskLeave(region=region))
        answer = connection.receive(PATIENCE_S)
    if isinstance(answer, Refuse):
        raise error_of(answer)
    if answer is None:
        raise LinkError(
            f"region {region} of run {name!r} has not answered for {PATIENCE_S:.0f} s: it may be frozen, or cut off from the "
            "coordinator. Look at hf-cocodc status, or end its process: the others go on without it."
        )
    left, least = len(state["members"]) - 1, state["least"]
    below = f" Fewer than regions.min={least} are left: they wait for others." if left < least else ""
    print(f"region {region} sends what it has trained, and leaves run {name!r}.{below}")
    return 0
