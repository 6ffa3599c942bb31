"""What a region goes on from, and whether its run may: a checkpoint, what `accelerator.load_state` has loaded, or a base.

An outer optimizer sees each later `load_state`. Of an earlier one Accelerate keeps no trace: the script names its folder.
"""

import logging
import secrets
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from accelerate import Accelerator
from torch import nn

from ..errors import CheckpointError, InputError, LinkError
from ..link.base import Link
from ..link.group import main_says, ranks_of_region
from ..link.part import Standing
from ..link.spreading import gather, spread
from ..resolve import value_in
from ..snapshot import checkpoint as disk
from ..snapshot import local_weights
from ..snapshot.checkpoint import Saved
from ..snapshot.manifest import FOLDER
from ..snapshot.receive import Received
from ..snapshot.resume import CanResume, damage_here
from .about import About, refuse_another_run
from .inner_optimizer import InnerOptimizer
from .loop import PlainLoop
from .session import session_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOTHING = -1
Loaded = str | Path | Literal[False] | None
"""The folder that `accelerator.load_state` has loaded before a run; False if training before it is no part of it."""


class Origin(NamedTuple):
    """Where a plain loop begins: the step of its checkpoint (-1 if there is none), and a number for the run (the lowest
    region's counts).
    """

    step: int
    run: int


def refuse_damaged(link: Link, accelerator: Accelerator, checkpoint: Path) -> None:
    """Raise CheckpointError if any byte of a checkpoint that Accelerate loads is damaged. A collective call of the ranks."""
    wrong = damage_here(link, accelerator, checkpoint)
    if wrong is not None:
        raise CheckpointError(f"{checkpoint} cannot be loaded: {wrong}. Load another checkpoint of the run.")


def in_all(link: Link, accelerator: Accelerator, attempt: Callable[[], T], what: str) -> T:
    """What `attempt` returns, if it fails in no rank of any region; one that has failed keeps no other waiting. A collective
    call, named `what`. Raises what `attempt` has raised here or in another rank, or CheckpointError if it has failed in another
    region.
    """
    failed: Exception | None = None
    is_alone = accelerator.num_processes == 1
    try:
        result = attempt() if is_alone else ranks_of_region().together(attempt, f"{what}, in each rank")
    except Exception as error:
        failed = error
    try:  # whatever has failed: the other regions wait here
        verdicts = gather(link, CanResume(failed is None), what)
    except LinkError as error:
        raise failed or error from None
    bad = [region for region, verdict in verdicts.items() if not verdict.is_good]
    why = b""
    if bad and len(verdicts) > 1:
        why = spread(
            link, bad[0], str(failed or "").encode(), "why a region cannot go on from its checkpoint"
        )
    if failed is not None:
        raise failed
    if bad:
        raise CheckpointError(
            f"region {bad[0]} cannot go on from its checkpoint, so no region does. It says: {why.decode(errors='replace')}"
        )
    return result


def restore_buffers(model: nn.Module, checkpoint: Path, lane: int) -> None:
    """Copy a checkpoint's buffers into the model: Accelerate loads only those that a state_dict holds."""
    local_weights.restore(model, checkpoint, local_weights.buffers(model), lane)


def joins(link: Link, accelerator: Accelerator) -> bool:
    """Whether this region is a newcomer without a base. All ranks of the region call this together."""
    if not link.is_elastic:
        return False

    def is_joining() -> bool:
        session = session_of(link)  # none in a simulation
        return session is not None and session.link.standing is Standing.JOINING

    return main_says(link, accelerator, is_joining, "whether this region joins")


def get_base(link: Link, accelerator: Accelerator, folder: Path) -> Received:
    """Get a base from a member of the run, into `folder`. All ranks of the region call this together.

    Raises:
        LinkError: no member gives one.
        CheckpointError: what comes is no base, or the disk refuses.
    """

    def get() -> Received:
        session = session_of(link)
        assert session is not None
        return session.get_base(folder)

    return main_says(link, accelerator, get, "a base from another region", Received)


