"""Regions agree on a run's length and intervals before step 1 of training."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..engine.memory import in_words
from ..engine.synchronizer import Synchronizer
from ..errors import HandshakeError
from ..links.base import Link
from .checkpoint import Saved
from .journal import Journal, Mark

logger = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """What a region begins with.

    Attributes:
        max_steps: inner steps that it would make.
        is_fixed: whether it has made its learning rate schedule over them already.
        run: a number for the run; region 0's counts for all.
    """

    max_steps: int
    is_fixed: bool
    run: int


class Interval(NamedTuple):
    """Inner steps between two saves, or two evaluations, of a region; 0 if there are none, or if the number is unknown."""

    inner_steps: int


def agree_on_start(link: Link, own: Beginning) -> Beginning:
    """The smallest `max_steps` of all regions, and region 0's number for the run. A collective call.

    Shards of different lengths make epochs of different lengths.

    Raises:
        HandshakeError: a region cannot make fewer steps any more.
    """
    told = link.gather(own, "the number of inner steps")
    max_steps = min(other.max_steps for other in told)
    for region, other in enumerate(told):
        if other.is_fixed and other.max_steps > max_steps:
            raise HandshakeError(
                f"region {region} would make {other.max_steps} inner steps, another region {max_steps}. Its learning rate "
                "schedule is longer, and made already: its Trainer was told of CoCoDCCallback too late. Give the callback to "
                "Trainer's constructor, or call callback.attach(trainer) before trainer.train()."
            )
    if max_steps < own.max_steps:
        logger.warning(
            "region %d would make %d inner steps, another region %d: all make %d.",
            *(link.region, own.max_steps, max_steps, max_steps),
        )
    return Beginning(max_steps, own.is_fixed, told[0].run)


def check_same_interval(link: Link, own: Interval, verb: str, setting: str) -> None:
    """Check that all regions save, or evaluate, at the same inner steps.

    Args:
        link: reaches the other regions.
        own: this region's interval.
        verb: what regions do: "saves" or "evaluates".
        setting: prefix of Trainer's settings: "save" or "eval".

    Raises:
        HandshakeError: two regions differ.
    """
    told = link.gather(own, f"how often a region {verb}")
    found = {region: other.inner_steps for region, other in enumerate(told) if other.inner_steps}
    for region, steps in found.items():
        first = min(found)
        if steps != found[first]:
            raise HandshakeError(
                f"region {first} {verb} every {found[first]} inner steps, region {region} every {steps}, but all regions "
                f"must do it together. If the interval is an epoch, their shards differ in length: set "
                f"{setting}_strategy=steps and {setting}_steps={min(found.values())} in every region."
            )


def mark_of(saved: Saved | None) -> Mark:
    """How far the journal belongs to the run that goes on from `saved`; nowhere if nothing goes on in this region."""
    if saved is None or saved.facts.taken_over:
        return Mark()
    return Mark(saved.facts.journal, saved.facts.journal_sha256, saved.facts.step)


def note_start(
    journal: Journal,
    synchronizer: Synchronizer,
    continues: bool,
    max_steps: int | None,
    settings: Mapping[str, Any],
) -> None:
    """Write into the journal what begins, or continues, and into the log what it keeps in memory."""
    journal.write(
        "resume" if continues else "start",
        step=synchronizer.inner_step,
        region=synchronizer.link.region,
        num_regions=synchronizer.link.num_regions,
        num_params=synchronizer.num_params,
        num_fragments=len(synchronizer.fragments),
        max_steps=max_steps,
        timing=synchronizer.link.timing,
        outer=settings,
    )
    for sentence in in_words(synchronizer.memory()):
        logger.info(sentence)
