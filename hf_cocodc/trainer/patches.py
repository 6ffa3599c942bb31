"""All methods of Trainer that we wrap, and all its private methods that we rely on.

A bare callback learns of evaluation, saving or logging only afterwards. So these methods of one Trainer object are replaced by
wrappers; every other Trainer stays as it is. `WRAPPED` and `CALLED` name everything private that we need: a test compares them
with the installed Transformers.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..errors import CheckpointError, InputError
from ..link.group import wait_for_ranks
from ..link.process_state import random_state_kept
from ..run.lock import hold, region_lock
from ..run.outer_optimizer import OuterOptimizer
from ..settings.environment import ENV_RESUME
from ..snapshot.folders import PREFIX, make_room, point, rotate, step_of
from ..snapshot.manifest import saving
from ..status import during
from . import hub, weights
from .best import Best
from .feed import Bundle
from .hub import leave_to_region_0, only_the_model

if TYPE_CHECKING:
    from .callback import CoCoDCCallback

PROVEN = ("5.19", "5.24")
"""The oldest and the newest Transformers with which all tests have passed."""
WRAPPED = {
    "train": ("resume_from_checkpoint", "ignore_keys_for_eval"),
    "hyperparameter_search": (),
    "set_initial_training_values": ("dataloader",),
    "_init_training_state": ("resume_from_checkpoint",),
    "get_train_dataloader": (),
    "get_batch_samples": (),
    "_get_train_sampler": (),
    "training_step": (),
    "floating_point_ops": (),
    "_track_num_input_tokens": (),
    "evaluate": (),
    "predict": (),
    "log": ("logs",),
    "save_model": ("output_dir", "_internal_call"),
    "create_model_card": (),
    "push_to_hub": (),
    "_save_checkpoint": ("model", "trial"),
    "_load_from_checkpoint": ("resume_from_checkpoint",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_maybe_log_save_evaluate": (),
    "_evaluate": ("skip_scheduler",),
    "_determine_best_metric": ("metrics", "trial"),
    "_load_best_model": (),
}
"""Methods of Trainer that are wrapped, with the parameters that the wrappers name."""
OF_DEALS = ("_get_train_sampler", "training_step", "floating_point_ops", "_track_num_input_tokens")
"""Those that are only wrapped where micro-batches or samples are dealt."""
CALLED = {
    "_determine_best_metric": ("metrics", "trial"),
    "_evaluate": ("trial", "ignore_keys_for_eval"),
    "_get_output_dir": ("trial",),
    "_save": ("output_dir", "state_dict"),
}
"""Private methods of Trainer that are called, with the parameters that are given."""

COUNTERS = ("_globalstep_last_logged", "_initial_global_step")
"""Private numbers of Trainer's loop that go along where a region jumps to another inner step."""

SAMPLES, BATCHES = 3, 5
"""Places of the number of samples of the run, and of batches in an epoch of this rank, among the initial training values; the
last one is the number of steps."""

IGNORED = -100
"""The label of a token that has no loss."""


