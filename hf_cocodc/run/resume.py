"""Regions agree on the checkpoint to resume from, and check that this run may continue from it."""

import logging
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn

from ..errors import CheckpointError
from ..links.base import Link
from ..resolve import value_in
from . import checkpoint as disk
from . import local_weights, manifest, numbering
from .about import About, refuse_another_run
from .checkpoint import Saved
from .shelf import Shelf, main_says
from .take_over import take_over

logger = logging.getLogger(__name__)


class Holding(NamedTuple):
    """What a region holds on its disk.

    Attributes:
        newest: step of its newest good checkpoint; 0 if it has none.
        run: number of the run that wrote it.
        num_writers: regions that took part when it was written.
        num_damaged: newer checkpoints that have changed since they were saved, or are of another run (`Shelf.num_damaged`).
        stopping: whether all regions stopped at the newest one, at a step at which no checkpoint was due.
        is_unsaved: whether the run began here from step 0, and was ended before it had a complete checkpoint here.
    """

    newest: int
    run: int
    num_writers: int
    num_damaged: int
    stopping: bool
    is_unsaved: bool


class Proposal(NamedTuple):
    """Step of a checkpoint to resume from; 0 if the region has none to propose."""

    step: int


class Writer(NamedTuple):
    """Region that wrote the checkpoint that a region resumes from; -1 if it was taken over."""

    region: int


class Choice(NamedTuple):
    """The checkpoint that all regions resume from.

    Attributes:
        step: its step; 0 to start from step 0.
        holders: regions that have it, undamaged.
        run: number of the run that wrote it, or that starts once more; 0 to begin a new run.
    """

    step: int
    holders: Sequence[int]
    run: int


class Verdict(NamedTuple):
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


def newest_common(link: Link, shelf: Shelf) -> Choice:
    """The newest checkpoint that is good in every region that has any. A collective call.

    If there is none, the newest of all is used, and regions without it take it over. If checkpoints are of different runs,
    regions continue the run that most of them have. Two kinds of checkpoints do not count: those of another run (the folder
    was used before), and those of a region that had left before the newest ones were written.

    A run may have been killed when some regions had their first checkpoint and others did not. All regions then start once
    more from step 0: this is exact, and a take-over is not. If all regions had stopped there, they may have made many more
    steps than between two checkpoints: then nobody starts once more.

    Args:
        link: reaches the other regions.
        shelf: this region's checkpoints.

    Raises:
        CheckpointError: regions have only checkpoints that are damaged or of another run.
    """
    own = shelf.newest()
    holding = Holding(own.step, shelf.run, own.num_writers, shelf.num_damaged, own.stopping, shelf.is_unsaved)
    holdings = link.gather(holding, "the newest good checkpoint")
    runs = Counter(holding.run for holding in holdings if holding.newest)
    if not runs:
        damaged = [region for region, holding in enumerate(holdings) if holding.num_damaged]
        if damaged:
            raise CheckpointError(
                f"no region has a checkpoint to resume from: all of region {damaged[0]} are damaged or of another run. "
                + " ".join(shelf.skipped)
                + " Restore one of them, give its path, or start a new run in another folder, without --resume "
                "(resume_from_checkpoint)."
            )
        return Choice(0, [], 0)
    [(chosen, _)] = runs.most_common(1)  # in a tie, the first region's
    counts = own.step > 0
    if counts and shelf.run != chosen:
        logger.warning("region %d holds checkpoints of another run: they are not used.", link.region)
        counts = False
    steps = [holding.newest if holding.run == chosen else 0 for holding in holdings]
    newest = max(steps)
    first_holder = holdings[steps.index(newest)]
    unsaved = [r for r, other in enumerate(holdings) if other.run == chosen and other.is_unsaved]
    if unsaved and not first_holder.stopping:
        logger.warning(
            "region %d was ended before its first checkpoint of the run was complete: all regions start once more from step 0. "
            "This is exact, and to go on without the steps of region %d is not.",
            *(unsaved[0], unsaved[0]),
        )
        return Choice(0, [], chosen)
    count = first_holder.num_writers
    # a region that joined later has the newest one only if it took it over
    first = [step if region < count or step == newest else 0 for region, step in enumerate(steps)]
    if counts and not first[link.region]:
        logger.warning(
            "region %d was not there when the checkpoints of step %d were written: its own are not used.",
            *(link.region, newest),
        )
        counts = False
    steps = first
    while len(set(steps) - {0}) > 1:
        bound = min(step for step in steps if step)
        proposal = shelf.newest(bound).step if counts else 0
        steps = [other.step for other in link.gather(Proposal(proposal), "an older good checkpoint")]
        if steps.count(0) > first.count(0):  # a region that has checkpoints has none this old
            steps = [step if step == max(first) else 0 for step in first]
    return Choice(max(steps), [region for region, step in enumerate(steps) if step], chosen)


def checkpoint_to_resume(link: Link, accelerator: Accelerator, folder: Path, wanted: Any) -> Start:
    """The checkpoint that this region resumes from. Every byte of it has been compared with what was saved.

    Args:
        link: reaches the other regions.
        accelerator: of this region.
        folder: of this region's checkpoints.
        wanted: False or None; True for the newest checkpoint that all regions have; or a path. Except for False and None, a
            collective call.

    Raises:
        CheckpointError: the checkpoint is damaged, or the disk refuses.
    """
    if not wanted:
        return Start(None)
    if wanted is True:
        start = agree(link, accelerator, folder)
    else:
        path = of_path(link, accelerator, of_region(Path(wanted), link.region))
        start = Start(path, manifest.read(path).run)
    if start.checkpoint is None:
        return start
    logger.info("region %d resumes from %s", link.region, start.checkpoint)
    if not manifest.read(start.checkpoint).is_hashed:
        logger.warning(
            "an older version of hf_cocodc wrote %s: only sizes of Trainer's files can be compared, not their content.",
            start.checkpoint,
        )
    return start


def agree(link: Link, accelerator: Accelerator, folder: Path) -> Start:
    """The checkpoint under `folder` that this region resumes from. A collective call.

    A region that lacks the checkpoint that all agree on takes over another region's.

    Raises:
        CheckpointError: all checkpoints are damaged, or the disk refuses.
    """
    shelf = Shelf(folder, link, accelerator)
    choice = newest_common(link, shelf)
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
    verdicts = link.gather(Verdict(wrong is None), "the checkpoint to resume from")
    bad = [region for region, verdict in enumerate(verdicts) if not verdict.is_good]
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
) -> None:
    """Compare the run that wrote a checkpoint with this one; warn if this run cannot be exact. A collective call.

    Args:
        saved: our part of the checkpoint.
        settings: of the method.
        link: of this region.
        about: the rest of this training.
        allowed: regions.may_differ.
        model: unwrapped; it holds the weights that were saved with the checkpoint.

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
    if theirs["method"] != settings["method"]:
        raise CheckpointError(
            f"the checkpoint was written with outer.method={theirs['method']}, this run has {settings['method']}. Resume with "
            "the method that wrote it, or start a new run from its global model (checkpoint-N)."
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
    local_weights.check(model, saved.weights)
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
