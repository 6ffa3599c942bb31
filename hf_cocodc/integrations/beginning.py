"""What the regions of a Trainer agree on before step 1: the length of the run, and when they save and evaluate."""

import logging
import math
import secrets
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, has_length

from ..links.base import Link
from ..run.starting import Beginning, Interval, agree_on_start, check_same_interval

logger = logging.getLogger(__name__)


def agree_on_beginning(
    link: Link, args: TrainingArguments, state: TrainerState, loader: Any, together: bool
) -> int:
    """Cut `state.max_steps` to what all regions can make, and check when they save and evaluate. A collective call.

    Args:
        link: reaches the other regions.
        args: of this region's Trainer.
        state: of the Trainer, with the number of steps that this region would make.
        loader: of the training data.
        together: whether an evaluation while training is a collective call of the regions.

    Returns:
        A number for the run.

    Raises:
        HandshakeError: regions save, or evaluate together, at different inner steps.
    """
    max_steps, run = agree_on_start(link, Beginning(state.max_steps, secrets.randbits(48)))
    often = interval(args.save_strategy, state.save_steps, args, loader, max_steps)
    check_same_interval(link, Interval(often), "saves", "save")
    if together:
        often = interval(args.eval_strategy, state.eval_steps, args, loader, max_steps)
        check_same_interval(link, Interval(often), "evaluates", "eval")
    if max_steps < state.max_steps:
        logger.warning(
            "region %d would make %d inner steps, another region %d: all make %d.",
            *(link.region, state.max_steps, max_steps, max_steps),
        )
        state.max_steps = max_steps
    return run


def interval(strategy: str, steps: int, args: TrainingArguments, loader: Any, max_steps: int) -> int:
    """Inner steps between two saves, or two evaluations, of Trainer; 0 if there are none, or if the number is unknown."""
    if strategy == IntervalStrategy.STEPS:
        return min(int(steps), max_steps)
    if strategy != IntervalStrategy.EPOCH or not has_length(loader):
        return 0
    return min(max(math.ceil(len(loader) / args.gradient_accumulation_steps), 1), max_steps)
