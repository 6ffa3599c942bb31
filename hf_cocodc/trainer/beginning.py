"""What the regions of a Trainer agree on before step 1: the length of the run, and when they save and evaluate."""

import logging
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length

from ..errors import CheckpointError, HandshakeError
from ..link.base import Link
from ..link.spreading import gather
from ..run.resuming import get_base, joins
from ..snapshot.receive import Received

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOTHING: Mapping[int, Any] = MappingProxyType({})
NEVER, UNKNOWN = 0, -1


class Beginning(NamedTuple):
    """What a region begins with: inner steps that it would make, and a number for the run, of which the lowest region's counts
    for all.
    """

    max_steps: int
    run: int


class Habits(NamedTuple):
    """When a region saves and evaluates. What is not named here is Trainer's setting.

    Attributes:
        saves: inner steps between two checkpoints; NEVER, or UNKNOWN after epochs of unknown length.
        evaluates: inner steps between two evaluations; as `saves`.
        averages: whether it evaluates the mean of the regions' own global weights (eager updates).
        metric: checksum of the metric by which Trainer decides, and of which values are better; 0 if there is none.
        saves_best: whether it saves where an evaluation was the best.
    """

    saves: int
    evaluates: int
    eval_delay: float
    eval_on_start: bool
    averages: bool
    metric: int
    load_best_model_at_end: bool
    saves_best: bool


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
    if max_steps < own.max_steps:
        logger.warning(
            "region %d would make %d inner steps, another region %d: all make %d.",
            *(link.region, own.max_steps, max_steps, max_steps),
        )
    return Beginning(max_steps, by_region[min(by_region)].run)


def check_same_habits(link: Link, own: Habits, before: Mapping[int, Habits] = _NOTHING) -> None:
    """Check that all regions save at the same inner steps, and evaluate if they need each other for it. A collective call.

    `before` is what a member tells a newcomer, by region. Raises HandshakeError if two regions differ.
    """
    by_region = {**before, **gather(link, own, "when a region saves and evaluates")}
    _check_same_interval({r: habits.saves for r, habits in by_region.items()}, "saves", "save")
    if len(by_region) == 1 or not any(habits.averages or habits.metric for habits in by_region.values()):
        return
    _check_same(
        "load_best_model_at_end", {r: habits.load_best_model_at_end for r, habits in by_region.items()}
    )
    _check_same("save_strategy=best", {r: habits.saves_best for r, habits in by_region.items()})
    if any(habits.averages for habits in by_region.values()):
        uses = {r: "global" if habits.averages else "local" for r, habits in by_region.items()}
        _check_same("evaluate_on", uses)
    lowest = min(by_region)
    other = next((r for r, habits in by_region.items() if habits.metric != by_region[lowest].metric), None)
    if other is not None:
        raise HandshakeError(
            f"region {lowest} and region {other} have different metrics to decide by. Give eval_strategy, "
            "metric_for_best_model and greater_is_better the same values in every region."
        )
    evaluates = {r: habits.evaluates for r, habits in by_region.items()}
    unknown = next((r for r, steps in evaluates.items() if steps == UNKNOWN), None)
    if unknown is not None:
        raise HandshakeError(
            f"region {unknown} evaluates after epochs of unknown length, but all regions must do it together. "
            "Set eval_strategy=steps, and the same eval_steps in every region."
        )
    _check_same_interval(evaluates, "evaluates", "eval")
    _check_same("eval_on_start", {r: habits.eval_on_start for r, habits in by_region.items()})
    if any(evaluates.values()):
        _check_same("eval_delay", {r: f"{habits.eval_delay:g}" for r, habits in by_region.items()})


def _check_same(setting: str, values: Mapping[int, Any]) -> None:
    """Raises HandshakeError if the regions' values of a setting differ."""
    lowest = min(values)
    for region, value in values.items():
        if value != values[lowest]:
            raise HandshakeError(
                f"{setting}={values[lowest]} in region {lowest}, but {value} in region {region}: all regions must evaluate "
                "together. Give it the same value in every region."
            )


def _check_same_interval(by_region: Mapping[int, int], verb: str, setting: str) -> None:
    """Raises HandshakeError if intervals differ. `setting` is the prefix of Trainer's settings: "save" or "eval"."""
    known = {region: steps for region, steps in by_region.items() if steps != UNKNOWN}
    for region, steps in known.items():
        first = min(known)
        if steps == known[first]:
            continue
        way_out = f"Give {setting}_strategy and {setting}_steps the same values in every region."
        if NEVER not in known.values():
            way_out = (
                f"If the interval is an epoch, their shards differ in length: set {setting}_strategy=steps and "
                f"{setting}_steps={min(known.values())} in every region."
            )
        often = [f"every {each}" if each else "never" for each in (known[first], steps)]
        unit = " inner steps" if known[first] else ""
        raise HandshakeError(
            f"region {first} {verb} {often[0]}{unit}, region {region} {often[1]}, but all regions must do it together. {way_out}"
        )


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


def told(received: Received | None, kind: type[T]) -> Mapping[int, T]:
    """For a newcomer, what the regions of a run have agreed on before step 1; nothing for others. Raises CheckpointError if its
    base has something else there.
    """
    if received is None or kind.__name__ not in received.started:
        return {}
    try:
        return {received.donor: msgspec.convert(received.started[kind.__name__], kind)}
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"region {received.donor} sends a base without what the regions agreed on before step 1 ({kind.__name__}: {error}). "
            "Do all regions have the same version of hf_cocodc?"
        ) from error


def check_habits(
    link: Link,
    args: TrainingArguments,
    state: TrainerState,
    loader: Any,
    averages: bool,
    known: Mapping[int, Habits] = _NOTHING,
) -> Habits:
    """Check that all regions save, and evaluate if need be, at the same inner steps; returns when. A collective call.

    `averages`: an evaluation while training shows the mean of the regions' own global weights. `known`: what a member has
    told a newcomer. Raises HandshakeError if two regions differ.
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
    check_same_habits(link, own, known)
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
