"""Transformers' Trainer across regions: one callback.

A bare callback is told neither of evaluation, of saving nor of the log before they happen, and is handed no Trainer; so
this one finds its Trainer and wraps some methods of that instance. Everything else of Trainer stays as it is.
"""

import contextlib
import functools
import logging
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import TrainOutput

from ..errors import InputError, LinkError, RunStopped
from ..links.base import Link
from ..links.trailer import Ending
from ..recipes.recipe import Recipe
from ..resolve import from_config
from ..run.checkpoint import EXPORT, PREFIX, begin_run, continue_run, read, remove, rotate
from ..run.connect import join, refuse_unsupported
from ..run.outer_optimizer import OuterOptimizer
from ..run.resume import Saved, agree, give_up_later, of_region
from ..run.starting import agree_on_start, check_same_interval
from ..settings import OuterConfig, RegionConfig
from . import card
from .attaching import find_trainer, interval, refuse
from .patches import export, has_finished
from .signals import first_signal

logger = logging.getLogger(__name__)


class CoCoDCCallback(TrainerCallback):
    """Trains a Trainer's model across regions.

    ::

        trainer = Trainer(model=model, args=args, train_dataset=region_shard(dataset),
                          callbacks=[CoCoDCCallback(OuterConfig(method="diloco", sync_interval=100))])
        trainer.train()                      # the model holds the global weights afterwards

    Each region writes under `{output_dir}/region-{r}`. `evaluate()`, `predict()` and `save_model()` use the global weights.
    `train(resume_from_checkpoint=True)` goes on from the newest checkpoint that is complete in every region, exactly.
    Ctrl-C and SIGTERM stop all regions at the same step, with a checkpoint; a second one ends this process at once.

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
        self.regions = regions or RegionConfig()
        if link is not None:
            self.region, self.num_regions = link.region, link.num_regions
        else:
            self.regions = self.regions.resolved()
            assert self.regions.region is not None
            assert self.regions.count is not None
            self.region, self.num_regions = self.regions.region, self.regions.count
        if evaluate_on not in ("global", "local"):
            raise InputError(f"evaluate_on={evaluate_on!r} must be global or local.")
        self.evaluate_on = evaluate_on
        self.outer: OuterOptimizer | None = None
        self._given_link = link
        self._link: Link | None = None
        self._saved: Saved | None = None
        self._trainer: Trainer | None = None
        self._signal: str | None = None
        self._seed: int | None = None
        self._epoch_began_at = 0
        self._started = self._blocked_before = 0.0

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
        refuse(trainer)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        args = trainer.args
        folder = Path(args.output_dir or "trainer_output")
        if folder.name != f"region-{self.region}":  # arguments may serve a second Trainer
            args.output_dir = str(folder / f"region-{self.region}")
        if self.region:  # one voice for all regions
            args.push_to_hub = False
            for tracker in get_reporting_integration_callbacks(args.report_to):
                trainer.remove_callback(tracker)
        wraps: dict[str, Callable] = {
            "train": self._train,
            "evaluate": self._on_weights("evaluate"),
            "predict": self._on_weights("predict"),
            "log": self._log,
            "save_model": self._save_model,
            "_save_checkpoint": self._save_checkpoint,
            "_load_from_checkpoint": self._load_from_checkpoint,
            "_push_from_checkpoint": self._push_from_checkpoint,
            "_maybe_log_save_evaluate": self._log_save_evaluate,
            "create_model_card": self._create_model_card,
        }
        for name, wrap in wraps.items():
            original = getattr(trainer, name)
            setattr(trainer, name, functools.wraps(original)(functools.partial(wrap, original)))
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
        if self._link is None:
            if state.global_step:
                raise InputError(
                    "CoCoDCCallback was added to a Trainer that had begun to resume without it. Call "
                    "callback.attach(trainer) before trainer.train(resume_from_checkpoint=...)."
                )
            self._link = self._join(trainer, resumes=False)
        if self.region:  # equal seeds would give every region the same dropout masks
            self._seed = torch.initial_seed()
            torch.manual_seed(args.seed + self.region)
        max_steps, run = agree_on_start(self._link, state.max_steps, secrets.randbits(48))
        loader = kwargs.get("train_dataloader")
        often = interval(args.save_strategy, state.save_steps, args, loader, max_steps)
        check_same_interval(self._link, often, "saves", "save")
        if self.evaluate_on == "global" and not from_config(self.config).outer.regions_agree:
            often = interval(args.eval_strategy, state.eval_steps, args, loader, max_steps)
            check_same_interval(self._link, often, "evaluates", "eval")
        if self._saved is None and args.should_save:
            begin_run(Path(args.output_dir), run)
        if max_steps < state.max_steps:
            logger.warning(
                "region %d would make %d inner steps, another region %d: all make %d.",
                *(self.region, state.max_steps, max_steps, max_steps),
            )
            state.max_steps = max_steps
        self.outer = OuterOptimizer(
            trainer.accelerator,
            kwargs["model"],
            kwargs["optimizer"],
            self.config,
            self.regions,
            max_steps=max_steps,
            journal=Path(args.output_dir) / "cocodc" / "journal.jsonl",
            link=self._link,
            saved=self._saved,
        )
        if self._saved is not None and args.should_save:
            give_up_later(Path(args.output_dir), self.outer.inner_step, self.region)
        self._saved = None  # its tensors are the outer optimizer's now
        self._started = time.perf_counter()
        self._blocked_before = self.outer.synchronizer.totals.blocked_s

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._epoch_began_at = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        outer = self._running
        if self._signal is not None:
            outer.say(Ending.INTERRUPTED)
        if state.global_step < state.max_steps:
            self._hold(control)
        if not outer.should_stop:
            outer.step()
        if state.global_step >= state.max_steps:
            outer.finish()
        self._end_if_agreed(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        outer = self._running
        # Trainer wishes to stop where an epoch had no data left; a resumed one may have had no more than what it skips
        dry = state.global_step == self._epoch_began_at and control.should_training_stop
        if dry and not outer.should_stop:
            outer.finish()
        self._hold(control)
        self._end_if_agreed(state, control)

    @property
    def _running(self) -> OuterOptimizer:
        assert self.outer is not None
        return self.outer

    def _hold(self, control: TrainerControl) -> None:
        """A wish to stop in this region alone: train on until the others have heard of it."""
        outer = self._running
        if control.should_training_stop and not outer.should_stop:
            control.should_training_stop = False
            if outer.synchronizer.ending is Ending.NO:
                outer.say(Ending.DONE)
                logger.info(
                    "region %d is to stop after step %d: it trains on until the others have heard of it, and all end "
                    "together.",
                    *(self.region, outer.inner_step),
                )

    def _end_if_agreed(self, state: TrainerState, control: TrainerControl) -> None:
        """Leave Trainer's loop where all regions have agreed to."""
        outer = self._running
        if not outer.should_stop:
            return
        control.should_training_stop = True
        if not outer.finished:
            # a region that coasted made fewer steps than it kept pace with
            state.global_step = outer.inner_step
            control.should_save = outer.synchronizer.saved_at < outer.inner_step

    def _join(self, trainer: Trainer, resumes: bool) -> Link:
        """Meet the other regions."""
        if self._given_link is not None:
            return self._given_link
        bare = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        given = trainer.args.max_steps if trainer.args.max_steps > 0 else None
        return join(trainer.accelerator, bare, self.config, self.regions, given, resumes)

    def _train(self, train: Callable, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        assert trainer is not None
        refuse_unsupported(trainer.accelerator, self.config)
        self.outer, self._signal = None, None
        if self._seed is not None:  # training once more: Accelerate shuffles by the seed that it finds
            torch.manual_seed(self._seed)
        self._link = self._join(trainer, bool(resume_from_checkpoint))
        try:
            checkpoint = self._checkpoint_to_resume(trainer, resume_from_checkpoint)
            saved = self._saved
            if checkpoint and saved and has_finished(saved.facts, trainer.args, Path(checkpoint)):
                return self._leave_as_it_is(trainer, checkpoint)
            with first_signal(self._note_signal):
                result = train(checkpoint, *args, **kwargs)
            if not self._running.should_stop:
                self._running.finish()
        except BaseException as error:
            self._leave(trainer, error)
            raise
        finally:
            self._link = self._saved = None
        if not self._running.finished:
            self._running.close()
            raise RunStopped(
                f"all regions stopped at step {self._running.inner_step}: {self._running.why}. Each has saved "
                f"{PREFIX}{self._running.inner_step} in its folder; go on with trainer.train(resume_from_checkpoint=True) or "
                "hf-cocodc train RECIPE --resume."
            )
        return result

    def _checkpoint_to_resume(self, trainer: Trainer, wanted: Any) -> str | None:
        """The checkpoint to hand to Trainer, its part that is ours read beforehand: damage costs no training."""
        if not wanted:
            return None
        folder = Path(trainer.args.output_dir or ".")
        assert self._link is not None
        agreed = wanted is True
        path = (
            agree(self._link, trainer.accelerator, folder) if agreed else of_region(Path(wanted), self.region)
        )
        if path is None:
            logger.warning(
                "there is no complete checkpoint in %s, nor in any other region: starting anew.", folder
            )
            return None
        logger.info("region %d resumes from %s", self.region, path)
        self._saved = Saved(*read(path, self._link.lane))
        if not agreed and trainer.args.should_save:
            continue_run(path, folder)
        return str(path)

    def _leave_as_it_is(self, trainer: Trainer, checkpoint: str) -> TrainOutput:
        """A run that had finished needs no more than its weights."""
        assert self._link is not None
        logger.warning("the run had finished when %s was saved: nothing is left to train.", checkpoint)
        self._link.close()
        trainer._load_from_checkpoint(checkpoint)
        trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        return TrainOutput(trainer.state.global_step, float("nan"), {})

    def _leave(self, trainer: Trainer, error: BaseException) -> None:
        """An error ends this region: let the others hear of it in good order where that is possible, then close."""
        reason = f"{type(error).__name__} at step {self.outer.inner_step if self.outer else 0}: {error}"
        outer = self.outer
        if outer is None:
            if self._link is not None:
                self._link.close(reason)
            return
        orderly = isinstance(error, Exception) and not isinstance(error, LinkError)
        if orderly and trainer.accelerator.num_processes == 1 and not outer.should_stop:
            logger.warning(
                "region %d failed (%s). It keeps in step with the others until they have heard of it; interrupt it to leave "
                "at once.",
                *(self.region, reason),
            )
            with contextlib.suppress(LinkError):
                outer.leave(reason)
        outer.close(reason)

    def _note_signal(self, name: str) -> None:
        self._signal = name
        sys.stderr.write(
            f"{name}: region {self.region} trains on until the others have heard of it; then all stop with a checkpoint. A "
            "second signal ends this process at once.\n"
        )
        if self.outer is not None:
            self.outer.say(Ending.INTERRUPTED)
            self.outer.link.leave_note(name)

    def _log_save_evaluate(self, log_save_evaluate: Callable, *args: Any, **kwargs: Any) -> None:
        """Callbacks that stop training after an evaluation are heard here, before Trainer leaves its loop."""
        log_save_evaluate(*args, **kwargs)
        if self.outer is not None and self._trainer is not None:
            self._hold(self._trainer.control)

    def _on_weights(self, name: str) -> Callable:
        """A wrapper that runs `evaluate` or `predict` on the weights the user has chosen."""

        def run(original: Callable, *args: Any, **kwargs: Any) -> Any:
            outer, trainer = self.outer, self._trainer
            assert trainer is not None
            swap = outer is not None and self._in_training and self.evaluate_on == "global"
            with outer.global_weights() if swap and outer is not None else contextlib.nullcontext():
                result = original(*args, **kwargs)
            if outer is not None and name == "evaluate":
                shown = self.evaluate_on if self._in_training else "global"
                outer.journal.write("evaluate", step=trainer.state.global_step, weights=shown, **result)
            return result

        return run

    @property
    def _in_training(self) -> bool:
        """Whether the model holds local weights at present."""
        return bool(
            self.outer is not None
            and not self.outer.finished
            and self._trainer is not None
            and self._trainer.is_in_train
        )

    def _save_model(self, save_model: Callable, output_dir: Any = None, _internal_call: bool = False) -> None:
        """What a user saves or pushes are the global weights; only Trainer's own checkpoints need the local ones."""
        swap = self._in_training and not (_internal_call and output_dir)
        with self._running.own_global_weights() if swap else contextlib.nullcontext():
            save_model(output_dir, _internal_call)

    def _save_checkpoint(
        self, save_checkpoint: Callable, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Our part first, then Trainer's, then the mark that all of it is there; only then may older ones go."""
        trainer, outer = self._trainer, self.outer
        assert trainer is not None
        if outer is None:
            save_checkpoint(model, trial, *args, **kwargs)
            return
        folder = Path(trainer._get_output_dir(trial=trial))
        checkpoint = folder / f"{PREFIX}{trainer.state.global_step}"
        if trainer.args.should_save:
            remove(checkpoint)  # what a process that was killed has left there
        trainer.accelerator.wait_for_everyone()
        outer.save(checkpoint)
        with outer.own_global_weights() if self._in_training else contextlib.nullcontext():
            export(trainer, str(checkpoint / EXPORT))
        if trainer.args.should_save:
            card.write(checkpoint / EXPORT, card.section(outer))
        limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        try:
            save_checkpoint(model, trial, *args, **kwargs)
        finally:
            trainer.args.save_total_limit = limit
        outer.seal(checkpoint)
        if trainer.args.should_save:
            best = Path(trainer.state.best_model_checkpoint or "").name.removeprefix(PREFIX)
            rotate(folder, limit, outer.saved_everywhere, {int(best)} if best.isdigit() else set())

    def _create_model_card(self, create_model_card: Callable, *args: Any, **kwargs: Any) -> None:
        create_model_card(*args, **kwargs)
        if self.outer is not None and self._trainer is not None and self._trainer.args.should_save:
            card.write(Path(self._trainer.args.output_dir or "."), card.section(self.outer))

    def _load_from_checkpoint(self, load_from_checkpoint: Callable, *args: Any, **kwargs: Any) -> None:
        """Trainer takes every folder of a checkpoint that holds an adapter for one of the model's own."""
        load_from_checkpoint(*args, **kwargs)
        model: Any = self._trainer.model if self._trainer is not None else None
        if EXPORT in getattr(model, "peft_config", {}):
            model.delete_adapter(EXPORT)

    def _push_from_checkpoint(self, push: Callable, checkpoint_folder: str) -> None:
        push(str(Path(checkpoint_folder) / EXPORT))

    def _log(self, log: Callable, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        outer, trainer = self.outer, self._trainer
        if outer is not None and trainer is not None and "loss" in logs:
            outer.synchronizer.loss = float(logs["loss"])
            elapsed = max(time.perf_counter() - self._started, 1e-9)
            blocked = outer.synchronizer.totals.blocked_s - self._blocked_before
            logs = {
                **logs,
                **{f"outer/{name}": value for name, value in outer.report.items()},
                "outer/compute_utilization": 1 - blocked / elapsed,
            }
            outer.journal.write("log", step=trainer.state.global_step, **logs)
        log(logs, *args, **kwargs)
