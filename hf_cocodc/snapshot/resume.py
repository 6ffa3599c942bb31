"""Regions choose the checkpoint that all of them resume from.

Each region says what it was asked for and which checkpoints it holds. `choose`, the same pure rule in all regions, picks one. The
files of that one are compared with its list, which costs a second per GB. Where it is damaged, all take it off the region's
holdings, and the rule is asked again.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from accelerate import Accelerator

from ..errors import CheckpointError, LinkError
from ..link.base import Link
from ..link.group import main_says
from ..link.spreading import gather, spread_all
from ..status import say
from ..validation import Count, Positive
from . import checkpoint as disk
from . import folders, manifest
from .files import take_over

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
"""Most bytes of what a region says about its checkpoints: many thousands of them."""


class CanResume(NamedTuple):
    """Whether a region can go on (1 or 0); `run` is the run of the checkpoint, where it was given by its path."""

    is_good: int
    run: int = 0


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint that a region can resume from, unless its files are damaged. `members` are the regions that took part."""

    step: Positive
    members: tuple[Count, ...]


class ResumeRequest(NamedTuple):
    """What a region is asked to begin from.

    Attributes:
        is_exact: whether it was given the path of a checkpoint; else the newest is meant that all regions have, also by a path
            in the folder that has the regions' folders.
        step: of the checkpoint that it was given; 0 if none was named.
        is_there: whether it sees a checkpoint of this step, complete or not.
        has_some: whether it is not to resume, although its folder has checkpoints.
    """

    resumes: bool
    is_exact: bool = False
    step: int = 0
    is_there: bool = False
    has_some: bool = False

    def __str__(self) -> str:
        if not self.resumes:
            return "begin from step 0"
        if self.is_exact:
            return f"resume from the checkpoint at a path ({folders.PREFIX}{self.step})"
        until = f", up to step {self.step}" if self.step else ""
        return f"resume from the newest checkpoint that all regions have{until}"


@dataclass(frozen=True)
class Holdings:
    """The checkpoints that a region has of a run, whose number is 0 if there is none; `num_unread` further ones were complete,
    and cannot be used: they have changed since, or are of another format.
    """

    run: Count = 0
    num_unread: Count = 0
    held: tuple[HeldCheckpoint, ...] = ()

    @property
    def newest(self) -> str:
        """The name of the newest checkpoint. Raises ValueError if there is none."""
        return f"{folders.PREFIX}{max(each.step for each in self.held)}"

    def without(self, step: int) -> "Holdings":
        """What is left where the checkpoint of this step is damaged."""
        held = tuple(each for each in self.held if each.step != step)
        return replace(self, num_unread=self.num_unread + 1, held=held)


class Choice(NamedTuple):
    """The checkpoint that all regions resume from; step 0 to start from step 0.

    Attributes:
        holders: regions that have it.
        run: number of the run that wrote it; 0 to begin a new run.
        absent: regions whose checkpoints do not count: they were not there when the newest one (of step `newest`) was written.
    """

    step: int = 0
    holders: Sequence[int] = ()
    run: int = 0
    absent: Sequence[int] = ()
    newest: int = 0


def choose(holdings: Mapping[int, Holdings]) -> Choice:
    """The newest checkpoint that every region has that has any.

    If there is none, regions take over the newest of all. If checkpoints are of different runs, regions continue the run that
    most of them have. Two kinds of checkpoints do not count: those of another run (the folder was used before), and those of a
    region that had left before the newest ones were written.

    >>> old, new = HeldCheckpoint(2, (0, 1)), HeldCheckpoint(4, (0, 1))
    >>> choose({0: Holdings(run=7, held=(old, new)), 1: Holdings(run=7, held=(old,))})[:3]
    (2, [0, 1], 7)
    """
    runs = Counter(each.run for each in holdings.values() if each.held)
    if not runs:
        return Choice()
    [(run, _)] = runs.most_common(1)  # in a tie, the first region's
    held = {region: {each.step: each for each in o.held if o.run == run} for region, o in holdings.items()}
    newest = max(step for steps in held.values() for step in steps)
    of_newest = {region: steps[newest] for region, steps in held.items() if newest in steps}
    # one of them may have been lost between their saves: the others have gone on without it
    writers = set.intersection(*(set(each.members) for each in of_newest.values()))
    # a region that joined later has the newest one only if it took it over
    counting = {r: s for r, s in held.items() if s and (r in of_newest or r in writers)}
    common = set.intersection(*map(set, counting.values()))
    step = max(common, default=newest)
    return Choice(
        step,
        [region for region, steps in counting.items() if step in steps],
        run,
        absent=[region for region, steps in held.items() if steps and region not in counting],
        newest=newest,
    )


