"""`hf-cocodc pull`: the newest global model of a run that trains, without taking part."""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, LinkError, MeetingError, RunOver, expanded, short
from .status import add_place, keys_of, the_run

if TYPE_CHECKING:
    from ..coordinator.messages import Given
    from ..net.keys import Keys

_SILENT_S = 30.0
"""A coordinator that has not answered for so long has gone."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pull",
        help="get the newest global model of a run that trains",
        description="Get the newest global model of a run that trains, without taking part: into a folder that from_pretrained "
        "loads (with PEFT: the adapter). A region saves it after its next landing, or before, and it comes over the coordinator. "
        "Training does not wait for this command.",
    )
    parser.add_argument("out", metavar="OUT", help="a new folder, or an empty one")
    add_place(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    from ..run.figures import amount, outer_steps

    out, address = expanded(options.out).absolute(), options.coordinator
    check_new(out)
    keys = keys_of(address, options.secret_file)
    name, began = the_run(address, keys, options.run_name)["name"], time.monotonic()
    with beside(out) as folder:
        given, size = receive_model(address, name, keys, folder)
    at = outer_steps(given.landings, given.fragments)
    if not given.landings:
        at = "none yet, so these are the weights from before training"
    print(
        f"run {name!r}: the global model of inner step {given.step} (outer steps: {at}) of {len(given.regions)} regions, from "
        f"region {given.region}: {amount(size)} in {time.monotonic() - began:.1f} s, in {out}"
    )
    return 0


def check_new(out: Path) -> None:
    """Raise InputError unless a folder can be made there, or there is an empty one."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(
            f"{short(out, 200)} exists, and is not empty. Name a new folder, or remove it first."
        )
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK | os.X_OK)):
        raise InputError(
            f"no folder can be made in {short(out.parent, 200)}. Name a folder that exists and is yours to write."
        )


@contextlib.contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, whose place it takes, whole, at the end of the block; nothing is left after an error."""
    from ..snapshot.manifest import files_below, sync

    with tempfile.TemporaryDirectory(prefix=f".{out.name[:50]}.", dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        yield folder
        for path in files_below(folder).values():
            sync(path)
        try:
            os.rename(folder, out)
        except OSError as error:
            raise InputError(
                f"{short(out, 200)} is no empty folder any more ({error.strerror}): nothing was written. Name another one."
            ) from error
        sync(out.parent)


def receive_model(address: str, name: str, keys: "Keys | None", folder: Path) -> tuple["Given", int]:
    """Get the model of a run into an empty folder; returns what it is, and its bytes.

    Raises:
        InputError: the region cannot give it, or the disk has no room.
        RunOver: the run has ended; the message says where its last model lies.
        LinkError: it has come only in part.
    """
    from ..coordinator.caller import CoordinatorConnection, error_of
    from ..coordinator.messages import Given, Pull, Refuse, Waiting
    from ..snapshot.given import receive

    place = ""
    connection = CoordinatorConnection(address, name, "command", keys)
    try:
        connection.send(Pull())
        while True:
            message = connection.receive(_SILENT_S)
            match message:
                case None:
                    raise LinkError(f"the coordinator at {address} has been silent for {_SILENT_S:g} s")
                case Refuse():
                    raise error_of(message)
                case Waiting(why=why):
                    print(f"waiting: {why}", flush=True)
                case Given():
                    place = (
                        f" If the run has ended, its model is below {message.place}." if message.place else ""
                    )
                    return message, receive(connection, message, folder)
    except (MeetingError, RunOver):
        raise
    except LinkError as error:
        raise LinkError(
            f"{str(error).rstrip('.')}: the model came only in part, and nothing was written. Start this command again: where a "
            f"region is lost, another one gives its model.{place}"
        ) from error
    finally:
        connection.drop()