class StartPoint(NamedTuple):
    """What a region's training goes on from.

    Attributes:
        saved: a checkpoint, or another region's base; None to begin at step 0.
        started: what the regions agreed on before step 1, for newcomers; JSON-able.
        is_new: whether this region joins a run that trains.
        bases: folder in which all ranks of the region find bases.
    """

    saved: Saved | None
    started: dict[str, Any]
    is_new: bool
    bases: Path


def start_point(
    link: Link,
    accelerator: Accelerator,
    model: nn.Module,
    inner: InnerOptimizer,
    saved: Saved | None,
    loaded: Loaded,
    journal: str | Path | None,
    started: dict[str, Any] | None,
) -> StartPoint:
    """What a region goes on from: what it was given, what its accelerator has `loaded`, or the base of a run that it joins.

    A collective call of all regions where none joins. `started`: what they have agreed on before, with `saved`, if they have.
    Raises like `agree_on_beginning`, and LinkError if no member of the run that it joins gives a base.
    """
    is_new = joins(link, accelerator)
    if journal is not None or not link.is_elastic:
        bases = Path(journal or ".").absolute().parent
    else:  # all ranks of the region must reach it
        make = partial(tempfile.mkdtemp, prefix="hf_cocodc-")
        bases = Path(main_says(link, accelerator, make, "a folder for bases"))
    if started is None:
        if is_new and saved is None:
            received = get_base(link, accelerator, bases)
            saved, run = disk.read_own(link, received.folder), received.run
            PlainLoop(accelerator).load_inner(received.folder)
            # global params come with the engine: this is what is not trained, such as buffers
            local_weights.restore(model, received.folder, (), link.lane)
        else:
            saved, run = agree_on_beginning(link, accelerator, model, inner, saved, loaded)
        started = {"run": run}
    return StartPoint(saved, started, is_new, bases)


def agree_on_beginning(
    link: Link,
    accelerator: Accelerator,
    model: nn.Module,
    inner: InnerOptimizer,
    saved: Saved | None,
    loaded: Loaded = None,
) -> tuple[Saved | None, int]:
    """What a plain loop goes on from, and a number for its run. A collective call.

    Args:
        model: unwrapped. It holds what the accelerator has loaded.
        saved: what the loop was given; None for what the accelerator has `loaded`, if that is of a run of ours.

    Raises:
        CheckpointError: the checkpoint is damaged, or regions have loaded different steps.
        InputError: there was training before, or a load, and the script does not say which.
    """
    folder = Path(loaded) if loaded else None

    def read() -> Saved | None:
        if saved is None and loaded is None and (begun := _has_begun(accelerator, inner)):
            raise InputError(
                f"{begun} before OuterOptimizer(...) was made, but the run would begin at step 0. If accelerator.load_state has "
                "loaded a checkpoint, call it after OuterOptimizer(...), or name the folder: OuterOptimizer(..., loaded=folder). "
                "If a new run is to begin with a model that was trained before, say OuterOptimizer(..., loaded=False)."
            )
        # whether an outer optimizer has saved its part there, or begun to
        ours = partial(Path.is_dir, folder / FOLDER) if folder is not None else bool
        if saved is not None or not main_says(link, accelerator, ours, "what was loaded"):
            return saved
        assert folder is not None
        refuse_damaged(link, accelerator, folder)
        checkpoint = disk.read_own(link, folder)
        restore_buffers(model, folder, link.lane)
        return checkpoint

    checkpoint = in_all(link, accelerator, read, "what regions have loaded")
    own = Origin(_NOTHING if checkpoint is None else checkpoint.facts.step, secrets.randbits(48))
    origins = gather(link, own, "where regions begin")
    first = min(origins)
    for region, other in origins.items():
        if other.step != origins[first].step:
            raise CheckpointError(
                f"region {first} begins {_in_words(origins[first])}, region {region} {_in_words(other)}. Let every region load "
                "its own checkpoint of one step (accelerator.load_state), or none."
            )
    if saved is None and checkpoint is not None:
        logger.info("region %d goes on from %s, at step %d", link.region, folder, checkpoint.facts.step)
    return checkpoint, origins[first].run


