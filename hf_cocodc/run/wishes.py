"""What each region is asked to begin from, and what all of them do."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..links.base import Link
from ..links.spreading import gather
from . import checkpoint as disk
from .pointers import is_pointer

logger = logging.getLogger(__name__)


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
