"""Regions that enter a run while it trains, or come back to it: what `--join` checks and says."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InputError, MeetingError, MeetingRefused, RunOver
from ..settings.environment import ENV_COORDINATOR
from ..settings.recipe import Recipe
from .part import MachinePart
from .status import PATIENCE_S, keys_of, running

if TYPE_CHECKING:
    from ..coordinator.caller import CoordinatorConnection
    from ..net.keys import Keys

T = TypeVar("T")
AGAIN_S = 1.0
FIRST_S, EACH_S = 3.0, 60.0
"""Seconds after which a command says that it waits for the coordinator, and between two such lines."""


def refuse_to_join(resume: bool, coordinator: str | None) -> None:
    """Raise InputError if a region that joins is also to resume, or knows no coordinator."""
    if resume:
        raise InputError(
            "--join with --resume: a region that joins takes the others' state and not its own checkpoint. Remove one of them: "
            "--join if no region of the run trains now, otherwise --resume."
        )
    if coordinator is None:
        raise InputError(
            f"--join needs the coordinator of the run: pass --coordinator HOST:PORT (or {ENV_COORDINATOR}). A run that one "
            "command started on one machine has printed it."
        )


def claim_number(part: MachinePart, address: str) -> "tuple[CoordinatorConnection, int] | None":
    """Claim the lowest number that is free in a run: nobody else gets it while the connection that comes with it is open.

    Waits and raises like `of_run`; InputError also if the run has as many regions as it may have.
    """

    def claim(address: str, run: str, keys: "Keys | None") -> "tuple[CoordinatorConnection, int] | None":
        from ..coordinator.messages import Claim, Claimed

        asked = _asked(address, run, keys, Claim(), Claimed)
        return None if asked is None else (asked[0], asked[1].region)

    return of_run(part, address, claim)


def of_run(part: MachinePart, address: str, ask: "Callable[[str, str, Keys | None], T | None]") -> T | None:
    """What `ask(address, run, keys)` gets of a run that trains; None as long as it does not train. Waits for the run as long as
    regions wait for each other. Returns None, and says so, if the run has finished meanwhile.

    Raises:
        InputError: the run has no name and is not the only one.
        MeetingError: the run does not train; no coordinator answers, or one with another secret.
        RunOver: the run has stopped before its end.
    """
    has_said = False
    keys = keys_of(address, part.regions.secret_file)
    deadline = time.monotonic() + part.regions.start_timeout_s
    while True:
        state = run_at(part, address, keys)  # it waits for the coordinator
        finished, name = over(state, join=True), part.name if state is None else state["name"]
        got = None if finished is not None or name is None else ask(address, name, keys)
        if got is not None:
            return got
        if finished is not None:
            print(finished)
            return None
        if time.monotonic() > deadline:
            raise MeetingError(
                f"no region of {_named(name)} trains at {address}: there is nothing to join. Start the run without --join (with "
                "--resume if it has trained before), or correct the name of the run (--run). A run with "
                "regions.on_loss=stop cannot be joined."
            )
        if not has_said:
            print(f"waiting for {_named(name)} at {address}", flush=True)
            has_said = True
        time.sleep(min(AGAIN_S, max(deadline - time.monotonic(), 0)))


def recipe_at(address: str, run: str, keys: "Keys | None") -> tuple[str, dict[str, Any]] | None:
    """The name of a run, and what it tells of its recipe; None while it does not train, or its coordinator is away. Raises
    InputError if it has none, or cannot be joined.
    """
    from ..coordinator.messages import AskRecipe, RunRecipe

    asked = _asked(address, run, keys, AskRecipe(), RunRecipe)
    if asked is None:
        return None
    asked[0].close()
    return run, asked[1].recipe


def _asked(
    address: str, run: str, keys: "Keys | None", message: Any, kind: type
) -> "tuple[CoordinatorConnection, Any] | None":
    """The connection, still open, and the answer of this `kind` to a command; None while the run does not train, or its
    coordinator is away. Raises the error of a refusal.
    """
    from ..coordinator.caller import ConnectionEnded, CoordinatorConnection, NobodyAnswers, error_of
    from ..coordinator.messages import Refuse
    from ..net.addresses import Unreachable

    try:
        connection = CoordinatorConnection(address, run, "command", keys, timeout_s=PATIENCE_S)
    except (NobodyAnswers, Unreachable):
        return None
    try:
        connection.send(message)
        answer = connection.receive(PATIENCE_S)
    except ConnectionEnded:
        answer = None
    except BaseException:
        connection.close()
        raise
    if isinstance(answer, kind):
        return connection, answer
    connection.close()
    if isinstance(answer, Refuse) and answer.error != "MeetingError":
        raise error_of(answer)
    return None


def _named(name: str | None) -> str:
    return "a run" if name is None else f"run {name!r}"


def run_at(part: MachinePart, address: str, keys: "Keys | None") -> dict[str, Any] | None:
    """The run, as its coordinator knows it (`coordinator/runs.py`); None if it knows none. Waits for a coordinator that is not
    there yet as long as regions wait for each other, and says so; in a storage, the first region serves as one. A run without
    a name is the only one there; for a region that is to join, the only one that has not ended.

    Raises:
        InputError: a region is to join a run without a name, and there are several.
        MeetingError: no coordinator answers, or one with another secret.
    """
    from ..coordinator.caller import NobodyAnswers
    from ..coordinator.client import status
    from ..coordinator.in_storage import serving_in
    from ..net.addresses import is_url
    from ..net.mailbox import mailbox
    from ..net.storage import StorageError

    may_be_first = is_url(address) and not part.join
    wait_s, began = part.regions.start_timeout_s, time.monotonic()
    says_at = began + FIRST_S

    def look() -> None:
        nonlocal says_at
        now = time.monotonic()
        if now >= says_at:
            says_at = now + EACH_S
            left_s = max(wait_s - (now - began), 0.0)
            print(
                f"waiting for the coordinator at {address}, {left_s:.0f} s more (regions.start_timeout_s)",
                flush=True,
            )

    while True:
        left_s = wait_s - (time.monotonic() - began)
        try:
            if may_be_first and not serving_in(mailbox(address).storage):
                return None
            found = status(address, keys, part.name, PATIENCE_S if may_be_first else max(left_s, 0.0), look)
            if part.join and len(going := [each for each in found if each["phase"] != "ended"]) == 1:
                return going[0]
            if len(found) > 1 and part.join:
                names = ", ".join(each["name"] for each in found)
                raise InputError(
                    f"the coordinator at {address} has several runs ({names}). Name the one to join: --run NAME."
                )
            return found[0] if len(found) == 1 else None
        except StorageError as error:
            if not error.may_pass or left_s < AGAIN_S:
                raise
            look()
            time.sleep(AGAIN_S)
        except MeetingError as error:  # it may have ended while it was asked
            if may_be_first and isinstance(error, NobodyAnswers):  # whoever has served is gone
                return None
            if isinstance(error, MeetingRefused) or left_s < AGAIN_S:
                raise
            time.sleep(AGAIN_S)


def over(state: dict[str, Any] | None, join: bool) -> str | None:
    """What a region is told that comes to a run that has finished; None if it has not. Raises RunOver if the region is to join,
    and the run has stopped before its end.
    """
    if state is None or state["phase"] != "ended":
        return None
    ended, has = state["ended"], f"run {state['name']!r} has"
    if ended["how"] == "finished":
        where = f" Its model is at {ended['place']}." if ended["place"] else ""
        what = (
            "there is nothing to join" if join else "a new run of this name begins once all regions are here"
        )
        return f"{has} finished at step {ended['step']}: {what}.{where}"
    if join:
        raise RunOver(
            f"{has} {ended['how']} at step {ended['step']}: there is nothing to join. Start all its regions with --resume, "
            "and without --join."
        )
    return None


def has_missed_the_end(state: dict[str, Any] | None, region: int, max_steps: int | None) -> str | None:
    """What a region hears that was lost before its run has finished, with all `max_steps` that it would make (None: no more);
    None for another region, and if the run is to make more steps.
    """
    finished = over(state, join=False)
    if finished is None or state is None:
        return None
    if max_steps is not None and not 0 < max_steps <= state["ended"]["step"]:
        return None
    if region not in {each["region"] for each in state["lost"]}:
        return None
    return (
        f"{finished.partition(':')[0]} without region {region}, which was lost. The others have the model"
        + (f", at {state['ended']['place']}" if state["ended"]["place"] else "")
        + ". For more steps, raise max_steps and start all regions with --resume."
    )


def trains(state: dict[str, Any] | None, region: int) -> bool:
    """Whether a run trains already, which a region that its scheduler starts again then enters by itself. Says so if another
    process of the region still takes part.
    """
    if state is None or not state["elastic"] or state["phase"] != "trains":
        return False
    for member in state["members"]:
        if member["region"] == region:
            print(
                f"region {region} is in run {state['name']!r} already, as a process at {member['address']}. If that has died, "
                "the others will notice it. If it lives, end it, or join as another region (--join without --region takes a free "
                "number). This command loads the model, and then tries to join.",
                flush=True,
            )
    return True


def name_of(recipe: Recipe) -> str:
    """The name of a recipe's run."""
    from ..training.building import output_dir

    return recipe.regions.name_of_run(os.environ) or output_dir(recipe).resolve().name


