"""Which checkpoint a run resumes from, as regions agree on it."""

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
from ..links.trailer import Trailer
from ..parts.codecs.base import State
from . import checkpoint as state
from .take_over import JOINING, take_over


def newest_common(link: Link, own: Sequence[int], run: int, num_writers: int) -> tuple[int, list[int], int]:
    """The step to resume from, the regions that hold a complete checkpoint of it, and its run; step 0 where there is none.

    The newest step that is complete in every region that has any; where no step is, the newest of all: who lacks it
    takes it from another region. Regions go on with the run that most of them have checkpoints of; those of another run
    (a folder that was used before) count as having none, and so do those of a region that had left when the newest were
    written. A collective call.

    Args:
        link: reaches the other regions.
        own: steps of this region's complete checkpoints.
        run: number of the run that wrote them.
        num_writers: regions that took part when the newest of them was written.
    """
    trailers = link.gather(
        Trailer(inner_step=max(own, default=0), digest=run), "the newest complete checkpoint"
    )
    runs = Counter(trailer.digest for trailer in trailers if trailer.inner_step)
    if not runs:
        return 0, [], 0
    [(chosen, _)] = runs.most_common(1)  # of equally many that of the first region
    if own and run != chosen:
        logger.warning("region %d holds checkpoints of another run: they are not used.", link.region)
    own = own if run == chosen else ()
    steps = [int(trailer.inner_step) if trailer.digest == chosen else 0 for trailer in trailers]
    newest = max(steps)
    writers = link.gather(Trailer(inner_step=num_writers), "who wrote the newest complete checkpoint")
    count = int(writers[steps.index(newest)].inner_step)
    # one that joined after them has taken them over
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
        trailers = link.gather(Trailer(inner_step=proposal), "the newest complete checkpoint")
        steps = [int(trailer.inner_step) for trailer in trailers]
        if steps.count(0) > first.count(0):  # one that had some has none so old
            steps = [step if step == max(first) else 0 for step in first]
    return max(steps), [region for region, step in enumerate(steps) if step], int(chosen)


logger = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A checkpoint's part that is ours, as read."""

    state: State
    facts: dict[str, Any]


def agree(link: Link, accelerator: Accelerator, folder: Path) -> Path | None:
    """The checkpoint under `folder` that this region resumes from; None where no region has any. A collective call.

    It is the newest one that is complete in every region. A region that has none takes over another's.

    Raises:
        CheckpointError: the disk refuses.
    """
    own: list[int] = []
    num_writers = 0
    if accelerator.is_main_process:
        for step, path in state.checkpoints(folder).items():
            wrong = state.unusable(path)
            if wrong is None:
                own.append(step)
            else:
                logger.warning("region %d: %s is not used: %s.", link.region, path, wrong)
        num_writers = state.num_writers(folder / f"{state.PREFIX}{own[-1]}") if own else 0
    run = state.run_of(folder)
    if accelerator.num_processes > 1:
        own, run, num_writers = broadcast_object_list([own, run, num_writers])
    step, holders, chosen = newest_common(link, own, run, num_writers)
    if not step:
        return None
    checkpoint = folder / f"{state.PREFIX}{step}"
    if len(holders) < link.num_regions:
        if accelerator.is_main_process or link.num_lanes == 1:  # of several lanes one is enough
            take_over(link, accelerator.is_main_process, checkpoint, holders, chosen)
        accelerator.wait_for_everyone()
    return checkpoint


def of_region(checkpoint: Path, region: int) -> Path:
    """This region's own checkpoint where `checkpoint` may be the one of another: a script has one path for all regions."""
    home = checkpoint.parent
    own = home.with_name(f"region-{region}") / checkpoint.name
    return own if re.fullmatch(r"region-\d+", home.name) and own.is_dir() else checkpoint


def give_up_later(folder: Path, step: int, region: int) -> None:
    """A run goes on from `step`: its later checkpoints in `folder` are no longer gone on from.

    Those of another run stay: its folder may have been given by mistake.
    """
    for later, path in state.checkpoints(folder).items():
        if later > step and state.unusable(path) is None:
            logger.warning(
                "region %d: checkpoint-%d is given up, for all regions go on from step %d, and may come by other numbers.",
                *(region, later, step),
            )
            (path / state.COMPLETE).unlink()


def check(saved: Saved, settings: dict[str, Any], link: Link) -> None:
    """Compare the run that a checkpoint was written by with this one; what cannot be exact is said. A collective call.

    Raises:
        CheckpointError: it is of another method, another region's too, or of regions with another number of lanes.
    """
    facts = saved.facts
    writer = -1 if facts.get(JOINING) else facts["region"]
    writers = [
        trailer.inner_step for trailer in link.gather(Trailer(inner_step=writer), "who wrote the checkpoints")
    ]
    # regions may have been numbered anew, but two that go on from one's local weights and random numbers train the same
    if writer not in (-1, link.region) and writers.count(writer) > 1:
        raise CheckpointError(
            f"the checkpoint is region {facts['region']}'s, and this is region {link.region}. Give every region its own, or let "
            "them find it: trainer.train(resume_from_checkpoint=True), or hf-cocodc train RECIPE --resume."
        )
    if facts["num_lanes"] != link.num_lanes:
        raise CheckpointError(
            f"the checkpoint was written by a region of {facts['num_lanes']} lane(s), this region has {link.num_lanes}. Launch "
            "it with as many ranks and the same sharding, or start anew from checkpoint-N/global."
        )
    theirs = facts["settings"]
    if theirs["method"] != settings["method"]:
        raise CheckpointError(
            f"the checkpoint was written by outer.method={theirs['method']}, this run has {settings['method']}. Resume with "
            "the method that wrote it, or start anew from its global model (checkpoint-N/global)."
        )
    changed = {name for name in theirs.keys() | settings.keys() if theirs.get(name) != settings.get(name)}
    for name in sorted(changed):
        logger.warning(
            "outer.%s was %r when the checkpoint was written and is %r now: the run goes on with the new value, and is not "
            "the one that was stopped.",
            *(name, theirs.get(name), settings.get(name)),
        )
    if facts["num_regions"] != link.num_regions:
        logger.warning(
            "resuming %d regions as %d: the data is shared out anew, so that some of it is seen twice and some not in this "
            "epoch; steps and residuals of regions that are gone are lost.",
            *(facts["num_regions"], link.num_regions),
        )
    if facts.get(JOINING):
        logger.warning(
            "region %d had no checkpoint of step %d: it goes on with the global params, outer state and inner optimizer of "
            "region %d, with random numbers and no residuals of its own.",
            *(link.region, facts["step"], facts["region"]),
        )