def _has_begun(accelerator: Accelerator, inner: InnerOptimizer) -> str:
    """What shows that there was training, or a load, in words; empty if nothing does."""
    if inner.has_state:
        return "the inner optimizer has made steps"
    plain = [getattr(each, "scheduler", each) for each in accelerator._schedulers]
    steps = max((int(getattr(each, "last_epoch", 0)) for each in plain), default=0)
    return f"a learning rate schedule has made {steps} steps" if steps > 0 else ""


def _in_words(origin: Origin) -> str:
    return "from step 0, without a checkpoint" if origin.step == _NOTHING else f"from step {origin.step}"


class Writer(NamedTuple):
    """Region that wrote the checkpoint from which a region resumes; -1 if it was taken over."""

    region: int


def check(
    saved: Saved,
    settings: dict[str, Any],
    link: Link,
    about: About,
    allowed: Collection[str],
    model: nn.Module,
    is_new: bool = False,
) -> None:
    """Compare the run that wrote a checkpoint with this one; warn if this run cannot be exact. A collective call.

    Args:
        model: unwrapped; it holds the weights that were saved with the checkpoint.
        is_new: the checkpoint is the base of a newcomer, which comes into a run that trains.

    Raises:
        CheckpointError: the checkpoint is of another method, model, training or number of lanes, or two regions use it; or the
            model holds other weights.
    """
    facts = saved.facts
    writer = -1 if facts.taken_over else facts.region
    writers = [other.region for other in link.gather(Writer(writer), "who wrote the checkpoints")]
    # regions may be renumbered, but two regions with equal local weights and random numbers would train the same steps
    if writer not in (-1, link.region) and writers.count(writer) > 1:
        raise CheckpointError(
            f"the checkpoint is region {facts.region}'s, and this is region {link.region}. Give every region its own, or let "
            "regions find theirs: trainer.train(resume_from_checkpoint=True), or hf-cocodc train RECIPE --resume."
        )
    if facts.num_lanes != link.num_lanes:
        raise CheckpointError(
            f"a region of {facts.num_lanes} lane(s) wrote the checkpoint, this region has {link.num_lanes}. Launch it with as "
            "many ranks and the same sharding, or start a new run from checkpoint-N."
        )
    theirs = facts.settings
    method = theirs.get("method")
    if method != settings["method"]:
        raise CheckpointError(
            f"the checkpoint was written with outer.method={method}, this run has {settings['method']}. Resume with the method "
            "that wrote it, or start a new run from its global model (checkpoint-N)."
        )
    names = theirs.keys() | settings.keys()
    changed = {name for name in names if value_in(theirs, name) != value_in(settings, name)}
    for name in sorted(changed):
        logger.warning(
            "outer.%s was %r when the checkpoint was written and is %r now: the run continues with the new value, and "
            "differs from the run that was stopped.",
            *(name, value_in(theirs, name), value_in(settings, name)),
        )
    for sentence in refuse_another_run(facts.model, facts.facts, about, allowed):
        logger.warning(sentence)
    local_weights.check(model, saved.weights, saved.synchronized)
    if is_new:
        logger.info(
            "region %d begins with the global params, outer state and inner optimizer of region %d, with its own random numbers "
            "and without residuals.",
            *(link.region, facts.region),
        )
        return
    if len(facts.members) != link.num_regions:
        logger.warning(
            "resuming %d regions as %d: unsent steps and residuals of regions that were lost or left are lost. If regions.count "
            "has changed, the data is divided again, and in this epoch some samples are seen twice and some not at all.",
            *(len(facts.members), link.num_regions),
        )
    if facts.taken_over:
        logger.warning(
            "region %d had no checkpoint of step %d: it continues with the global params, outer state and inner optimizer of "
            "region %d, with its own random numbers and without residuals.",
            *(link.region, facts.step, facts.region),
        )
