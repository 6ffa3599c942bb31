"""Transformers' Trainer across regions: one callback.

The callback finds its Trainer and wraps some methods of that object (see `patches`). The rest of Trainer stays as it is.
"""

import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import InputError
from ..link.base import Link
from ..link.group import ranks_of_region
from ..link.records import Ending
from ..parts.deal import Portion
from ..resolve import from_config
from ..run.about import About, function_of, jsonable, refuse_another_run, scales_of
from ..run.connect import meet
from ..run.outer_optimizer import OuterOptimizer
from ..run.samples import first_samples
from ..run.shards import facts_of_shards, note_order
from ..run.streams import RegionStride
from ..run.supported import refuse_uneven, refuse_unsupported
from ..settings import OuterConfig, RegionConfig
from ..settings.fields import converted
from ..settings.given import settings_of
from ..settings.recipe import Recipe, facts_of_data
from ..snapshot.checkpoint import Saved, read_own
from ..snapshot.receive import Received
from ..snapshot.resume import Start, checkpoint_to_resume, settle_in
from ..status import tell
from .attaching import find_trainer, refuse, refuse_finished, refuse_undealt, settle, wrap_class
from .beginning import (
    Beginning,
    agree_on_start,
    base_for,
    common_epoch,
    done_together,
    evaluate_together,
    told,
    why_fixed,
)
from .best import Best
from .feed import Feed
from .leaving import answer, first_signal, leave, say_farewell
from .loop import TrainerLoop, go_along, restore_callbacks
from .patches import Patches
from .place import StreamPlace
from .weights import refuse_unsaved

logger = logging.getLogger(__name__)