def way_back(words: Sequence[str], resumes: bool, region: int, address: str | None) -> str:
    """The command that brings a lost region back, from the `words` of the one that has started it, which `resumes` or not."""
    command, *options = words
    if resumes and "--resume" in options:  # the first one is ours: a script comes behind our options
        options.remove("--resume")
    joins = ["--join", "--region", str(region), "--coordinator", address or "HOST:PORT"]
    return shlex.join(["hf-cocodc", command, *joins, *options])


def free_number(part: MachinePart, address: str) -> int:
    """The lowest number that no process of a run has; it is not claimed. Raises InputError if the run does not train, or has as
    many regions as it may have.
    """
    [state] = running(address, keys_of(address, part.regions.secret_file), part.name)
    taken = [each["region"] for each in (*state["members"], *state["newcomers"])]
    free = [each for each in range(state["most"]) if each not in taken]
    if not free:
        raise InputError(
            f"run {state['name']!r} has as many regions as it may have (regions.max={state['most']}). Start this one again when "
            "another has left, or raise regions.max when you start the run anew."
        )
    return free[0]


def loss_in_words(lost: Any) -> str:
    """How a region ended that the others go on without."""
    error = lost.error()
    return error[0] if error is not None else f"{lost.end_in_words}; see {lost.log.name}"