def refuse_lost(holdings: Mapping[int, Holdings], left: Collection[int]) -> None:
    """Raise LinkError if regions were lost while all chose a checkpoint, and those that are `left` would begin earlier for that:
    what they train would overwrite what the lost ones hold.
    """
    choice = choose(holdings)
    rest = choose({region: each for region, each in holdings.items() if region in left})
    lost = [region for region in choice.holders if region not in left]
    if lost and (rest.run != choice.run or rest.step < choice.step):
        begin = f"{folders.PREFIX}{rest.step}" if rest.step else "step 0"
        raise LinkError(
            f"region {lost[0]}, which holds {folders.PREFIX}{choice.step} of the run, was lost before training began. The others "
            f"would begin from {begin}: nothing was trained or written. Start all regions again, with --resume."
        )


def refuse_rivals(holdings: Mapping[int, Holdings]) -> None:
    """Raise CheckpointError if as many regions hold checkpoints of one run as of another: none can be told to be the newer."""
    by_run: dict[int, list[int]] = {}
    for region, each in holdings.items():
        if each.held:
            by_run.setdefault(each.run, []).append(region)
    one, other = (sorted(by_run.values(), key=len, reverse=True) + [[], []])[:2]
    if one and len(one) == len(other):
        raise CheckpointError(
            f"the checkpoints of region {one[0]} (newest: {holdings[one[0]].newest}) and region {other[0]} (newest: "
            f"{holdings[other[0]].newest}) are of two runs in one folder, and as many regions have either. Move the checkpoints "
            "of the run that is not to go on to another folder, or give the path of a checkpoint (resume_from_checkpoint)."
        )


_FROM_THE_START = "no checkpoint is complete in every region: training starts from the beginning"


class Start(NamedTuple):
    """Where this region starts: from a checkpoint, or from step 0 without one.

    `run` is the number of the run that goes on, 0 to begin a new one; `skipped` tells of newer checkpoints that cannot be used.
    """

    checkpoint: Path | None
    run: int = 0
    skipped: Sequence[str] = ()


def checkpoint_to_resume(link: Link, accelerator: Accelerator, folder: Path, wanted: Any) -> Start:
    """The checkpoint that this region resumes from, compared in full with what was saved. A collective call.

    Args:
        wanted: what Trainer's `resume_from_checkpoint` says: False or None; True for the newest checkpoint that all regions
            have; or a path. `checkpoint-N` beside the regions' folders, where `get_last_checkpoint(output_dir)` finds it, means
            the newest that all regions have, up to step N: another region may not have saved step N when the run ended.

    Raises:
        CheckpointError: the checkpoint is damaged, regions want what does not go together, or the disk refuses.
        LinkError: a region was lost meanwhile that may hold later checkpoints than the others.
    """
    there = link.members
    asked = _asked_of_all(link, accelerator, folder, wanted)
    first = next((region for region, each in asked.items() if each.resumes), None)
    if first is None:
        return Start(None)
    _refuse_discord(asked, first)
    if not asked[link.region].resumes:
        logger.warning(
            "region %d was to begin from step 0, and region %d is to resume: all resume.", link.region, first
        )
    if asked[first].is_exact:
        start = _of_path(link, accelerator, _of_region(Path(wanted), link.region))
    else:
        bounds = [each.step for each in asked.values() if each.step]
        start = _of_all(link, accelerator, folder, min(bounds, default=None), there)
    return start


def _refuse_discord(asked: Mapping[int, ResumeRequest], first: int) -> None:
    """Raise CheckpointError if regions are asked for what does not go together, or for a checkpoint that no region has. Region
    `first` is to resume.

    If only some are to resume, a region that is not, and has no checkpoint, resumes as well: it is new, or has lost its disk.
    """
    wanted = asked[first]
    way_out = (
        "Give every region the same step, or let regions find the newest checkpoint that all of them have: "
        "resume_from_checkpoint=True, or get_last_checkpoint(output_dir) with the output_dir of the script, not the region's."
    )
    seen = {each.step for each in asked.values() if each.is_there}
    for region, each in asked.items():
        if (each.is_exact or wanted.is_exact) and each[:3] != wanted[:3]:
            raise CheckpointError(f"region {first} is to {wanted}, region {region} is to {each}. {way_out}")
        if each.has_some:
            raise CheckpointError(
                f"region {first} is to {wanted}, region {region} is to {each} though it has checkpoints. {way_out} For a new run "
                "use another folder."
            )
        if each.step and not each.is_exact and each.step not in seen:
            raise CheckpointError(
                f"region {region} is to resume from {folders.PREFIX}{each.step}, which no region has. Name one that is there, "
                "or let regions find the newest checkpoint that all of them have: resume_from_checkpoint=True, or --resume."
            )


