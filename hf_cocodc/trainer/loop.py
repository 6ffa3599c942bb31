"""What a Trainer does where its run asks for it: for newcomers, and when its region comes in or back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

from ..engine.balance import Batch
from ..run.loop import Loop, save_shards
from ..snapshot.donor import Inner
from ..snapshot.folders import PREFIX
from .beginning import Beginning, metric_of, started
from .feed import Feed


class TrainerLoop(Loop):
    """A Trainer's loop. `stand_in` is called without arguments."""

    def __init__(
        self,
        trainer: Trainer,
        agreed: Beginning,
        stand_in: Callable[[], None],
        feed: Feed | None = None,
    ) -> None:
        self._trainer, self._feed = trainer, feed
        self.stand_in = stand_in  # type: ignore[method-assign]
        self.started = started(agreed)
        self.keeps_link = metric_of(trainer.args) is not None

    @property
    def batch(self) -> Batch:
        args = self._trainer.args
        unit = args.train_batch_size * args.world_size
        return Batch(unit * args.gradient_accumulation_steps, unit)

    def deal(self, micro_batches: int) -> None:
        assert self._feed is not None
        self._feed.micro_batches = micro_batches

    def inner(self) -> Inner:
        trainer = self._trainer
        states = {"scheduler.pt": trainer.lr_scheduler.state_dict()}
        if not trainer.is_fsdp_enabled:
            states["optimizer.pt"] = trainer.optimizer.state_dict()
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            states["scaler.pt"] = scaler.state_dict()
        return Inner(states, self._save_rest)

    def jump(self, before: int, after: int, is_new: bool) -> None:
        """Let the count of steps and the learning rate jump to a later inner step; the data goes on where it is."""
        trainer, control = self._trainer, self._trainer.control
        go_along(trainer, after)
        control.should_save = control.should_evaluate = control.should_log = False  # the others did it then
        schedule = trainer.lr_scheduler
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) and not waits_for_metrics(schedule):
            for _ in range(after - before):
                schedule.step()

    def take_over(self, base: Path) -> None:
        """Take over from the region that wrote a base what follows from evaluations, of which this one has missed some."""
        state, theirs = self._trainer.state, TrainerState.load_from_json(str(base / "trainer_state.json"))
        state.best_metric, state.best_global_step = theirs.best_metric, theirs.best_global_step
        step, folder = theirs.best_global_step, Path(self._trainer.args.output_dir or ".")
        state.best_model_checkpoint = str(folder / f"{PREFIX}{step}") if step else None
        state.stateful_callbacks = theirs.stateful_callbacks
        restore_callbacks(self._trainer)
        schedule = self._trainer.lr_scheduler
        if waits_for_metrics(schedule):
            schedule.load_state_dict(torch.load(base / "scheduler.pt", map_location="cpu", weights_only=True))
            for group, rate in zip(self._trainer.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    def save_model(self, folder: Path, model: nn.Module) -> None:
        self._trainer.save_model(str(folder), _internal_call=True)

    def _save_rest(self, folder: Path) -> None:
        trainer = self._trainer
        save_shards(trainer.accelerator, [trainer.optimizer], [trainer.model], folder)
        if not trainer.accelerator.is_main_process:
            return
        state = trainer.state  # written as Trainer does in a checkpoint
        for each in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(each, ExportableState) and not isinstance(
                state.stateful_callbacks.get(type(each).__name__), list
            ):
                state.stateful_callbacks[type(each).__name__] = each.state()
        state.save_to_json(str(folder / "trainer_state.json"))


def restore_callbacks(trainer: Trainer) -> None:
    """Give callbacks back what a checkpoint holds of them, for example the patience of early stopping: a run that goes on from
    there ends where it would have ended. Trainer's own setting for this puts others in their place.
    """
    if trainer.args.restore_callback_states_from_checkpoint:
        return
    for name, saved in trainer.state.stateful_callbacks.items():
        alike = [each for each in trainer.callback_handler.callbacks if type(each).__name__ == name]
        for callback, state in zip(alike, saved if isinstance(saved, list) else [saved], strict=False):
            own = callback.state()["attributes"] if isinstance(callback, ExportableState) else {}
            for attribute in own.keys() & state.get("attributes", {}).keys():
                setattr(callback, attribute, state["attributes"][attribute])


def go_along(trainer: Trainer, step: int) -> None:
    """Let a Trainer's count of steps go along to a later inner step that was not trained."""
    skipped = step - trainer.state.global_step
    trainer.state.global_step = step
    # Trainer divides sums of losses by the steps since these two: only trained ones count
    trainer._initial_global_step += skipped
    trainer._globalstep_last_logged += skipped


def waits_for_metrics(schedule: Any) -> bool:
    """Whether Trainer steps a schedule only after evaluations."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) or (
        type(schedule).__name__ == "GreedyLR"
    )
