"""What the regions of a Trainer agree on before step 1: the length of the run; and what they do at the same inner steps."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..errors import CheckpointError, HandshakeError, InputError
from ..link.base import Link
from ..link.spreading import gather
from ..run.about import jsonable
from ..run.resuming import get_base, joins
from ..snapshot.receive import Received

logger = logging.getLogger(__name__)

_KEY = "Beginning"

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Beginning(NamedTuple):
    """What a region begins with.

    Attributes:
        max_steps: inner steps that it would make.
        run: a number for the run, of which the lowest region's counts for all.
        epoch: inner steps of an epoch, if regions do something together at its end; else 0.
    """

    max_steps: int
    run: int
    epoch: int = 0


def agree_on_start(link: Link, own: Beginning, before: Mapping[int, Beginning] = _NOTHING) -> Beginning:
    """The smallest `max_steps` of all regions, and the lowest region's number for the run. A collective call.

    Shards of different lengths make epochs of different lengths. `before` is what a member tells a newcomer, by region: the run
    keeps its length and its number. Raises HandshakeError if a newcomer cannot make as many steps.
    """
    for member, agreed in before.items():
        if own.max_steps < agreed.max_steps:
            raise HandshakeError(
                f"region {link.region} would make {own.max_steps} inner steps, but the run that it joins makes "
                f"{agreed.max_steps} (region {member} says so). Give it as much data, or the same max_steps."
            )
        own = own._replace(run=agreed.run)
    by_region = {**before, **gather(link, own, "the number of inner steps")}
    max_steps = min(other.max_steps for other in by_region.values())
    epochs = {region: min(other.epoch, max_steps) for region, other in by_region.items() if other.epoch}
    if len({*epochs.values()}) > 1:
        lengths = ", ".join(f"{steps} in region {region}" for region, steps in epochs.items())
        raise HandshakeError(
            f"an epoch has other lengths in different regions (inner steps: {lengths}), and all must save, and evaluate, at the "
            f"same ones. Set save_strategy=steps and save_steps={min(epochs.values())} (eval_strategy and eval_steps) in every "
            "region."
        )
    if max_steps < own.max_steps:
        logger.warning(
            "region %d would make %d inner steps, another region %d: all make %d.",
            *(link.region, own.max_steps, max_steps, max_steps),
        )
    return Beginning(max_steps, by_region[min(by_region)].run)


def why_fixed(args: TrainingArguments) -> str:
    """Why a Trainer's run cannot go on without a lost region, in a sentence: it saves or evaluates at ends of epochs, and a
    region that comes back counts no whole epochs. Empty if it can.
    """
    for name, strategy in (("save_strategy", args.save_strategy), ("eval_strategy", args.eval_strategy)):
        if strategy in (IntervalStrategy.EPOCH, SaveStrategy.EPOCH):
            steps = name.replace("strategy", "steps")
            return (
                f"training.{name}=epoch, and a region that comes back in the middle of an epoch would end it at another inner "
                f"step than the others. Set {name}=steps and {steps}."
            )
    return ""


def base_for(link: Link, trainer: Trainer) -> Received | None:
    """The base that a newcomer begins from; None for other regions. Raises LinkError if no member gives one."""
    if not joins(link, trainer.accelerator):
        return None
    return get_base(link, trainer.accelerator, Path(trainer.args.output_dir or "."))


def told(received: Received | None) -> Mapping[int, Beginning]:
    """For a newcomer, what the regions of a run have agreed on before step 1; nothing for others. Raises CheckpointError if its
    base has something else there.
    """
    if received is None or _KEY not in received.started:
        return {}
    try:
        return {received.donor: msgspec.convert(received.started[_KEY], Beginning)}
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"region {received.donor} sends a base without what the regions agreed on before step 1 ({error}). Do all regions "
            "have the same version of hf_cocodc?"
        ) from error


def started(agreed: Beginning) -> dict[str, Any]:
    """What `told` makes of a base, as JSON can express it."""
    return {"run": agreed.run, _KEY: list(agreed)}


def done_together(args: TrainingArguments, evaluates_on: str, is_eager: bool) -> dict[str, Any]:
    """What must be equal in all regions because they do it at the same inner steps: by names in a recipe. They save together, and
    evaluate together if they decide by a metric, or show the mean of their global weights.

    `is_eager`: regions have global weights of their own (eager updates).
    """
    names = ["save_strategy", *(["save_steps"] if args.save_strategy == SaveStrategy.STEPS else [])]
    if evaluate_together(args, evaluates_on, is_eager):
        names += ["eval_strategy", *(["eval_steps"] if args.eval_strategy == IntervalStrategy.STEPS else [])]
        names += ["eval_on_start", "eval_delay", "load_best_model_at_end", "greater_is_better"]
    return {
        **({"evaluation.on": evaluates_on} if is_eager else {}),
        "training.metric_for_best_model": metric_of(args),
        **{f"training.{name}": jsonable(getattr(args, name)) for name in names},
    }


def evaluate_together(args: TrainingArguments, evaluates_on: str, is_eager: bool) -> bool:
    """Whether an evaluation while training needs all regions; see `done_together`."""
    return metric_of(args) is not None or (is_eager and evaluates_on == "global")


def epoch_steps(args: TrainingArguments, num_batches: int | None) -> int:
    """Inner steps of an epoch of so many batches of a rank; 0 if their number is unknown."""
    return 0 if num_batches is None else max(math.ceil(num_batches / args.gradient_accumulation_steps), 1)


def common_epoch(args: TrainingArguments, num_batches: int | None, together: bool) -> int:
    """See `Beginning.epoch`; `together`: see `evaluate_together`. Raises InputError if regions would have to evaluate together at
    ends of epochs that nobody knows.
    """
    evaluates = together and args.eval_strategy == IntervalStrategy.EPOCH
    if evaluates and num_batches is None:
        raise InputError(
            "eval_strategy=epoch: epochs of this data have no known length, and all regions must evaluate together. Set "
            "eval_strategy=steps, and the same eval_steps in every region."
        )
    return epoch_steps(args, num_batches) if evaluates or args.save_strategy == SaveStrategy.EPOCH else 0


def metric_of(args: TrainingArguments) -> str | None:
    """The metric by which Trainer decides, under the name that an evaluation gives it; None if there is none."""
    name = args.metric_for_best_model
    if name is None or args.eval_strategy == IntervalStrategy.NO:
        return None
    return name if name.startswith("eval_") else f"eval_{name}"
