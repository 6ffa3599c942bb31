"""What the regions of a Trainer agree on before step 1: the length of the run, and when they save and evaluate."""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import torch
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length

from ..errors import CheckpointError, InputError
from ..link.base import Link
from ..run.newcomer import get_base, joins
from ..run.outer_optimizer import OuterOptimizer
from ..run.starting import NEVER, UNKNOWN, Beginning, Habits, check_same_habits
from ..snapshot.donor import Inner
from ..snapshot.folders import PREFIX
from ..snapshot.receive import Received

T = TypeVar("T")


def refuse_epochs(args: TrainingArguments) -> None:
    """Raise InputError if a Trainer saves or evaluates at ends of epochs: a region that comes back counts no whole epochs."""
    for name, strategy in (("save_strategy", args.save_strategy), ("eval_strategy", args.eval_strategy)):
        if strategy in (IntervalStrategy.EPOCH, SaveStrategy.EPOCH):
            steps = name.replace("strategy", "steps")
            raise InputError(
                f"training.{name}=epoch with regions.on_loss=continue: a region that comes back in the middle of an epoch would "
                f"end it at another inner step than the others. Set {name}=steps and {steps}."
            )


def base_for(link: Link, trainer: Trainer) -> Received | None:
    """The base that a newcomer begins from; None for other regions. Raises LinkError if no member gives one."""
    if link.is_elastic:
        refuse_epochs(trainer.args)
    if not joins(link, trainer.accelerator):
        return None
    return get_base(link, trainer.accelerator, Path(trainer.args.output_dir or "."))


def take_part(trainer: Trainer, outer: OuterOptimizer, agreed: Beginning, habits: Habits) -> None:
    """Let newcomers begin as this Trainer would, and let it go along when its region jumps to another inner step."""
    outer.inner = lambda: _inner_of(trainer)
    outer.has_jumped = lambda before, after: jump(trainer, before, after)
    outer.takes_over = lambda base: take_best(trainer, base)
    outer.started = {"run": agreed.run, "Beginning": list(agreed), "Habits": list(habits)}


def take_best(trainer: Trainer, base: Path) -> None:
    """Take over the best model so far from the region that wrote a base: this one has missed evaluations."""
    state, theirs = trainer.state, TrainerState.load_from_json(str(base / "trainer_state.json"))
    state.best_metric, state.best_global_step = theirs.best_metric, theirs.best_global_step
    step, folder = theirs.best_global_step, Path(trainer.args.output_dir or ".")
    state.best_model_checkpoint = str(folder / f"{PREFIX}{step}") if step else None


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


def jump(trainer: Trainer, before: int, after: int) -> None:
    """Let a Trainer's count of steps and its learning rate jump to a later inner step; its data goes on where it is."""
    control = trainer.control
    go_along(trainer, after)
    control.should_save = control.should_evaluate = control.should_log = False  # the others did it then
    schedule = trainer.lr_scheduler
    if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) and not _waits_for_metrics(schedule):
        for _ in range(after - before):
            schedule.step()


def go_along(trainer: Trainer, step: int) -> None:
    """Let a Trainer's count of steps go along to a later inner step that was not trained."""
    skipped = step - trainer.state.global_step
    trainer.state.global_step = step
    # Trainer divides sums of losses by the steps since these two: only trained ones count
    trainer._initial_global_step += skipped
    trainer._globalstep_last_logged += skipped


def _waits_for_metrics(schedule: Any) -> bool:
    """Whether Trainer steps a schedule only after evaluations."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) or (
        type(schedule).__name__ == "GreedyLR"
    )


def _inner_of(trainer: Trainer) -> Inner:
    states = {
        "optimizer.pt": trainer.optimizer.state_dict(),
        "scheduler.pt": trainer.lr_scheduler.state_dict(),
    }
    scaler = trainer.accelerator.scaler
    if scaler is not None:
        states["scaler.pt"] = scaler.state_dict()
    return Inner(states, lambda folder: _save_state(trainer, folder))


def _save_state(trainer: Trainer, folder: Path) -> None:
    """Write Trainer's state as it does in a checkpoint."""
    state = trainer.state
    for each in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(each, ExportableState) and not isinstance(
            state.stateful_callbacks.get(type(each).__name__), list
        ):
            state.stateful_callbacks[type(each).__name__] = each.state()
    state.save_to_json(str(folder / "trainer_state.json"))


_NOTHING: Mapping[int, Any] = MappingProxyType({})


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
