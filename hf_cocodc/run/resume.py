"""Regions agree on the checkpoint to resume from, and check that this run may continue from it."""

import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn

from ..errors import CheckpointError
from ..links.base import Link
from ..links.spreading import gather
from ..resolve import value_in
from . import checkpoint as disk
from . import local_weights, manifest, numbering
from .about import About, refuse_another_run
from .checkpoint import Saved
from .newest import newest_common
from .pointers import is_pointer, point
from .shelf import Shelf, main_says
from .take_over import take_over

logger = logging.getLogger(__name__)


class Writer(NamedTuple):
    """Region that wrote the checkpoint that a region resumes from; -1 if it was taken over."""

    region: int


class CanResume(NamedTuple):
    """Whether a region can resume from the checkpoint whose path it was given: 1 if it can, else 0."""

    is_good: int


class Start(NamedTuple):
    """Where this region starts.

    Attributes:
        checkpoint: to resume from; None to start from step 0.
        run: number of the run that is resumed, or that starts once more; 0 to begin a new run.
        skipped: sentences about newer checkpoints that cannot be used; only on the main process.
    """

    checkpoint: Path | None
    run: int = 0
    skipped: Sequence[str] = ()


def checkpoint_to_resume(link: Link, accelerator: Accelerator, folder: Path, wanted: Any) -> Start:
    """The checkpoint that this region resumes from. Every byte of it has been compared with what was saved. A collective call.

    Args:
        link: reaches the other regions.
        accelerator: of this region.
        folder: of this region's checkpoints.
        wanted: False or None; True for the newest checkpoint that all regions have; or a path (see `wish_of`).

    Raises:
        CheckpointError: the checkpoint is damaged, regions want what does not go together, or the disk refuses.
    """
    own = main_says(
        link, accelerator, lambda: wish_of(wanted, folder), "what to begin from", lambda told: Wish(*told)
    )
    wish = common_wish(link, own)
    if not wish.resumes:
        return Start(None)
    if not wish.is_exact:
        start = agree(link, accelerator, folder, wish.step or None)
    else:
        path = of_path(link, accelerator, of_region(Path(wanted), link.region))
        start = Start(path, manifest.read(path).run)
    if start.checkpoint is None:
        return start
    logger.info("region %d resumes from %s", link.region, start.checkpoint)
    return start


def agree(link: Link, accelerator: Accelerator, folder: Path, bound: int | None = None) -> Start:
    """The checkpoint under `folder`, of step `bound` at most, that this region resumes from. A collective call.

    A region that lacks the checkpoint that all agree on takes over another region's.

    Raises:
        CheckpointError: all checkpoints are damaged, or the disk refuses.
    """
    shelf = Shelf(folder, link, accelerator)
    choice = newest_common(link, shelf, bound)
    if not choice.step:
        if not choice.run:
            logger.warning(
                "no region has a complete checkpoint (%s in this one): starting from step 0.", folder
            )
        return Start(None, choice.run, shelf.skipped)
    checkpoint = folder / f"{disk.PREFIX}{choice.step}"
    if len(choice.holders) < link.num_regions:
        link.lead(
            lambda leader: take_over(leader, checkpoint, choice.holders, choice.run),
            "another region's checkpoint",
        )
    return Start(checkpoint, choice.run, shelf.skipped)


def of_path(link: Link, accelerator: Accelerator, checkpoint: Path) -> Path:
    """The checkpoint at the path that this region was given, once it is known to be good in every region. A collective call.

    Raises:
        CheckpointError: it is not; the message names the newest that is good in every region.
    """
    wrong = main_says(link, accelerator, lambda: disk.damage(checkpoint), f"the check of {checkpoint}")
    verdicts = gather(link, CanResume(wrong is None), "the checkpoint to resume from")
    bad = [region for region, verdict in verdicts.items() if not verdict.is_good]
    if not bad:
        return checkpoint
    choice = newest_common(link, Shelf(checkpoint.parent, link, accelerator, beside=checkpoint))
    way_out = "No checkpoint of its run is good in every region"
    if len(choice.holders) == link.num_regions:
        way_out = f"The newest of its run that is good in every region is {disk.PREFIX}{choice.step}: give its path instead"
    if wrong is not None:
        raise CheckpointError(f"{checkpoint} cannot be resumed from: {wrong}. {way_out}.")
    raise CheckpointError(
        f"region {bad[0]} cannot resume from its {checkpoint.name}; its own message says why. {way_out}."
    )


def of_region(checkpoint: Path, region: int) -> Path:
    """This region's own checkpoint, where `checkpoint` may be another region's: a script has one path for all regions."""
    home = checkpoint.parent
    own = home.with_name(f"region-{region}") / checkpoint.name
    return own if re.fullmatch(r"region-\d+", home.name) and own.is_dir() else checkpoint


