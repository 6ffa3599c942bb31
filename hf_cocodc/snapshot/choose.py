"""Regions choose the checkpoint that all of them resume from."""

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accelerate import Accelerator

from ..errors import CheckpointError
from ..link.base import Link
from ..link.spreading import gather
from ..link.within import main_says
from . import checkpoint as disk
from . import folder as numbering
from . import manifest
from .files import take_over
from .folder import is_pointer, point

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Good(NamedTuple):
    """A checkpoint that a region can resume from.

    Attributes:
        step: its step; 0 if there is none.
        writers: regions that took part when it was written.
        stopping: whether all regions stopped there, at a step at which no checkpoint was due.
    """

    step: int
    writers: tuple[int, ...]
    stopping: bool


class Shelf:
    """The checkpoints of a region's run, newest first.

    Args:
        folder: of the region's checkpoints.
        link: of this region.
        accelerator: of this region.
        beside: a checkpoint in the folder: of its run; by default of the run that writes to the folder now, or of the newest
            checkpoint if the folder does not say, because a checkpoint was copied there.

    Attributes:
        run: number of the run.
        is_unsaved: whether the run began here from step 0, and was ended before it had a complete checkpoint here.
        skipped: one sentence for each checkpoint that was looked at and cannot be used; only on the main process.
        num_damaged: how many of them were saved to their end, and have changed since or are of another run. Those of another
            run do not count if `is_unsaved`: the run had none.

    All ranks of the region make the same calls in the same order; the main process looks at the disk.

    Raises:
        CheckpointError: the number of the run cannot be read.
    """

    def __init__(
        self, folder: Path, link: Link, accelerator: Accelerator, beside: Path | None = None
    ) -> None:
        self._accelerator, self._folder, self._link = accelerator, folder, link
        self._checked: dict[int, str | None] = {}
        self.skipped: list[str] = []
        self.num_damaged = 0
        self.run, self.is_unsaved = self._main_says(
            lambda: (_run(folder, beside), numbering.is_unsaved(folder))
        )

    def newest(self, bound: int | None = None) -> Good:
        """The newest good checkpoint, of step `bound` at most."""
        good, self.num_damaged = self._main_says(lambda: (self._newest(bound), self.num_damaged))
        step, writers, stopping = good
        return Good(step, tuple(writers), stopping)

    def _main_says(self, find: Callable[[], Value]) -> Value:
        return main_says(self._link, self._accelerator, find, "the check of this region's checkpoints")

    def _newest(self, bound: int | None) -> Good:
        for step, path in reversed(disk.checkpoints(self._folder).items()):
            if (bound is None or step <= bound) and self._is_good(step, path):
                facts = disk.facts_of(path)
                return Good(step, tuple(facts.writers), facts.stopping)
        return Good(0, (), False)

    def _is_good(self, step: int, path: Path) -> bool:
        if step not in self._checked:
            wrong = self._checked[step] = disk.unusable(path, self.run)
            if wrong is not None:
                another = disk.is_of_another_run(path, self.run) and self.is_unsaved
                self.num_damaged += manifest.is_sealed(path) and not another
                self.skipped.append(f"region {self._link.region}: {path} is not used: {wrong}.")
                logger.warning("%s", self.skipped[-1])
        return self._checked[step] is None


def _run(folder: Path, beside: Path | None) -> int:
    if beside is not None:
        with contextlib.suppress(ValueError):  # its list of files is missing or damaged
            return manifest.read(beside).run
    if (folder / numbering.RUN).exists():
        return numbering.run_of(folder)
    found = [
        path for path in disk.checkpoints(folder).values() if manifest.damage(path, hashes=False) is None
    ]
    return manifest.read(found[-1]).run if found else 0


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