def _asked_of_all(
    link: Link, accelerator: Accelerator, folder: Path, wanted: Any
) -> dict[int, ResumeRequest]:
    """What all regions are asked to begin from, by region."""

    def of_this() -> ResumeRequest:
        if not wanted:
            return ResumeRequest(False, has_some=bool(folders.usable(folder)))
        if wanted is True:
            return ResumeRequest(True)
        path, step = Path(wanted), folders.step_of(Path(wanted))
        is_there = path.is_dir() or (folder / path.name).is_dir()
        is_beside = path.absolute().parent.resolve() == folder.absolute().parent.resolve()
        if not step:
            return ResumeRequest(True, is_exact=True, is_there=is_there)
        is_link = is_beside and (manifest.is_sealed(path) or not path.is_dir())
        return ResumeRequest(True, not is_link, step, is_there)

    what = "what to begin from"
    own = main_says(link, accelerator, of_this, what, ResumeRequest)
    return gather(link, own, what)


def _of_region(checkpoint: Path, region: int) -> Path:
    """This region's own checkpoint, where `checkpoint` may be another region's: a script has one path for all regions."""
    home = checkpoint.parent
    own = home.with_name(f"region-{region}") / checkpoint.name
    return own if re.fullmatch(r"region-\d+", home.name) and own.is_dir() else checkpoint


def damage_here(link: Link, accelerator: Accelerator, checkpoint: Path) -> str | None:
    """What is wrong with this region's checkpoint, as `manifest.damage` finds it. A collective call of the region's ranks."""
    return main_says(link, accelerator, partial(manifest.damage, checkpoint), f"the check of {checkpoint}")


def _of_path(link: Link, accelerator: Accelerator, checkpoint: Path) -> Start:
    """The checkpoint at the path that this region was given. Raises CheckpointError unless it is good in every region."""
    wrong = damage_here(link, accelerator, checkpoint)
    own = CanResume(True, manifest.read(checkpoint).run) if wrong is None else CanResume(False)
    verdicts = gather(link, own, "the checkpoint to resume from")
    bad = [region for region, verdict in verdicts.items() if not verdict.is_good]
    first = min(verdicts)
    other = next((region for region, each in verdicts.items() if each.run != verdicts[first].run), None)
    if not bad and other is not None:
        raise CheckpointError(
            f"the checkpoints of region {first} and region {other} are of two different runs ({checkpoint} here). Give every "
            "region the path of its own checkpoint of one run."
        )
    if not bad:
        return Start(checkpoint, own.run)
    way_out = "Give the path of another one, or let regions find the newest that all of them have: resume_from_checkpoint=True"
    if wrong is not None:
        raise CheckpointError(f"{checkpoint} cannot be resumed from: {wrong}. {way_out}.")
    raise CheckpointError(
        f"region {bad[0]} cannot resume from its {checkpoint.name}; its own message says why. {way_out}."
    )


def _of_all(
    link: Link, accelerator: Accelerator, folder: Path, bound: int | None, there: Collection[int]
) -> Start:
    """The newest checkpoint of step `bound` at most, hashed where it is held; a region that lacks it takes over another region's.

    `there`: the regions that began to choose. Raises:
        CheckpointError: all are damaged, or of two runs; the number of the run cannot be read, or the disk refuses.
        LinkError: another region sends no list of checkpoints, or was lost and may hold later ones.
    """
    own, unused = main_says(
        link,
        accelerator,
        partial(_look, folder, bound),
        "the check of this region's checkpoints",
        tuple[Holdings, dict[int, str]],
    )
    holdings = _of_every_region(link, own)
    silent = [region for region in there if region not in holdings]
    if silent:
        raise LinkError(
            f"region {silent[0]} was lost before it said which checkpoints it holds. The newest of the run may be among them: "
            "nothing was trained or written. Start all regions again, with --resume."
        )
    choice, holdings = _choice_of_all(link, accelerator, folder, holdings, unused)
    refuse_rivals(holdings)
    checkpoint = folder / f"{folders.PREFIX}{choice.step}"
    skipped = [
        f"region {link.region}: {folder / f'{folders.PREFIX}{step}'} is not used: {wrong}."
        for step, wrong in sorted(unused.items(), reverse=True)
        if step > choice.step
    ]
    for sentence in skipped:
        logger.warning("%s", sentence)
    if not choice.step:
        _refuse_damaged(holdings, skipped, bound)
        logger.warning("no region has a complete checkpoint (%s in this one): starting from step 0.", folder)
        say(_FROM_THE_START, once=_FROM_THE_START)
        return Start(None, 0, skipped)
    own = holdings[link.region]
    if own.held and own.run != choice.run:
        logger.warning("region %d holds checkpoints of another run: they are not used.", link.region)
    elif link.region in choice.absent:
        logger.warning(
            "region %d was not there when the checkpoints of step %d were written: its own are not used.",
            *(link.region, choice.newest),
        )
    if len(choice.holders) < link.num_regions:
        link.lead(
            lambda leader: take_over(leader, checkpoint, choice.holders, choice.run),
            "another region's checkpoint",
        )
    return Start(checkpoint, choice.run, skipped)


