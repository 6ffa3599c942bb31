"""Regions agree on the checkpoint to resume from, and check that this run may continue from it."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..errors import CheckpointError
from ..links.base import Link
from . import checkpoint as disk
from .checkpoint import Saved
from .take_over import take_over

logger = logging.getLogger(__name__)


class Holding(NamedTuple):
    """What a region holds on its disk.

    Attributes:
        newest: step of its newest complete checkpoint; 0 if it has none.
        run: number of the run that wrote it.
        num_writers: regions that took part when it was written.
    """

    newest: int
    run: int
    num_writers: int


class Proposal(NamedTuple):
    """Step of a checkpoint to resume from; 0 if the region has none to propose."""

    step: int


class Writer(NamedTuple):
    """Region that wrote the checkpoint that a region resumes from; -1 if it was taken over."""

    region: int


class Choice(NamedTuple):
    """The checkpoint that all regions resume from.

    Attributes:
        step: its step; 0 if there is no checkpoint.
        holders: regions that have it complete.
        run: number of the run that wrote it.
    """

    step: int
    holders: Sequence[int]
    run: int


def newest_common(link: Link, own: Sequence[int], run: int, num_writers: int) -> Choice:
    """The newest checkpoint that is complete in every region that has any. A collective call.

    If there is none, the newest of all is used, and regions without it take it over. If checkpoints are of different runs,
    regions continue the run that most of them have. Two kinds of checkpoints do not count: those of another run (the folder
    was used before), and those of a region that had left before the newest ones were written.

    Args:
        link: reaches the other regions.
        own: steps of this region's complete checkpoints.
        run: number of the run that wrote them.
        num_writers: regions that took part when the newest of them was written.
    """
    holdings = link.gather(Holding(max(own, default=0), run, num_writers), "the newest complete checkpoint")
    runs = Counter(holding.run for holding in holdings if holding.newest)
    if not runs:
        return Choice(0, [], 0)
    [(chosen, _)] = runs.most_common(1)  # in a tie, the first region's
    if own and run != chosen:
        logger.warning("region %d holds checkpoints of another run: they are not used.", link.region)
    own = own if run == chosen else ()
    steps = [holding.newest if holding.run == chosen else 0 for holding in holdings]
    newest = max(steps)
    count = holdings[steps.index(newest)].num_writers
    # a region that joined later has the newest one only if it took it over
    first = [step if region < count or step == newest else 0 for region, step in enumerate(steps)]
    if own and not first[link.region]:
        logger.warning(
            "region %d was not there when the checkpoints of step %d were written: its own are not used.",
            *(link.region, newest),
        )
        own = ()
    steps = first
    while len(set(steps) - {0}) > 1:
        bound = min(step for step in steps if step)
        proposal = max((step for step in own if step <= bound), default=0)
        steps = [other.step for other in link.gather(Proposal(proposal), "an older complete checkpoint")]
        if steps.count(0) > first.count(0):  # a region that has checkpoints has none this old
            steps = [step if step == max(first) else 0 for step in first]
    return Choice(max(steps), [region for region, step in enumerate(steps) if step], chosen)


def checkpoint_to_resume(link: Link, accelerator: Accelerator, folder: Path, wanted: Any) -> Path | None:
    """The checkpoint that this region resumes from; None to start from step 0.

    Args:
        link: reaches the other regions.
        accelerator: of this region.
        folder: of this region's checkpoints.
        wanted: False or None; True for the newest checkpoint that all regions have, a collective call; or a path.

    Raises:
        CheckpointError: the disk refuses.
    """
    if not wanted:
        return None
    path = agree(link, accelerator, folder) if wanted is True else of_region(Path(wanted), link.region)
    if path is None:
        logger.warning("no region has a complete checkpoint (%s in this one): starting from step 0.", folder)
    else:
        logger.info("region %d resumes from %s", link.region, path)
    return path


def agree(link: Link, accelerator: Accelerator, folder: Path) -> Path | None:
    """The checkpoint under `folder` that this region resumes from; None if no region has any. A collective call.

    A region that lacks the checkpoint that all agree on takes over another region's.

    Raises:
        CheckpointError: the disk refuses.
    """
    own: list[int] = []
    num_writers = 0
    if accelerator.is_main_process:
        for step, path in disk.checkpoints(folder).items():
            wrong = disk.unusable(path)
            if wrong is None:
                own.append(step)
            else:
                logger.warning("region %d: %s is not used: %s.", link.region, path, wrong)
        num_writers = disk.num_writers(folder / f"{disk.PREFIX}{own[-1]}") if own else 0
    run = disk.run_of(folder)
    if accelerator.num_processes > 1:
        own, run, num_writers = broadcast_object_list([own, run, num_writers])
    choice = newest_common(link, own, run, num_writers)
    if not choice.step:
        return None
    checkpoint = folder / f"{disk.PREFIX}{choice.step}"
    if len(choice.holders) < link.num_regions:
        if accelerator.is_main_process or link.num_lanes == 1:  # of several lanes one is enough
            take_over(link, accelerator.is_main_process, checkpoint, choice.holders, choice.run)
        accelerator.wait_for_everyone()
    return checkpoint


def of_region(checkpoint: Path, region: int) -> Path:
    """This region's own checkpoint, where `checkpoint` may be another region's: a script has one path for all regions."""
    home = checkpoint.parent
    own = home.with_name(f"region-{region}") / checkpoint.name
    return own if re.fullmatch(r"region-\d+", home.name) and own.is_dir() else checkpoint


def give_up_later(folder: Path, step: int, region: int) -> None:
    """The run continues from `step`: its later checkpoints in `folder` no longer count.

    Checkpoints of another run stay: the folder may have been given by mistake.
    """
    for later, path in disk.checkpoints(folder).items():
        if later > step and disk.unusable(path) is None:
            logger.warning(
                "region %d: checkpoint-%d is given up, because all regions continue from step %d and may reach other numbers.",
                *(region, later, step),
            )
            (path / disk.COMPLETE).unlink()


def check(saved: Saved, settings: dict[str, Any], link: Link) -> None:
    """Compare the run that wrote a checkpoint with this one; warn if this run cannot be exact. A collective call.

    Raises:
        CheckpointError: the checkpoint is of another method, is used by two regions, or is of a region with another number
            of lanes.
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
            "many ranks and the same sharding, or start a new run from checkpoint-N/global."
        )
    theirs = facts.settings
    if theirs["method"] != settings["method"]:
        raise CheckpointError(
            f"the checkpoint was written with outer.method={theirs['method']}, this run has {settings['method']}. Resume with "
            "the method that wrote it, or start a new run from its global model (checkpoint-N/global)."
        )
    changed = {name for name in theirs.keys() | settings.keys() if theirs.get(name) != settings.get(name)}
    for name in sorted(changed):
        logger.warning(
            "outer.%s was %r when the checkpoint was written and is %r now: the run continues with the new value, and "
            "differs from the run that was stopped.",
            *(name, theirs.get(name), settings.get(name)),
        )
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
