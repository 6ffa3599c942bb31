"""Regions find the newest checkpoint that all of them can resume from."""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import NamedTuple

from ..errors import CheckpointError
from ..links.base import Link
from ..links.spreading import gather
from .shelf import Shelf

logger = logging.getLogger(__name__)

_BITS = 52
"""Regions that a number on the link can name, one by a bit. Those beyond count as if they had taken part."""


class Holding(NamedTuple):
    """What a region holds on its disk.

    Attributes:
        newest: step of its newest good checkpoint; 0 if it has none.
        run: number of the run that wrote it.
        writers: regions that took part when it was written: bit r is region r.
        num_damaged: newer checkpoints that have changed since they were saved, or are of another run (`Shelf.num_damaged`).
        stopping: whether all regions stopped at the newest one, at a step at which no checkpoint was due.
        is_unsaved: whether the run began here from step 0, and was ended before it had a complete checkpoint here.
    """

    newest: int
    run: int
    writers: int
    num_damaged: int
    stopping: bool
    is_unsaved: bool


class Proposal(NamedTuple):
    """Step of a checkpoint to resume from; 0 if the region has none to propose."""

    step: int


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


def newest_common(link: Link, shelf: Shelf, bound: int | None = None) -> Choice:
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
        bound: newest step that counts; equal in all regions.

    Raises:
        CheckpointError: regions have only checkpoints that are damaged or of another run.
    """
    own = shelf.newest(bound)
    writers = sum(1 << region for region in own.writers if region < _BITS)
    holding = Holding(own.step, shelf.run, writers, shelf.num_damaged, own.stopping, shelf.is_unsaved)
    holdings = gather(link, holding, "the newest good checkpoint")
    runs = Counter(holding.run for holding in holdings.values() if holding.newest)
    if not runs:
        damaged = [region for region, holding in holdings.items() if holding.num_damaged]
        if damaged:
            raise CheckpointError(
                f"no region has a checkpoint to resume from: all of region {damaged[0]} are damaged or of another run. "
                + " ".join(shelf.skipped)
                + " Restore one of them, give its path, or start a new run in another folder, without --resume "
                "(resume_from_checkpoint)."
            )
        if bound is not None:
            raise CheckpointError(
                f"no region has a complete checkpoint of step {bound} or earlier. Give the path of another checkpoint, or "
                "start a new run: resume_from_checkpoint=None."
            )
        return Choice(0, [], 0)
    [(chosen, _)] = runs.most_common(1)  # in a tie, the first region's
    counts = own.step > 0
    if counts and shelf.run != chosen:
        logger.warning("region %d holds checkpoints of another run: they are not used.", link.region)
        counts = False
    steps = {r: holding.newest if holding.run == chosen else 0 for r, holding in holdings.items()}
    newest = max(steps.values())
    first_holder = next(holdings[r] for r, step in steps.items() if step == newest)
    unsaved = [r for r, other in holdings.items() if other.run == chosen and other.is_unsaved]
    if unsaved and not first_holder.stopping:
        logger.warning(
            "region %d was ended before its first checkpoint of the run was complete: all regions start once more from step 0. "
            "This is exact, and to go on without the steps of region %d is not.",
            *(unsaved[0], unsaved[0]),
        )
        return Choice(0, [], chosen)
    # one of them may have been lost between their saves: the others have gone on without it
    writers = reduce(and_, (holdings[r].writers for r, step in steps.items() if step == newest))
    # a region that joined later has the newest one only if it took it over
    first = {r: step if step == newest or r >= _BITS or writers >> r & 1 else 0 for r, step in steps.items()}
    if counts and not first[link.region]:
        logger.warning(
            "region %d was not there when the checkpoints of step %d were written: its own are not used.",
            *(link.region, newest),
        )
        counts = False
    steps = first
    while len(set(steps.values()) - {0}) > 1:
        oldest = min(step for step in steps.values() if step)
        proposal = shelf.newest(oldest).step if counts else 0
        told = gather(link, Proposal(proposal), "an older good checkpoint")
        steps = {r: other.step for r, other in told.items()}
        if any(first[r] and not step for r, step in steps.items()):  # it has checkpoints, but none this old
            newest = max(first.values())
            steps = {r: newest if first[r] == newest else 0 for r in steps}
    return Choice(max(steps.values()), [r for r, step in steps.items() if step], chosen)