def _choice_of_all(
    link: Link, accelerator: Accelerator, folder: Path, holdings: dict[int, Holdings], unused: dict[int, str]
) -> tuple[Choice, dict[int, Holdings]]:
    """The choice of all regions, hashed where it is held, and what they hold undamaged. What is found damaged in this region goes
    into `unused`. Raises LinkError like `refuse_lost`.
    """
    while (choice := choose(holdings)).step:
        checkpoint, wrong = folder / f"{folders.PREFIX}{choice.step}", None
        if link.region in choice.holders:
            wrong = damage_here(link, accelerator, checkpoint)
        verdicts = gather(link, CanResume(wrong is None), f"the check of {checkpoint.name}")
        bad = {region for region in choice.holders if region in verdicts and not verdicts[region].is_good}
        if not bad and verdicts.keys() == holdings.keys():
            break
        if wrong is not None:
            unused[choice.step] = wrong
        holdings = {
            region: each.without(choice.step) if region in bad else each for region, each in holdings.items()
        }
        refuse_lost(holdings, verdicts)
        holdings = {region: each for region, each in holdings.items() if region in verdicts}
    return choice, holdings


def _of_every_region(link: Link, own: Holdings) -> dict[int, Holdings]:
    texts = spread_all(link, msgspec.json.encode(own), "its checkpoints", _MOST_BYTES)
    link.count_broadcasts()  # they are not training's
    holdings = {}
    for region, text in texts.items():
        try:
            holdings[region] = msgspec.json.decode(text, type=Holdings)
        except (ValueError, RecursionError) as error:
            raise LinkError(
                f"region {region} sent no list of checkpoints ({error!r}). Start all regions with the same version."
            ) from error
    return holdings


def _look(folder: Path, bound: int | None) -> tuple[Holdings, dict[int, str]]:
    """What lies in a region's folder, with checkpoints of step `bound` at most; and why others cannot be used, by their steps.
    Raises CheckpointError if the number of the run cannot be read.
    """
    found, run = folders.checkpoints(folder), folders.run_of(folder)
    if not run:  # checkpoints were copied there alone
        runs = [manifest.read(path).run for path in found.values() if manifest.unreadable(path) is None]
        run = runs[-1] if runs else 0
    held: list[HeldCheckpoint] = []
    unused, num_unread = {}, 0
    for step, path in reversed(found.items()):
        if bound is not None and step > bound:
            continue
        wrong = folders.unusable(path, run)
        if wrong is None:
            try:
                held.append(HeldCheckpoint(step, disk.read(path, with_values=False).facts.members))
                continue
            except CheckpointError as error:
                wrong = str(error)
        num_unread += manifest.is_sealed(path) and not folders.is_of_another_run(path, run)
        unused[step] = wrong
    return Holdings(run, num_unread, tuple(held)), unused


def _refuse_damaged(holdings: Mapping[int, Holdings], skipped: Sequence[str], bound: int | None) -> None:
    """Raise CheckpointError if a run cannot just begin from step 0."""
    unread = " and ".join(f"region {region}" for region, each in holdings.items() if each.num_unread)
    if unread:
        raise CheckpointError(
            f"no region has a checkpoint to resume from: none of {unread} can be used. "
            + " ".join(skipped)
            + " Restore one of them, give the path of another, install the version that reads it, or start a new run in another "
            "folder, without --resume (resume_from_checkpoint)."
        )
    if bound is not None:
        raise CheckpointError(
            f"no region has a complete checkpoint of step {bound} or earlier. Give the path of another checkpoint, or "
            "start a new run: resume_from_checkpoint=None."
        )


def settle_in(folder: Path, run: int, start: Start, step: int, region: int) -> None:
    """From now on `folder` holds this run, up to `step`: its later checkpoints no longer count. Those of another run stay, and
    `save_total_limit` does not count them. Raises CheckpointError if the disk refuses.
    """
    run = start.run or run
    for later, path in folders.usable(folder, run).items():
        if later > step:
            logger.warning(
                "region %d: checkpoint-%d is given up, because all regions continue from step %d and may reach other numbers.",
                *(region, later, step),
            )
            (path / manifest.COMPLETE).unlink()
    folders.begin_run(folder, run)
    folders.point(folder)
    earlier = [path.name for path in folders.checkpoints(folder).values() if folders.is_of_another_run(path)]
    if earlier:
        remain = "remains" if len(earlier) == 1 else "remain"
        logger.warning(
            "region %d: %s of an earlier run %s in %s.", region, ", ".join(earlier), remain, folder
        )
