"""What the regions of a Trainer agree on before step 1: the length of the run, and when they save and evaluate."""

import math
import secrets
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length

from ..links.base import Link
from ..run.starting import NEVER, UNKNOWN, Beginning, Habits, agree_on_start, check_same_habits

_NOTHING: Mapping[int, Any] = MappingProxyType({})


def agree_on_length(
    link: Link, max_steps: int, is_fixed: bool, told: Mapping[int, Beginning] = _NOTHING
) -> Beginning:
    """The inner steps that all regions make, and a number for the run. A collective call.

    Args:
        link: reaches the other regions.
        max_steps: inner steps that this region would make.
        is_fixed: whether its learning rate schedule is made already.
        told: for a newcomer, what a member has told it of the run.

    Raises:
        HandshakeError: the schedule of a region is made already, and too long.
    """
    return agree_on_start(link, Beginning(max_steps, is_fixed, secrets.randbits(48)), told)


def check_habits(
    link: Link,
    args: TrainingArguments,
    state: TrainerState,
    loader: Any,
    averages: bool,
    told: Mapping[int, Habits] = _NOTHING,
) -> Habits:
    """Check that all regions save, and evaluate if need be, at the same inner steps; returns when. A collective call.

    Args:
        link: reaches the other regions.
        args: of this region's Trainer.
        state: of the Trainer.
        loader: of the training data.
        averages: whether an evaluation while training shows the mean of the regions' own global weights.
        told: for a newcomer, what a member has told it of the run.

    Raises:
        HandshakeError: two regions differ.
    """
    own = Habits(
        saves=interval(args.save_strategy, state.save_steps, args, loader, state.max_steps),
        evaluates=interval(args.eval_strategy, state.eval_steps, args, loader, state.max_steps),
        eval_delay=args.eval_delay,
        eval_on_start=args.eval_on_start,
        averages=averages,
        metric=zlib.crc32(f"{metric_of(args)} {args.greater_is_better}".encode()) if metric_of(args) else 0,
        load_best_model_at_end=args.load_best_model_at_end,
        saves_best=args.save_strategy == SaveStrategy.BEST,
    )
    check_same_habits(link, own, told)
    return own


def metric_of(args: TrainingArguments) -> str | None:
    """The metric by which Trainer decides, under the name that an evaluation gives it; None if there is none."""
    name = args.metric_for_best_model
    if name is None or args.eval_strategy == IntervalStrategy.NO:
        return None
    return name if name.startswith("eval_") else f"eval_{name}"


def interval(strategy: str, steps: int, args: TrainingArguments, loader: Any, max_steps: int) -> int:
    """Inner steps between two saves, or two evaluations, of Trainer; NEVER or UNKNOWN."""
    if strategy == IntervalStrategy.NO:
        return NEVER
    if strategy == IntervalStrategy.STEPS:
        return min(int(steps), max_steps)
    if strategy != IntervalStrategy.EPOCH or not has_length(loader):
        return UNKNOWN
    return min(max(math.ceil(len(loader) / args.gradient_accumulation_steps), 1), max_steps)
