"""`hf-cocodc status`: who takes part in a run, how far each region is, and who waits for whom."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MeetingError
from ..meeting.secret import secret_of
from ..settings import RegionConfig
from .checks import add_json, add_secret, check_writable, write_json

if TYPE_CHECKING:
    from ..meeting.live import Record
    from ..meeting.store import SteadyStore

PATIENCE_S = 5.0
"""A store that does not answer for so long is not there."""
STILL_S = 10.0
"""A region that has made no inner step for so long is said to stand still."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="show who takes part in a run that trains",
        description="Show who takes part in the runs at a store, how far each region is, and who waits for whom. Only runs that "
        "go on without a lost region (regions.min, regions.on_loss=continue) say so at their store. What it shows of a region is "
        "some seconds old. How far a region is behind is shown only where it is more than regions make in that time.",
    )
    add_place(parser)
    add_json(parser, "the figures, a list of runs,")
    parser.set_defaults(run=run, parser=parser)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a run at a store."""
    parser.add_argument("--store", metavar="HOST:PORT", required=True, help="address of the run's store")
    parser.add_argument(
        "--run",
        dest="run_name",
        metavar="NAME",
        help="name of the run, if several train at the store; as a rule, the name of the output folder",
    )
    add_secret(parser)


def run(options: argparse.Namespace) -> int:
    if options.json is not None:
        check_writable("--json", options.json)
    records = running(reach(options.store, options.secret_file), options.store, options.run_name)
    for record in records:
        print("\n".join(lines(record)))
    write_json(options, [as_figures(record) for record in records])
    return 0


def reach(address: str, secret_file: str | None = None) -> "SteadyStore":
    """The store at HOST:PORT, of a run that trains.

    Raises:
        InputError: this is no address, or the secret cannot be read.
        MeetingError: no store answers there, or one with another secret.
    """
    keys = secret_of(RegionConfig(store=address, secret_file=secret_file))
    from ..meeting.sealed import check
    from ..meeting.store import SteadyStore, connect_store

    try:
        store = connect_store(address, PATIENCE_S, keys)
    except MeetingError as error:
        raise MeetingError(
            f"no store answers at {address}. If `hf-cocodc train` has printed this address, its run has ended, and its store "
            f"with it. Otherwise correct --store, or look at the machine of the store. ({error.__cause__ or error})"
        ) from error
    check(store, begins=False)
    return SteadyStore(address, keys=keys)


def running(store: "SteadyStore", address: str, name: str | None) -> "list[Record]":
    """The records of the runs that train; of one, if its name is given.

    Raises:
        InputError: none trains.
        StoreAwayError: the store does not answer any more.
        MeetingError: what lies at the store is not ours.
    """
    from ..meeting.live import ended, names, read_all_alive

    known = names(store)
    found = read_all_alive(store, known if name is None else [name])
    if found:
        return found
    which = "no run" if name is None else f"no run named {name!r}"
    over = [each for each in ended(store) if name in (None, each)]
    died = [each for each in known if name in (None, each)]
    said = f"{which} trains at {address}."
    if over:
        said += f" Ended in good order: {', '.join(over)}."
    if died:
        said += f" Without a sign of life from any region: {', '.join(died)}."
    if not over and not died:
        said += " Only runs with regions.min or regions.on_loss=continue say at their store that they train."
    raise InputError(said)


def lags(record: "Record") -> list[int]:
    """How many inner steps each member is behind the one that is ahead of all; 0 where that is not certain."""
    least = min(0, *(member.behind for member in record.members))
    return [member.behind - least for member in record.members]


def lines(record: "Record") -> list[str]:
    """A run as lines of text."""
    ahead = max(member.step for member in record.members)
    last = (
        "nothing has landed yet"
        if record.landed_at is None
        else f"last landing at step {record.landed_at}, {record.landed_s:.0f} s ago"
    )
    below = " (training waits for others)" if len(record.members) < record.least else ""
    rows = [
        f"run         {record.name}",
        f"regions     {len(record.members)}{below}; at least {record.least} train, at most {record.most} take part; "
        f"epoch {record.epoch}",
        f"step        {ahead}{'' if record.max_steps is None else f' of {record.max_steps}'}; {last}",
    ]
    for member, lag in zip(record.members, lags(record), strict=True):
        words = [f"step {member.step}" + (f" ({lag} behind)" if lag else "")]
        if member.awaits is not None:
            words.append(f"waits for region {member.awaits}")
        if member.moved_s >= STILL_S:
            words.append(f"no inner step for {member.moved_s:.0f} s")
        if member.doing:
            words.append(member.doing)
        machine = member.address.rpartition(":")[0]
        rows.append(f"{f'region {member.region}':<12}{', '.join(words)}  [{machine}]")
    return rows


def as_figures(record: "Record") -> dict[str, Any]:
    """A run as JSON can express it, without what its regions compare."""
    figures = dataclasses.asdict(record)
    del figures["hello"]
    for member, lag in zip(figures["members"], lags(record), strict=True):
        member["behind"] = lag
    return figures
