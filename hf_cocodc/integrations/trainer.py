"""Transformers' Trainer across regions: one callback.

A bare callback is told neither of evaluation nor of the log before they happen, and is handed no Trainer; so this one
finds its Trainer and wraps three methods of that instance. Everything else of Trainer stays as it is.
"""

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from ..config import OuterConfig, Recipe, RegionConfig
from ..errors import InputError
from ..links.base import Link
from ..methods import from_config
from .accelerate import OuterOptimizer

logger = logging.getLogger(__name__)


class CoCoDCCallback(TrainerCallback):
    """Trains a Trainer's model across regions.

    ::

        trainer = Trainer(model=model, args=args, train_dataset=region_shard(dataset),
                          callbacks=[CoCoDCCallback(OuterConfig(method="diloco", sync_interval=100))])
        trainer.train()                      # the model holds the global weights afterwards

    Each region writes under `{output_dir}/region-{r}`. `evaluate()` uses the global weights.

    Args:
        config: method and its settings.
        regions: which region this is; by default the environment says so.
        evaluate_on: "global" or "local": the weights that `trainer.evaluate()` uses while training.
        link: reaches the other regions; by default one is made from `regions`.

    Raises:
        InputError: settings that cannot work.
    """

    def __init__(
        self,
        config: OuterConfig | None = None,
        regions: RegionConfig | None = None,
        *,
        evaluate_on: str = "global",
        link: Link | None = None,
    ) -> None:
        self.config = config or OuterConfig()
        from_config(self.config)  # what cannot work is said here, not after the model has been loaded
        self.regions = None if link is not None else (regions or RegionConfig()).resolved()
        if link is not None:
            self.region, self.num_regions = link.region, link.num_regions
        else:
            assert (
                self.regions is not None
                and self.regions.region is not None
                and self.regions.count is not None
            )
            self.region, self.num_regions = self.regions.region, self.regions.count
        if evaluate_on not in ("global", "local"):
            raise InputError(f"evaluate_on={evaluate_on!r} must be global or local.")
        self.evaluate_on = evaluate_on
        self.outer: OuterOptimizer | None = None
        self._link = link
        self._trainer: Trainer | None = None
        self._started = 0.0

    @classmethod
    def from_recipe(cls, path: str | Path, overrides: tuple[str, ...] = ()) -> "CoCoDCCallback":
        """The callback that a recipe's outer, regions and evaluation sections describe."""
        recipe = Recipe.load(path, overrides)
        return cls(recipe.outer, recipe.regions, evaluate_on=recipe.evaluation.on)

    def attach(self, trainer: Trainer) -> "CoCoDCCallback":
        """Join `trainer`, adding this callback if it is not there; done by itself where Trainer was given the callback.

        Raises:
            InputError: the Trainer is set up in a way that cannot work across regions; the message says what to change.
        """
        if self._trainer is trainer:
            return self
        if self._trainer is not None:
            raise InputError(
                "this CoCoDCCallback already serves another Trainer. Make a new one for each Trainer."
            )
        _refuse(trainer.args)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        args = trainer.args
        args.output_dir = str(Path(args.output_dir or "trainer_output") / f"region-{self.region}")
        if self.region:  # one voice for all regions
            args.push_to_hub = False
            for tracker in get_reporting_integration_callbacks(args.report_to):
                trainer.remove_callback(tracker)
        for name, wrap in (("train", self._train), ("evaluate", self._evaluate), ("log", self._log)):
            setattr(
                trainer,
                name,
                functools.wraps(getattr(trainer, name))(functools.partial(wrap, getattr(trainer, name))),
            )
        return self

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = find_trainer()
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._trainer or find_trainer()
        if trainer is None:
            raise InputError(
                "CoCoDCCallback was added to a Trainer that it cannot find. Call callback.attach(trainer) before "
                "trainer.train()."
            )
        self.attach(trainer)
        if self.region:  # equal seeds would give every region the same dropout masks
            torch.manual_seed(args.seed + self.region)
        self.outer = OuterOptimizer(
            trainer.accelerator,
            kwargs["model"],
            kwargs["optimizer"],
            self.config,
            self.regions,
            max_steps=state.max_steps,
            journal=Path(args.output_dir) / "cocodc" / "journal.jsonl",
            link=self._link,
        )
        self._started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.outer is not None
        self.outer.step()
        if control.should_training_stop:
            self.outer.finish()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.outer is not None
        if control.should_training_stop:
            self.outer.finish()

    def _train(self, train: Callable, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            raise InputError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: checkpoints do not hold the outer optimizer's "
                "state yet, so a run across regions cannot be resumed. Start anew."
            )
        try:
            return train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if self.outer is not None:
                self.outer.close(f"{type(error).__name__} at step {self.outer.inner_step}: {error}")
            raise

    def _evaluate(self, evaluate: Callable, *args: Any, **kwargs: Any) -> dict[str, float]:
        outer, trainer = self.outer, self._trainer
        assert trainer is not None
        swap = outer is not None and trainer.is_in_train and self.evaluate_on == "global"
        with outer.global_weights() if swap and outer is not None else contextlib.nullcontext():
            metrics = evaluate(*args, **kwargs)
        if outer is not None:
            outer.journal.write("evaluate", step=trainer.state.global_step, **metrics)
        return metrics

    def _log(self, log: Callable, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        outer, trainer = self.outer, self._trainer
        if outer is not None and trainer is not None and "loss" in logs:
            outer.synchronizer.loss = float(logs["loss"])
            elapsed = max(time.perf_counter() - self._started, 1e-9)
            blocked = outer.synchronizer.totals.blocked_s
            logs = {
                **logs,
                **{f"outer/{name}": value for name, value in outer.report.items()},
                "outer/compute_utilization": 1 - blocked / elapsed,
            }
            outer.journal.write("log", step=trainer.state.global_step, **logs)
        log(logs, *args, **kwargs)


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


def _refuse(args: TrainingArguments) -> None:
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
    if args.deepspeed:
        raise InputError(
            "DeepSpeed inside a region is not supported. Use DDP (accelerate launch --multi_gpu)."
        )