COMPARED = (
    *("seed", "data_seed", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16"),
)
"""Training arguments that change what a step does. max_steps is compared by itself; the number of epochs may change."""


class CoCoDCCallback(TrainerCallback):
    """Trains a Trainer's model across regions.

    ::

        trainer = Trainer(model=model, args=args, train_dataset=region_shard(dataset),
                          callbacks=[CoCoDCCallback(OuterConfig(method="diloco", sync_interval=100))])
        trainer.train()                      # the model holds the global weights afterwards

    Each region writes under `{output_dir}/region-{r}`. `evaluate()`, `predict()` and `save_model()` use the global weights.
    `train(resume_from_checkpoint=True)` continues exactly from the newest checkpoint that is good in every region. Ctrl-C and
    SIGTERM stop all regions at the same step, with a checkpoint, and `train` raises RunStopped; a script that does not catch it
    ends with its message and exit code 3. A second Ctrl-C, or a SIGTERM 5 s later, ends this process at once.

    Other callbacks see local weights while the model trains, and the global ones in `on_train_end`. A moving average that is to
    be equal in all regions is updated inside `callback.outer.global_weights()`, at the same inner steps in all regions: not
    with eager updates, where the others wait for a region that catches up. Any other average is each region's own.

    Args:
        config: the method and its settings, or the name of a method.
        regions: which region this is; by default the environment says so.
        changes: fields of `OuterConfig`, such as sync_interval=100, in place of those of `config`.
        evaluate_on: "global" or "local": what `trainer.evaluate()` uses while training; the best model needs "global".
        link: reaches the other regions; by default it is made from `regions`.
        facts: more that must be equal in all regions and after a resume, by name, for example {"data.path": ...}; JSON-able.

    Attributes:
        outer: the outer optimizer of the run; None before training.
        recipe: what machines get that join without a recipe (`settings/handed.py`); None in a script.
        started: when training started, by the link's clock.
        blocked_before: seconds that training was blocked before it was resumed.

    Raises:
        InputError: settings that cannot work.
    """

    def __init__(
        self,
        config: OuterConfig | str | None = None,
        regions: RegionConfig | None = None,
        *,
        evaluate_on: str = "global",
        link: Link | None = None,
        facts: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.config, self.regions = settings_of("CoCoDCCallback", config, regions, changes)
        wrap_class(CoCoDCCallback)  # again, if another package has put its own method there meanwhile
        link = converted(link, Link | None, "CoCoDCCallback: link")
        facts = converted(facts, dict[str, Any] | None, "CoCoDCCallback: facts")
        from_config(self.config)  # fails here if it cannot work, not after the model has been loaded
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
        self._given_link, self._facts, self._about = link, facts or {}, About()
        self.recipe: Mapping[str, Any] | None = None
        self._link: Link | None = None
        self._saved: Saved | None = None
        self._start = Start(None)
        self._base: Received | None = None
        self._is_coming = False  # until its first batch is there: the others would wait for a member
        self._beginning: Beginning | None = None
        self._trainer: Trainer | None = None
        self._signal: str | None = None
        self._seed: int | None = None
        self._epoch_began_at = 0
        self._has_stepped = False  # or does so now: since the last outer step
        self.started = self.blocked_before = 0.0

    @classmethod
    def from_recipe(cls, path: str | Path, overrides: tuple[str, ...] = ()) -> "CoCoDCCallback":
        """The callback that a recipe's outer, regions and evaluation sections describe."""
        recipe = Recipe.load(path, overrides)
        facts = facts_of_data(recipe)
        return cls(recipe.outer, recipe.regions, evaluate_on=recipe.evaluation.on, facts=facts)

    def attach(self, trainer: Trainer) -> "CoCoDCCallback":
        """Serve `trainer`, and add this callback to it if needed. Trainers that were given the callback need no call.

        Raises:
            InputError: the Trainer cannot be trained across regions; the message says what to change.
        """
        if self._trainer is trainer:
            return self
        if self._trainer is not None:
            raise InputError(
                "this CoCoDCCallback already serves another Trainer. Make a new one for each Trainer."
            )
        if trainer.is_in_train:
            raise InputError(
                "this Trainer trains already, without CoCoDCCallback. Call callback.attach(trainer) before trainer.train()."
            )
        refuse(trainer, self, self.evaluate_on)
        if self.regions.shards == "dealt":
            refuse_undealt(trainer)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        all_report = self.regions.report_regions == "all" and self._given_link is None
        settle(trainer, self.region, all_report)
        self._is_eager = not from_config(self.config).outer.regions_agree
        self._best = Best(trainer, averages=self._is_eager and self.evaluate_on == "global")
        is_dealt = self.regions.rule_of_batch is not None
        self.place = StreamPlace(trainer, is_dealt)
        num_parts = max(self.num_regions, 1) if self.regions.shards == "dealt" else None
        self.feed = Feed(trainer, self.place, self._now, num_parts) if is_dealt else None
        Patches(trainer, self, self._best)
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
        trainer = self._trainer
        if trainer is None or self._link is None or self._beginning is None:
            raise InputError(
                "CoCoDCCallback came to a Trainer that trained already, or that it could not find. Call "
                "callback.attach(trainer) before trainer.train()."
            )
        if self.region:  # equal seeds would give every region the same dropout masks
            self._seed = torch.initial_seed()
            torch.manual_seed(args.seed + self.region)
        loop = TrainerLoop(trainer, self._beginning, lambda: self._best.stand_in(self._running), self.feed)
        self.outer = OuterOptimizer(
            trainer.accelerator,
            kwargs["model"],
            kwargs["optimizer"],
            self.config,
            self.regions,
            max_steps=state.max_steps,
            journal=Path(args.output_dir) / "cocodc" / "journal.jsonl",
            link=self._link,
            saved=self._saved,
            about=self._about,
            loop=loop,
        )
        # last, and not before all regions have agreed: what an earlier run left in the folder no longer counts
        if args.should_save:
            settle_in(
                Path(args.output_dir), self._beginning.run, self._start, self.outer.inner_step, self.region
            )
        for sentence in self._start.skipped:
            self.outer.training.journal.write("note", step=self.outer.inner_step, message=sentence)
        self._best.settle()
        restore_callbacks(trainer)
        self._is_coming = self.has_joined
        if self._is_coming:
            handler = trainer.callback_handler
            handler.on_step_begin = partial(self._come_in, handler.on_step_begin)
        self._saved = None  # its tensors are the outer optimizer's now
        self.started = self._link.clock()
        self.blocked_before = self.outer.synchronizer.totals.blocked_s

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.place.begin_pass()
        self._epoch_began_at = state.global_step
        self._best.make_up(self._start)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._has_stepped = True

    def _come_in(self, tell: Callable, *args: Any, **kwargs: Any) -> Any:
        """Be a member, then `tell` all callbacks that the first step begins."""
        assert self._trainer is not None
        self._trainer.callback_handler.on_step_begin = tell
        self._is_coming = False
        self._running.begin(is_new=True)
        return tell(*args, **kwargs)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._running.note_lr()  # Trainer steps its schedule before on_step_end

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        outer = self._running
        if self._signal is not None:
            outer.ask_to_stop(self._signal)
        if state.global_step < state.max_steps:
            self.hold(control)
        self.count()
        if state.global_step >= state.max_steps:
            outer.end()
        self._end_if_agreed(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        outer = self._running
        if self._is_coming and not self.place.trained:  # else it had trained this pass when it left
            raise InputError(f"region {self.region} joins a run, but its data has no batch. Give it data.")
        # Trainer asks to stop if an epoch had no data left; after a resume it may skip all of an epoch's data
        dry = state.global_step == self._epoch_began_at and control.should_training_stop
        if dry:
            outer.end()
        self.hold(control)
        self._end_if_agreed(state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._best.end()
        if self._running.finished:
            self._running.close()

    def count(self) -> None:
        """Make the outer step of the inner step that Trainer has made, unless it is made: what a callback before this one saves
        is of one moment then. Raises InputError while Trainer is in the middle of the inner step.
        """
        outer, trainer = self._running, self._trainer
        assert trainer is not None
        if not self._has_stepped:
            return
        if trainer.state.global_step <= outer.inner_step and not outer.should_stop:
            raise InputError(
                f"a checkpoint in the middle of inner step {outer.inner_step + 1}: the optimizer steps, and Trainer has not "
                "counted it yet. No run could go on from there exactly. Save in on_step_end, or in a later event."
            )
        self._has_stepped = False
        self.place.after_step()
        if not outer.should_stop:
            outer.step()

    @property
    def _running(self) -> OuterOptimizer:
        assert self.outer is not None
        return self.outer

    def hold(self, control: TrainerControl) -> None:
        """Turn a request to stop this region into one to stop all: train on until the others have learned of it."""
        outer = self._running
        if control.should_training_stop and not outer.should_stop:
            control.should_training_stop = False
            if outer.training.endings.word.ending is Ending.NO:
                outer.say(Ending.DONE)
                logger.info(
                    "region %d is asked to stop at step %d: it trains on until the others have heard of it, and all end "
                    "together.",
                    *(self.region, outer.inner_step),
                )

    def _end_if_agreed(self, state: TrainerState, control: TrainerControl) -> None:
        """Leave Trainer's loop if all regions have agreed to."""
        outer = self._running
        if not outer.should_stop:
            return
        control.should_training_stop = True
        if not outer.finished:
            assert self._trainer is not None
            # a region that coasted trained fewer steps than the others
            go_along(self._trainer, outer.inner_step)
            control.should_save = (
                outer.verdict == "stop" and outer.training.endings.word.saved_at < outer.inner_step
            )
            control.should_evaluate = False  # launchers soon kill, and a region that failed takes no part

    def agree_on_length(self, max_steps: int, num_batches: int | None) -> int:
        """The inner steps that all regions make, where this one would make `max_steps`, and this rank has `num_batches` in an
        epoch. A collective call. Raises InputError if ranks of the region differ, HandshakeError like `agree_on_start`.
        """
        assert self._link is not None and self._trainer is not None
        if self._trainer.accelerator.num_processes > 1:
            refuse_uneven(ranks_of_region(), max_steps, num_batches)
        args, is_alone = self._trainer.args, self._link.num_regions == 1
        together = not is_alone and evaluate_together(args, self.evaluate_on, self._is_eager)
        own = Beginning(max_steps, secrets.randbits(48), common_epoch(args, num_batches, together))
        self._beginning = agree_on_start(self._link, own, told(self._base))
        return self._beginning.max_steps

    def find_place(self, epochs: int, batches: int, checkpoint: str | None) -> tuple[int, int]:
        """The pass over the data, and the batches to skip in it, where Trainer would take `epochs` and `batches`."""
        resumed = None if checkpoint is None else Path(checkpoint)
        return self.place.begin(epochs, batches, resumed, None if self._base is None else self._base.run)

    def _now(self) -> tuple[Portion, int]:
        """The part of the samples that this region is dealt, and its next inner step."""
        return self._running.synchronizer.portion, self._running.inner_step + 1

    @property
    def has_joined(self) -> bool:
        """Whether this region has come into a run that trained already."""
        return self._base is not None

    @property
    def is_linked(self) -> bool:
        """Whether the other regions can be asked: from the start of a training to its end, however it ends."""
        return self._link is not None

    @property
    def in_training(self) -> bool:
        """Whether the model holds local weights now: while it trains, and after a run that has stopped or failed."""
        return self.outer is not None and not self.outer.finished

    def train(self, train: Callable[[str | None], Any], resume_from_checkpoint: Any) -> Any:
        """Do the work of `trainer.train` across regions; `train` is Trainer's own method, given the checkpoint to resume from.

        `resume_from_checkpoint`: True for the newest one that all regions have; or a path. Raises RunStopped.
        """
        trainer = self._trainer
        assert trainer is not None
        if self not in trainer.callback_handler.callbacks:
            raise InputError(
                "this CoCoDCCallback was removed from this Trainer, whose methods it has wrapped. Add it again "
                "(trainer.add_callback(callback)), or make a new Trainer without it."
            )
        refuse_unsupported(trainer.accelerator, self.config, trainer.model)
        refuse_unsaved(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
        self.outer, self._signal, self._has_stepped = None, None, False
        self._best.forget()
        if self._seed is not None:  # training once more: Accelerate shuffles by the seed that it finds
            torch.manual_seed(self._seed)
        folder = Path(trainer.args.output_dir or ".")
        tell(folder=str(folder.absolute()))
        self._link = self._meet(trainer)
        try:
            self._base = base_for(self._link, trainer)
            if self._base is not None:
                start = Start(self._base.folder, self._base.run)
            else:
                start = checkpoint_to_resume(self._link, trainer.accelerator, folder, resume_from_checkpoint)
            self._start, path = start, start.checkpoint
            if path is not None:
                self._saved = read_own(self._link, path)
                # before Trainer loads weights into another model
                wrote = self._saved.facts
                refuse_another_run(wrote.model, wrote.facts, self._about, self.regions.allowed)
                refuse_finished(wrote, trainer.args, path)
                self._best.begin(self._link, start, wrote, is_newcomer=self._base is not None)
            with first_signal(self._note_signal):
                result = train(None if path is None else str(path))
            self._running.end()
            self._running.close()
        except BaseException as error:
            leave(trainer, self._link, self.outer, error)
            raise
        finally:
            self._link = self._saved = None
        self._running.training.progress.summarize()
        say_farewell(self._running)
        return result

    def _meet(self, trainer: Trainer) -> Link:
        """Meet the other regions."""
        bare = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        is_dealt = self.regions.shards == "dealt"
        if is_dealt:
            note_order(trainer.train_dataset)
        together = done_together(trainer.args, self.evaluate_on, self._is_eager)
        about = of_trainer(trainer, bare, self._facts, is_dealt)
        self._about = replace(about, recipe=self.recipe, together=together)
        given = trainer.args.max_steps if trainer.args.max_steps > 0 else None
        mine = (trainer.accelerator, bare, self.config, self.regions, given)
        return meet(self._given_link, *mine, about=self._about)

    def _note_signal(self, name: str) -> None:
        self._signal = name
        leaves = self._link is not None and self._link.is_elastic and self.regions.leaves_alone
        sys.stderr.write(answer(name, self.region, leaves))
        if self.outer is not None:
            self.outer.ask_to_stop(name)


# not by the constructor alone: `trainer.add_callback(CoCoDCCallback)` takes the method before it makes the callback
wrap_class(CoCoDCCallback)


def of_trainer(trainer: Trainer, model: nn.Module, more: Mapping[str, Any], is_dealt: bool = False) -> About:
    """What this region's Trainer trains, an unwrapped model, with `more` facts by name. `is_dealt`: its dataset has the
    samples of all regions.
    """
    args = trainer.args
    facts = {f"training.{name}": jsonable(getattr(args, name, None)) for name in COMPARED}
    # of all devices of this process, too: Trainer trains with DataParallel on several
    if isinstance(trainer.train_dataset, RegionStride):  # each worker of a torch stream divides its own part
        facts["training.dataloader_num_workers"] = args.dataloader_num_workers
    facts["batch"] = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    return About(
        run=Path(args.output_dir or ".").resolve().parent.name,
        model=function_of(model, trainer.processing_class),
        facts={**facts, **scales_of(model), **facts_of_shards(), **jsonable(dict(more))},
        first_samples="" if is_dealt else first_samples(trainer.train_dataset),
        why_fixed=why_fixed(args),
    )
