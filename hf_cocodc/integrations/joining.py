"""A Trainer in a run whose regions come and go: what it gives to newcomers, and how it begins as one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..errors import InputError
from ..links.base import Link
from ..run.base import Received
from ..run.checkpoint import PREFIX
from ..run.donor import Inner
from ..run.joining import get_base, joins
from ..run.outer_optimizer import OuterOptimizer
from ..run.starting import Beginning, Habits


def refuse_epochs(args: TrainingArguments) -> None:
    """Check that a Trainer saves and evaluates at inner steps: a region that comes back counts no whole epochs.

    Raises:
        InputError: it does so at the ends of epochs.
    """
    for name, strategy in (("save_strategy", args.save_strategy), ("eval_strategy", args.eval_strategy)):
        if strategy in (IntervalStrategy.EPOCH, SaveStrategy.EPOCH):
            steps = name.replace("strategy", "steps")
            raise InputError(
                f"training.{name}=epoch with regions.on_loss=continue: a region that comes back in the middle of an epoch would "
                f"end it at another inner step than the others. Set {name}=steps and {steps}."
            )


def base_for(link: Link, trainer: Trainer) -> Received | None:
    """The base that a newcomer begins from; None for a region that has met the others at the start.

    Raises:
        LinkError: no member gives one.
    """
    if link.is_elastic:
        refuse_epochs(trainer.args)
    if not joins(link, trainer.accelerator):
        return None
    return get_base(link, trainer.accelerator, Path(trainer.args.output_dir or "."))


def take_part(trainer: Trainer, outer: OuterOptimizer, agreed: Beginning, habits: Habits) -> None:
    """Let newcomers begin as this Trainer would, and let it go along where its region has jumped to another inner step."""
    outer.inner = lambda: _inner_of(trainer)
    outer.has_jumped = lambda before, after: jump(trainer, before, after)
    outer.takes_over = lambda base: take_best(trainer, base)
    outer.started = {"run": agreed.run, "Beginning": list(agreed), "Habits": list(habits)}


def take_best(trainer: Trainer, base: Path) -> None:
    """Know the best model so far as the region knows it that wrote a base: this one has missed evaluations."""
    state, theirs = trainer.state, TrainerState.load_from_json(str(base / "trainer_state.json"))
    state.best_metric, state.best_global_step = theirs.best_metric, theirs.best_global_step
    step, folder = theirs.best_global_step, Path(trainer.args.output_dir or ".")
    state.best_model_checkpoint = str(folder / f"{PREFIX}{step}") if step else None


def told(received: Received | None, kind: Callable[..., Any]) -> Mapping[int, Any]:
    """What the regions of a run have agreed on before step 1, for a newcomer; nothing for others."""
    name = getattr(kind, "__name__", "")
    if received is None or name not in received.started:
        return {}
    return {received.donor: kind(*received.started[name])}


def jump(trainer: Trainer, before: int, after: int) -> None:
    """Let a Trainer's own count of steps, and its learning rate, go along from one inner step to a later one.

    The data goes on where this region is: what it would have read meanwhile is not read.
    """
    control = trainer.control
    go_along(trainer, after)
    control.should_save = control.should_evaluate = control.should_log = False  # the others did it then
    schedule = trainer.lr_scheduler
    if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) and not _waits_for_metrics(schedule):
        for _ in range(after - before):
            schedule.step()


def go_along(trainer: Trainer, step: int) -> None:
    """Let a Trainer's own count of steps go along to a later inner step that was not trained.

    Its losses are sums: it divides them by the steps since its last log, and since the beginning. Only trained ones count.
    """
    skipped = step - trainer.state.global_step
    trainer.state.global_step = step
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
