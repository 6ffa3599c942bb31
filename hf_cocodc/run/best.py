"""The best global weights of a run: chosen at an evaluation by all regions alike, kept in a checkpoint, shown at the end."""

import logging
import math
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator

from ..errors import CheckpointError, InputError, LinkError
from ..links.base import Link
from ..links.spreading import gather
from .checkpoint import PREFIX, damage
from .shelf import main_says
from .take_over import take_over

logger = logging.getLogger(__name__)


class Score(NamedTuple):
    """A region's metric at an evaluation.

    Attributes:
        inner_step: of the evaluation.
        has_evaluated: whether the region has evaluated; one that only keeps in step with the others has not.
        is_there: whether the evaluation has given the metric.
        value: the metric; NaN if there is none.
    """

    inner_step: int
    has_evaluated: bool
    is_there: bool
    value: float


class HeldBest(NamedTuple):
    """The best checkpoint that a region knows of: its step, 0 if there is none; and whether the region has it, undamaged."""

    step: int
    is_good: bool


def mean_score(link: Link, own: Score, name: str) -> float:
    """The mean of a metric over the regions that have evaluated; NaN if a region's is NaN, or none has. A collective call.

    Raises:
        InputError: the evaluation of a region has not given the metric.
        LinkError: regions evaluate at different inner steps.
    """
    told = gather(link, own, f"{name} at an evaluation")
    for region, other in told.items():
        if other.inner_step != own.inner_step:
            raise LinkError(
                f"regions are out of step: region {link.region} evaluates at step {own.inner_step}, region {region} at step "
                f"{other.inner_step}. Every region must evaluate at the same inner steps."
            )
        if other.has_evaluated and not other.is_there:
            raise InputError(
                f"the evaluation in region {region} has not given {name}, by which regions choose their best model. Let every "
                "region compute it, or change metric_for_best_model."
            )
        if other.is_there and math.isnan(other.value):
            logger.warning(
                "region %d: %s is NaN at step %d: this is not the best model.", region, name, own.inner_step
            )
    values = [other.value for other in told.values() if other.has_evaluated]
    if len(set(values)) == 1:
        return values[0]  # the mean could differ from it by rounding
    return math.fsum(values) / len(values) if values else math.nan


def bring(link: Link, accelerator: Accelerator, best: Path | None, run: int, may_copy: bool) -> Path | None:
    """See to it that all regions have the checkpoint of the best global weights so far. A collective call.

    Args:
        link: reaches the other regions.
        accelerator: of this region.
        best: where this region must have the checkpoint; None if no best one is known.
        run: number of the run.
        may_copy: whether the checkpoint of another region has the same global weights.

    Returns:
        `best`; None if no region has the checkpoint any more.

    Raises:
        CheckpointError: regions know of different ones; or a region lacks it, and no other region's can take its place.
    """
    wrong = None
    if best is not None:
        wrong = main_says(link, accelerator, lambda: damage(best), f"the check of {best}")
    step = 0 if best is None else int(best.name.removeprefix(PREFIX))
    told = gather(
        link, HeldBest(step, best is not None and wrong is None), "the checkpoint of the best model"
    )
    if len({other.step for other in told.values()}) > 1:
        steps = ", ".join(str(other.step) for other in told.values())
        raise CheckpointError(
            f"regions know of different best models so far (of steps {steps}; 0: of none, or load_best_model_at_end=False). Give "
            "load_best_model_at_end the same value in every region, set it to False in all, or resume from an older checkpoint."
        )
    holders = [region for region, other in told.items() if other.is_good]
    if best is None or not holders:
        if best is not None:
            logger.warning("no region has the best model so far any more (%s: %s).", best, wrong)
        return None
    if len(holders) < len(told):
        lacking = next(region for region, other in told.items() if not other.is_good)
        if not may_copy:
            raise CheckpointError(
                f"region {lacking} lacks {best.name}, the best model so far. With eager updates every region has its own global "
                "weights, and the best model is their mean. Restore it, or set load_best_model_at_end=False."
            )
        link.lead(lambda leader: take_over(leader, best, holders, run), "the checkpoint of the best model")
    return best
