"""Finding the Trainer that a callback was given to, and checking that it can be trained across regions."""

import math
import sys
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy, IntervalStrategy, has_length

from ..errors import InputError
from ..run.checkpoint import EXPORT


def find_trainer() -> Trainer | None:
    """The Trainer whose method is calling us: Trainer hands callbacks everything but itself.

    Looks up the call stack for the innermost frame whose `self` is a Trainer (or a subclass).
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def refuse(trainer: Trainer) -> None:
    """Check that a Trainer can be trained across regions.

    Raises:
        InputError: it cannot; the message says what to change.
    """
    args = trainer.args
    if EXPORT in getattr(trainer.model, "peft_config", {}):
        raise InputError(
            f"the adapter {EXPORT!r} has the name of the folder in which checkpoints keep the global model. Give it another one."
        )
    if args.auto_find_batch_size:
        raise InputError(
            "auto_find_batch_size=True restarts training in one region without the others. Set it to False and choose "
            "per_device_train_batch_size."
        )
    if args.load_best_model_at_end:
        raise InputError(
            "load_best_model_at_end=True would load each region's own best local weights, so regions would end with "
            "different models. Set it to False; the model ends with the global weights."
        )
    if args.push_to_hub and args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        raise InputError(
            f"hub_strategy={args.hub_strategy.value} would push region 0's checkpoint, from which no run across regions can be "
            "resumed. Use every_save or end, which push the global weights."
        )
    if args.deepspeed:
        raise InputError(
            "DeepSpeed inside a region is not supported. Use DDP (accelerate launch --multi_gpu)."
        )


def interval(strategy: str, steps: int, args: TrainingArguments, loader: Any, max_steps: int) -> int:
    """Inner steps between two times that Trainer saves or evaluates; 0 where it does not, or where that is not known."""
    if strategy == IntervalStrategy.STEPS:
        return min(int(steps), max_steps)
    if strategy != IntervalStrategy.EPOCH or not has_length(loader):
        return 0
    return min(max(math.ceil(len(loader) / args.gradient_accumulation_steps), 1), max_steps)