def settle_in(folder: Path, run: int, start: Start, step: int, region: int) -> None:
    """From now on `folder` holds this run, up to `step`. Later checkpoints of the run no longer count.

    Checkpoints of another run stay, and `save_total_limit` does not count them.

    Args:
        folder: of this region's checkpoints.
        run: number of the run, if it is new.
        start: where this region starts.
        step: its inner step.
        region: this region.

    Raises:
        CheckpointError: the disk refuses.
    """
    numbering.begin_run(folder, start.run or run, unsaved=start.checkpoint is None)
    for later, path in disk.checkpoints(folder).items():
        if later > step and disk.unusable(path, hashes=False) is None:
            logger.warning(
                "region %d: checkpoint-%d is given up, because all regions continue from step %d and may reach other numbers.",
                *(region, later, step),
            )
            (path / manifest.COMPLETE).unlink()
    point(folder)
    earlier = [path.name for path in disk.checkpoints(folder).values() if disk.is_of_another_run(path)]
    if earlier:
        logger.warning("region %d: %s of an earlier run stay in %s.", region, ", ".join(earlier), folder)


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
        saved: our part of the checkpoint.
        settings: of the method.
        link: of this region.
        about: the rest of this training.
        allowed: regions.may_differ.
        model: unwrapped; it holds the weights that were saved with the checkpoint.
        is_new: the checkpoint is the base of a newcomer, which comes into a run that trains.

    Raises:
        CheckpointError: the checkpoint is of another method, model or training, is used by two regions, or is of a region with
            another number of lanes; or the model holds other weights.
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
    local_weights.check(model, saved.weights, saved.synchronised)
    if is_new:
        logger.info(
            "region %d begins with the global params, outer state and inner optimizer of region %d, with its own random numbers "
            "and without residuals.",
            *(link.region, facts.region),
        )
        return
    if facts.num_regions != link.num_regions:
        logger.warning(
            "resuming %d regions as %d: the data is divided again, and in this epoch some samples are seen twice and some not at "
            "all. Unsent steps and residuals of regions that left are lost.",
            *(facts.num_regions, link.num_regions),
        )
    if facts.taken_over:
        logger.warning(
            "region %d had no checkpoint of step %d: it continues with the global params, outer state and inner optimizer of "
            "region %d, with its own random numbers and without residuals.",
            *(link.region, facts.step, facts.region),
        )


class Wish(NamedTuple):
    """What a region is asked to begin from.

    Attributes:
        resumes: whether it is to resume.
        is_exact: whether it was given the path of the checkpoint; else the newest is meant that all regions have.
        step: of the checkpoint at this path; of others, the newest step that counts. 0 if nothing was said.
        has_some: whether its folder has complete checkpoints of the run that wrote there last.
        is_there: whether this region sees a checkpoint of this step, complete or not.
    """

    resumes: bool
    is_exact: bool
    step: int
    has_some: bool
    is_there: bool


def wish_of(wanted: Any, folder: Path) -> Wish:
    """The wish that Trainer's `resume_from_checkpoint` stands for.

    `output_dir/checkpoint-N`, which `get_last_checkpoint(output_dir)` returns, means the newest that all regions have, up to
    step N: another region may not have saved step N when the run ended.

    Args:
        wanted: False or None, True, or a path.
        folder: of this region's checkpoints.
    """
    has_some = any(disk.unusable(path, hashes=False) is None for path in disk.checkpoints(folder).values())
    if not wanted or wanted is True:
        return Wish(bool(wanted), False, 0, has_some, False)
    path = Path(wanted)
    step = path.name.removeprefix(disk.PREFIX)
    is_there = path.is_dir() or (folder / path.name).is_dir()
    return Wish(True, not is_pointer(path, folder), int(step) if step.isdigit() else 0, has_some, is_there)


def common_wish(link: Link, own: Wish) -> Wish:
    """What all regions do. A collective call.

    If only some are to resume, a region that is not, and has no checkpoint, resumes as well: it is new, or has lost its disk.

    Raises:
        CheckpointError: regions are asked for things that do not go together, or for a checkpoint that no region has.
    """
    wishes = gather(link, own, "what to begin from")
    resuming = [region for region, wish in wishes.items() if wish.resumes]
    if not resuming:
        return own
    way_out = (
        "Give every region the same step, or let regions find the newest checkpoint that all of them have: "
        "resume_from_checkpoint=True, or get_last_checkpoint(output_dir) with the output_dir of the script, not the region's."
    )
    first = wishes[resuming[0]]
    for region, wish in wishes.items():
        exact = wish.is_exact or first.is_exact
        if exact and (wish.resumes, wish.is_exact, wish.step) != (first.resumes, first.is_exact, first.step):
            raise CheckpointError(
                f"region {resuming[0]} is to {_in_words(first)}, region {region} is to {_in_words(wish)}. {way_out}"
            )
        if not wish.resumes and wish.has_some:
            raise CheckpointError(
                f"region {resuming[0]} is to {_in_words(first)}, region {region} is to {_in_words(wish)} though it has "
                f"checkpoints. {way_out} For a new run use another folder."
            )
    seen = {wish.step for wish in wishes.values() if wish.is_there}
    for region, wish in wishes.items():
        if wish.step and not wish.is_exact and wish.step not in seen:
            raise CheckpointError(
                f"region {region} is to resume from {disk.PREFIX}{wish.step}, which no region has. Name one that is there, or "
                "let regions find the newest checkpoint that all of them have: resume_from_checkpoint=True, or --resume."
            )
    if not own.resumes:
        logger.warning(
            "region %d was to begin from step 0, and region %d is to resume: all resume.",
            *(link.region, resuming[0]),
        )
    bounds = [wish.step for wish in wishes.values() if wish.step]
    return own._replace(resumes=True, is_exact=first.is_exact, step=min(bounds, default=0))


def _in_words(wish: Wish) -> str:
    if not wish.resumes:
        return "begin from step 0"
    if wish.is_exact:
        return f"resume from the checkpoint at a path ({disk.PREFIX}{wish.step})"
    return "resume from the newest checkpoint that all regions have" + (
        f", up to step {wish.step}" if wish.step else ""
    )