class Patches:
    """Wrappers for the methods of one Trainer; each gets the original method as its first argument."""

    def __init__(self, trainer: Trainer, callback: "CoCoDCCallback", best: Best) -> None:
        self._trainer, self._callback, self._best = trainer, callback, best
        self._shows_global = False
        handler = trainer.callback_handler
        handler.on_evaluate = functools.partial(self._tell_callbacks, handler.on_evaluate)
        self._resumes = os.environ.get(ENV_RESUME) == "1"  # once: what a script trains after that begins anew
        # Trainer calls these in every inner step
        unneeded = set() if callback.feed else {*OF_DEALS}
        if not callback.feed and callback.config.weights != "tokens":
            unneeded.add("get_batch_samples")
        for name in WRAPPED.keys() - unneeded:
            original = getattr(trainer, name)
            wrapper = functools.partial(getattr(self, name), original)
            setattr(trainer, name, functools.wraps(original)(wrapper))

    def train(self, train: Callable, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Meets the other regions, agrees with them on the checkpoint, and ends in good order."""
        resume_from_checkpoint = resume_from_checkpoint or self._resumes
        self._resumes = False
        given = inspect.signature(train).bind(resume_from_checkpoint, *args, **kwargs).arguments
        self._best.ignore_keys = given.get("ignore_keys_for_eval")
        lock = region_lock(Path(self._trainer.args.output_dir or "."))
        is_writer = self._trainer.accelerator.is_main_process
        with hold(lock) if is_writer else contextlib.nullcontext():
            return self._callback.train(
                lambda checkpoint: train(checkpoint, *args, **kwargs), resume_from_checkpoint
            )

    def hyperparameter_search(self, search: Callable, *args: Any, **kwargs: Any) -> Any:
        """Refuses."""
        raise InputError(
            "trainer.hyperparameter_search would draw other values in each region, and train each trial across regions with "
            "them. Search in one region, with a Trainer without CoCoDCCallback; then train across regions with the values found."
        )

    def set_initial_training_values(self, compute: Callable, *args: Any, **kwargs: Any) -> tuple:
        """Cuts the run to the length that all regions can make, before the learning rate schedule is made for it."""
        *values, max_steps = compute(*args, **kwargs)
        loader = inspect.signature(compute).bind(*args, **kwargs).arguments["dataloader"]
        num_batches = values[BATCHES] if has_length(loader) else None
        agreed = self._callback.agree_on_length(max_steps, num_batches)
        values[SAMPLES] = values[SAMPLES] * agreed // max(max_steps, 1)
        return *values, agreed

    def _init_training_state(self, init: Callable, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Begins at this region's place in its data."""
        given = inspect.signature(init).bind(*args, **kwargs).arguments
        epochs, batches = init(*args, **kwargs)
        return self._callback.find_place(epochs, batches, given["resume_from_checkpoint"])

    def get_train_dataloader(self, get: Callable) -> Any:
        """Lets the loader tell the place of what it has read."""
        trainer, collate = self._trainer, self._trainer.data_collator
        trainer.data_collator = self._callback.place.recording(collate)
        try:
            loader = get()
        finally:
            trainer.data_collator = collate
        if self._callback.feed is not None:
            self._callback.feed.begin(loader)
        return loader

    def get_batch_samples(
        self, get: Callable, batches: Any, num_batches: int, *args: Any, **kwargs: Any
    ) -> tuple:
        """Gets the micro-batches that this region was dealt, and counts their tokens where these are its weight."""
        feed = self._callback.feed
        mine = (batches, num_batches) if feed is None else (feed, feed.micro_batches)
        batches, *rest = get(*mine, *args, **kwargs)
        if self._callback.outer is not None and self._callback.config.weights == "tokens":
            tokens = self._callback.outer.training.tokens
            try:
                tokens.note(tokens_of(batches))
            except InputError as error:  # the other ranks of the region need not have such a batch
                tokens.fail(error)
        return batches if feed is None else feed.bundles(batches, num_batches), *rest

    def _get_train_sampler(self, get: Callable, *args: Any, **kwargs: Any) -> Any:
        """Gives the samples that this region is dealt."""
        assert self._callback.feed is not None
        return self._callback.feed.sampler() or get(*args, **kwargs)

    def training_step(self, step: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """Makes a step of each micro-batch that Trainer takes for one."""
        assert self._callback.feed is not None
        return self._callback.feed.train(step, *args, **kwargs)

    def floating_point_ops(self, count: Callable, inputs: Any) -> Any:
        """Counts those of each micro-batch."""
        return sum(map(count, inputs)) if isinstance(inputs, Bundle) else count(inputs)

    def _track_num_input_tokens(self, track: Callable, inputs: Any) -> None:
        """Counts those of each micro-batch."""
        for each in inputs if isinstance(inputs, Bundle) else (inputs,):
            track(each)

    def evaluate(self, evaluate: Callable, *args: Any, **kwargs: Any) -> Any:
        """Uses the weights that the user has chosen, and records the result."""
        outer, in_training = self._callback.outer, self._callback.in_training
        spent = None if outer is None else outer.training.timer()
        kept = random_state_kept() if in_training else contextlib.nullcontext()
        with self._chosen_weights(), kept, during("evaluating"):
            metrics = evaluate(*args, **kwargs)
        if outer is not None:
            if in_training and self._callback.evaluate_on == "global":
                outer.training.progress.note_untrained()
            self._best.share(outer, metrics)  # a subclass may have added the metric after callbacks were told
            weights = self._callback.evaluate_on if in_training else "global"
            step = self._best.loaded[0] if self._best.loaded else self._trainer.state.global_step
            assert spent is not None
            outer.training.journal.write(
                "evaluate", **{**numbers_in(metrics), "step": step, "weights": weights, **spent()}
            )
        return metrics

    def _evaluate(self, evaluate: Callable, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Lets all regions decide by the same metrics. A newcomer does not evaluate on start: the others are elsewhere."""
        if kwargs.get("skip_scheduler") and self._callback.has_joined:  # Trainer says so on start alone
            return {}
        with self._best.deciding(self._callback.outer):
            return evaluate(*args, **kwargs)

    def _tell_callbacks(
        self, tell: Callable, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> Any:
        """Puts the mean over the regions into an evaluation's metrics before callbacks, and Trainer, decide by them."""
        if self._callback.outer is not None:
            self._best.share(self._callback.outer, metrics)
        return tell(args, state, control, metrics, **kwargs)

    def _determine_best_metric(self, determine: Callable, *args: Any, **kwargs: Any) -> bool:
        """Sees to it that the best model is saved."""
        is_best = determine(*args, **kwargs)
        if is_best and self._callback.outer is not None:
            self._best.save()
        return is_best

    def _load_best_model(self, load_best_model: Callable) -> None:
        """Loads the global weights of the best checkpoint, unless the run was stopped."""
        outer = self._callback.outer
        if outer is None:
            load_best_model()
        elif outer.finished:
            self._best.load(outer)

    def predict(self, predict: Callable, *args: Any, **kwargs: Any) -> Any:
        """Uses the weights that the user has chosen."""
        with self._chosen_weights():
            return predict(*args, **kwargs)

    def log(self, log: Callable, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the outer optimizer's figures to a log of the training loss."""
        outer, callback = self._callback.outer, self._callback
        if "train_runtime" in logs:  # Trainer's loop is over
            self._best.keep_the_last()
        if outer is not None and "loss" in logs:
            outer.note_loss(logs["loss"])
            elapsed = max(outer.link.clock() - callback.started, 1e-9)
            blocked = outer.synchronizer.totals.blocked_s - callback.blocked_before
            figures = {f"outer/{name}": value for name, value in outer.report.items()}
            logs = {**logs, **figures, "outer/compute_utilization": 1 - blocked / elapsed}
            outer.training.journal.write("log", step=self._trainer.state.global_step, **logs)
        log(logs, *args, **kwargs)

    def save_model(self, save_model: Callable, output_dir: Any = None, _internal_call: bool = False) -> None:
        """Saves and pushes the global weights, into checkpoints too: our own file there holds the local ones."""
        outer, trainer = self._callback.outer, self._trainer
        swap = self._callback.in_training
        folder = Path(output_dir or trainer.args.output_dir or ".")
        shown = outer.own_global_weights(everywhere=False) if outer is not None and swap else None
        with saving(folder), shown or contextlib.nullcontext():
            if outer is None:
                save_model(output_dir, _internal_call)
                return
            weights.export(trainer, folder, lambda: save_model(output_dir, _internal_call))
            if _internal_call and output_dir and trainer.args.should_save:
                hub.write(folder, hub.section(outer))

    def create_model_card(self, create_model_card: Callable, *args: Any, **kwargs: Any) -> None:
        """Adds our section to the card."""
        outer, arguments = self._callback.outer, self._trainer.args
        if outer is not None and arguments.should_save:
            folder = Path(arguments.output_dir or ".")
            hub.draft(folder, hub.section(outer, self._best.loaded), create_model_card, *args, **kwargs)
        else:
            create_model_card(*args, **kwargs)

    def push_to_hub(self, push: Callable, *args: Any, **kwargs: Any) -> Any:
        """Pushes the model, from region 0."""
        if self._callback.region:
            leave_to_region_0(self._callback.region)
            return None
        with only_the_model():
            return push(*args, **kwargs)

    def _save_checkpoint(
        self, save_checkpoint: Callable, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Writes our part, then Trainer's, then the mark of completeness. Deletes older checkpoints only after that."""
        trainer, outer = self._trainer, self._callback.outer
        if outer is None:
            save_checkpoint(model, trial, *args, **kwargs)
            return
        self._callback.count()  # Trainer's just-in-time checkpoint comes before the outer step
        folder = Path(trainer._get_output_dir(trial=trial))
        checkpoint = folder / f"{PREFIX}{trainer.state.global_step}"
        if trainer.args.should_save:
            make_room(checkpoint)
        wait_for_ranks(trainer.accelerator, f"the place of {checkpoint}")
        limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        try:
            with outer.spare(checkpoint.name), saving(checkpoint):
                self._fill(checkpoint, outer, lambda: save_checkpoint(model, trial, *args, **kwargs))
        except CheckpointError:
            if trainer.args.should_save:
                make_room(checkpoint)  # a part of a checkpoint only takes room, which the log needs now
            raise
        finally:
            trainer.args.save_total_limit = limit
        if trainer.args.should_save:
            best = step_of(Path(trainer.state.best_model_checkpoint or ""))
            rotate(folder, limit, outer.training.endings.saved_everywhere, {best})
            point(folder)

    def _fill(self, checkpoint: Path, outer: OuterOptimizer, save: Callable[[], None]) -> None:
        """Writes all parts of a checkpoint; `save` writes Trainer's."""
        spent = outer.training.timer()
        outer.save(checkpoint, weights=not self._trainer.is_fsdp_enabled)
        save()
        self._callback.place.write(checkpoint)
        outer.seal(checkpoint)
        outer.training.journal.write_later("save", step=outer.inner_step, **spent())

    def _load_from_checkpoint(
        self, load_from_checkpoint: Callable, resume_from_checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        """Loads the local weights from our own file."""
        weights.load_local(
            self._trainer,
            Path(resume_from_checkpoint),
            lambda: load_from_checkpoint(resume_from_checkpoint, *args, **kwargs),
        )

    def _push_from_checkpoint(self, push: Callable, checkpoint_folder: str) -> None:
        """Pushes the global model, and nothing of the run."""
        with only_the_model():
            push(checkpoint_folder)

    def _maybe_log_save_evaluate(self, log_save_evaluate: Callable, *args: Any, **kwargs: Any) -> None:
        """Notices callbacks that stop training after an evaluation, before Trainer leaves its loop."""
        log_save_evaluate(*args, **kwargs)
        if self._callback.outer is not None:
            self._callback.hold(self._trainer.control)

    @contextlib.contextmanager
    def _chosen_weights(self) -> Iterator[None]:
        """Inside the block the model holds the weights that the user has chosen; nested evaluations show them once."""
        outer, callback = self._callback.outer, self._callback
        swap = callback.in_training and callback.evaluate_on == "global" and not self._shows_global
        if outer is None or not swap:
            yield
            return
        self._shows_global = True
        try:
            with contextlib.ExitStack() as block:
                is_shown = False
                if callback.is_linked:
                    with outer.spare("the mean of the global weights"):
                        block.enter_context(self._best.mean_shown(outer))
                        is_shown = True
                if not is_shown:
                    block.enter_context(outer.own_global_weights())
                yield
        finally:
            self._shows_global = False


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among metrics, as JSON can express them. A script may have others, which a journal does not take.

    >>> import torch
    >>> numbers_in({"eval_loss": 2.5, "eval_accuracy": "good", "eval_f1": torch.tensor(0.5), "eval_passed": True})
    {'eval_loss': 2.5, 'eval_f1': 0.5, 'eval_passed': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
        elif isinstance(value, Real):
            found[name] = float(value)
    return found


def tokens_of(batches: Iterable[Any]) -> Any:
    """Tokens in the micro-batches of one inner step, as a number or a tensor of one: to read it may wait for a GPU.

    Counts labels that have a loss; without labels, the attention mask; without a mask, `input_ids`. Raises InputError if a
    batch has none of them.

    >>> import torch
    >>> int(tokens_of([{"input_ids": torch.ones(2, 3), "labels": torch.tensor([[1, 2, -100], [1, -100, -100]])}]))
    3
    """
    return sum(_tokens_in(batch) for batch in batches)


def _tokens_in(batch: Any) -> Any:
    fields = batch if isinstance(batch, Mapping) else {}
    for name in ("shift_labels", "labels"):
        if isinstance(fields.get(name), Tensor):
            return fields[name].ne(IGNORED).sum()
    if isinstance(fields.get("attention_mask"), Tensor):
        return fields["attention_mask"].ne(0).sum()
    if isinstance(fields.get("input_ids"), Tensor):
        return fields["input_ids"].numel()
    description = ", ".join(map(str, fields)) if fields else type(batch).__name__
    raise InputError(
        f"outer.weights=tokens, but a batch ({description}) has no labels, attention_mask or input_ids to count. Set "
        "outer.weights to equal or steps."
    )
