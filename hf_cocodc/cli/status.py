"""`hf-cocodc status`: who takes part in a run, how far each region is, and who waits for whom."""

import argparse
from typing import TYPE_CHECKING, Any

from ..coordinator.secret import secret_of
from ..errors import InputError, MeetingError
from ..settings import RegionConfig
from .checks import add_coordinator, add_json, add_secret, write_json

if TYPE_CHECKING:
    from ..net.keys import Keys

PATIENCE_S = 5.0
"""A coordinator that does not answer for so long is not there."""
STILL_S = 10.0
"""A region that has made no inner step for so long is said to stand still."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="show who takes part in a run",
        description="Show who takes part in the runs at a coordinator, how far each region is, and who waits for whom. The "
        "figures are about a second old, so a region is shown as behind only if it lags by more steps than regions make in that "
        "time.",
    )
    add_place(parser)
    add_json(parser, "the figures (a list of runs)")
    parser.set_defaults(run=run, parser=parser)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a run at a coordinator."""
    add_coordinator(parser, "address of the run's coordinator", required=True)
    parser.add_argument(
        "--run",
        dest="run_name",
        metavar="NAME",
        help="name of the run, if the coordinator has several; usually the name of the output folder",
    )
    add_secret(parser)


def run(options: argparse.Namespace) -> int:
    keys = keys_of(options.coordinator, options.secret_file)
    runs = running(options.coordinator, keys, options.run_name)
    for each in runs:
        print("\n".join(lines(each)))
    write_json(options, runs)
    return 0


def keys_of(address: str, secret_file: str | None) -> "Keys | None":
    """The secret for the coordinator at HOST:PORT. Raises InputError if this is no address, or the secret cannot be read."""
    return secret_of(RegionConfig(coordinator=address, secret_file=secret_file))


def running(address: str, keys: "Keys | None", name: str | None) -> list[dict[str, Any]]:
    """The runs that train, or wait for their regions; the one of this name, if there is a name: see `coordinator/runs.py`.

    Raises:
        InputError: there is none, or no such folder where they would meet.
        MeetingError: no coordinator answers, or one with another secret.
    """
    from ..coordinator.caller import NobodyAnswers
    from ..coordinator.client import status
    from ..coordinator.in_storage import refuse_missing
    from ..net.addresses import is_url

    if is_url(address):
        refuse_missing(address)
    try:
        known = status(address, keys, name, PATIENCE_S)
    except NobodyAnswers as error:
        raise MeetingError(
            f"no coordinator answers at {address}. If `hf-cocodc train` has printed this address, its run has ended, and its "
            "coordinator with it. Otherwise correct --coordinator, or look at the machine of the coordinator. "
            f"({error.__cause__})"
        ) from error
    active = [each for each in known if each["phase"] in ("gathering", "trains")]
    if active:
        return active
    which = "no run" if name is None else f"no run named {name!r}"
    words = f"{which} trains at {address}."
    over = [f"{each['name']} ({_how(each['ended'])})" for each in known if each["phase"] == "ended"]
    died = [each["name"] for each in known if each["phase"] == "silent"]
    if over:
        words += f" Ended: {', '.join(over)}."
    if died:
        words += f" Without a heartbeat from any region: {', '.join(died)}."
    raise InputError(words)


def the_run(address: str, keys: "Keys | None", name: str | None) -> dict[str, Any]:
    """The one run of `running`. Raises InputError if there are several."""
    state, *others = running(address, keys, name)
    if others:
        names = ", ".join(each["name"] for each in (state, *others))
        raise InputError(f"several runs train at {address}: {names}. Name one with --run.")
    return state


def _how(ended: dict[str, Any]) -> str:
    where = f"; its model is at {ended['place']}" if ended["place"] else ""
    return f"{ended['how']} at step {ended['step']}{where}"


def lines(state: dict[str, Any]) -> list[str]:
    """A run as lines of text."""
    about = _of_run(state) if state["members"] else []
    if state["ended"]:  # its members say no more, and those that wait begin another one
        about = [f"before      {_how(state['ended'])}"]
    return [f"run         {state['name']}", *about, *_waiting(state)]


def _of_run(state: dict[str, Any]) -> list[str]:
    members = state["members"]
    rows = [f"regions     {len(members)}{_rule(state)}; epoch {state['epoch']}"]
    step = max(member["step"] for member in members)
    last = (
        "nothing has landed yet"
        if state["landed_at"] is None
        else f"last landing at step {state['landed_at']}, {state['landed_s']:.0f} s ago"
    )
    of = "" if state["max_steps"] is None else f" of {state['max_steps']}"
    rows.append(f"step        {step}{of}; {last}")
    if state["cosine"] is not None:
        rows.append(
            f"agreement   cosine {state['cosine']:.2f} of the regions' outer gradients at the last landing"
        )
    samples = sum(member["samples"] or 0 for member in members)
    return [
        *rows,
        *(_of_member(member, samples) for member in members),
        *(_of_lost(each) for each in state["lost"]),
    ]


def _rule(state: dict[str, Any]) -> str:
    """How many regions must train, and may."""
    if not state["elastic"]:
        return "; the run ends when one is lost"
    below = " (training waits for others)" if len(state["members"]) < state["least"] else ""
    return f"{below}; at least {state['least']} train, at most {state['most']} take part"


def _of_member(member: dict[str, Any], samples: int) -> str:
    """A region that takes part; its share of so many `samples` of all regions in an inner step, if it was dealt one."""
    words = [f"step {member['step']}" + (f" ({member['behind']} behind)" if member["behind"] else "")]
    if member["samples"] is not None:
        words.append(f"{member['samples']} of {samples} samples a step")
    if member["awaits"] is not None:
        words.append(f"waits for region {member['awaits']}")
    if member["moved_s"] >= STILL_S:
        words.append(f"no inner step for {member['moved_s']:.0f} s")
    if member["doing"]:
        words.append(member["doing"])
    return f"{_label(member['region'])}{', '.join(words)}  [{member['address']}]"


def _of_lost(lost: dict[str, Any]) -> str:
    at = "" if lost["step"] is None else f" at step {lost['step']}"
    why = lost["why"].partition(". ")[0].rstrip(".")  # without the way out, which is for its own command
    return f"{_label(lost['region'])}lost{at}, {lost['since_s']:.0f} s ago: {why}"


def _waiting(state: dict[str, Any]) -> list[str]:
    """Lines about regions that are to come in, or wait for others."""
    coming = [f"{_label(each['region'])}is to come in  [{each['address']}]" for each in state["newcomers"]]
    return coming + [f"{_label(region)}waits to take part" for region in state["waiting"]]


def _label(region: int) -> str:
    return f"region {region}".ljust(12)
