"""Finds the Trainer of a callback, and checks that it can train across regions."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import TrackioCallback, get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import HubStrategy, SaveStrategy

from ..errors import InputError, RunFinished
from ..run.inner_optimizer import refuse_two_sets_of_weights, two_sets_of_weights
from ..snapshot.checkpoint import Facts
from ..snapshot.folders import PREFIX
from .hub import create_repository


def find_trainer() -> Trainer | None:
    """The Trainer whose method is calling us, from the innermost frame: Trainer passes everything but itself to callbacks."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


_WRAPPERS: set[Any] = set()
"""Our wrappers of methods of these classes; other packages may have wrapped them, too."""


def wrap_class(kind: type[TrainerCallback]) -> None:
    """Wrap a method of Trainer and one of CallbackHandler, once; without a callback of type `kind` both do as before.

    Trainer's constructor creates a repository before it tells any callback, and nobody tells a callback that `add_callback` adds
    it. Not Trainer's `add_callback`: `trainer.add_callback(hf_cocodc.CoCoDCCallback(...))` takes it before it imports us.
    """

    def init_hf_repo(create: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        ours: list[Any] = [each for each in trainer.callback_handler.callbacks if isinstance(each, kind)]
        if ours:
            create_repository(trainer, ours[0].region, lambda: create(trainer, *args, **kwargs))
        else:
            create(trainer, *args, **kwargs)

    def add_callback(add: Callable, handler: CallbackHandler, callback: Any) -> None:
        add(handler, callback)
        if isinstance(callback, kind) or callback is kind:
            trainer, ours = find_trainer(), handler.callbacks[-1]
            if (
                getattr(trainer, "callback_handler", None) is handler
            ):  # a constructor tells it later, by `on_init_end`
                ours.attach(trainer)

    owners: tuple[tuple[type, Callable], ...] = ((Trainer, init_hf_repo), (CallbackHandler, add_callback))
    for owner, wrapper in owners:
        original = getattr(owner, wrapper.__name__)
        if original not in _WRAPPERS:
            method = _method(wrapper, original)
            _WRAPPERS.add(method)
            setattr(owner, wrapper.__name__, method)


def _method(wrapper: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    return method


def settle(trainer: Trainer, region: int, all_report: bool) -> None:
    """Let a Trainer write into its region's folder. Region 0 reports for all, or each region as a run of one group; a tracker
    shows whose run it is.
    """
    args = trainer.args
    folder = Path(args.output_dir or "trainer_output")
    if folder.name != f"region-{region}":  # the arguments may serve a second Trainer
        folder = folder / f"region-{region}"
        args.output_dir = str(folder)
    if args.run_name is None:
        args.run_name = f"{folder.resolve().parent.name}-{folder.name}"
    _forget_group()
    if all_report:
        group = args.run_name.removesuffix(f"-{folder.name}")
        args.run_name = f"{group}-{folder.name}"
        _group(trainer, group)
    if region:
        args.push_to_hub = False
        for tracker in get_reporting_integration_callbacks(args.report_to) if not all_report else ():
            trainer.remove_callback(tracker)


_GROUP = "WANDB_RUN_GROUP"
_groups: set[str] = set()
"""Groups that we have named in this process; any other is the user's."""


def _forget_group() -> None:
    """Take back the group of an earlier Trainer, so that it is not this one's, too."""
    if os.environ.get(_GROUP) in _groups:
        del os.environ[_GROUP]


def _group(trainer: Trainer, group: str) -> None:
    """Let W&B and trackio put the run of this region into a group, unless the user has named another one."""
    if _GROUP not in os.environ:
        os.environ[_GROUP] = group
        _groups.add(group)
    for tracker in trainer.callback_handler.callbacks:
        if isinstance(tracker, TrackioCallback):  # it calls init(), which has no variable for the group
            tracker._trackio = _Grouped(tracker._trackio, group)


class _Grouped:
    """The module trackio, whose runs are in a group."""

    def __init__(self, trackio: Any, group: str) -> None:
        self._trackio, self._group = trackio, group

    def init(self, *args: Any, **kwargs: Any) -> Any:
        return self._trackio.init(*args, **{"group": self._group, **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trackio, name)


def refuse(trainer: Trainer, callback: TrainerCallback, evaluate_on: str) -> None:
    """Check that a Trainer can train across regions. Raises InputError, which says what to change."""
    if any(
        each is not callback and isinstance(each, type(callback))
        for each in trainer.callback_handler.callbacks
    ):
        raise InputError(
            f"this Trainer has two {type(callback).__name__}s: both would write the model's parameters. Give it one "
            "(trainer.remove_callback removes the other)."
        )
    refuse_arguments(trainer.args, evaluate_on)
    for given in (trainer.optimizer, *(trainer.optimizer_cls_and_kwargs or ())[:1]):
        refuse_two_sets_of_weights(given)


def refuse_undealt(trainer: Trainer) -> None:
    """Check that samples can be dealt to a Trainer (`regions.shards: dealt`). Raises InputError if not."""
    dataset, strategy = trainer.train_dataset, trainer.args.train_sampling_strategy
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            "regions.shards=dealt deals samples by their numbers, and this Trainer's data is a stream. Give it a map-style "
            "dataset (all of it, not a region_shard), or remove regions.shards."
        )
    own = [
        name
        for name in ("_get_train_sampler", "get_train_dataloader")
        if getattr(type(trainer), name) is not getattr(Trainer, name)
    ]
    if own or strategy not in ("random", "sequential"):
        given = f"{type(trainer).__name__}.{own[0]}" if own else f"train_sampling_strategy={strategy}"
        raise InputError(
            f"regions.shards=dealt decides which samples each region trains on, and so does {given}. Remove one of them."
        )


def refuse_arguments(args: TrainingArguments, evaluate_on: str) -> None:
    """Check the arguments of a Trainer. Raises InputError like `refuse`."""
    if args.auto_find_batch_size:
        raise InputError(
            "auto_find_batch_size=True would restart training in one region alone. Set it to False and choose "
            "per_device_train_batch_size."
        )
    if evaluate_on == "local" and (args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST):
        raise InputError(
            "the best model is one of the global weights, but evaluate_on=local (evaluation.on) evaluates the local ones. Set it "
            "to global, or load_best_model_at_end=False and save_strategy to steps or epoch."
        )
    if args.save_only_model:
        raise InputError(
            "save_only_model=True would save no optimizer, schedule or random state, and no resume could be exact. Set it to "
            "False: from_pretrained loads the global model alone from checkpoint-N."
        )
    if args.push_to_hub and args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        raise InputError(
            f"hub_strategy={args.hub_strategy.value} would push region 0's checkpoint, and no run across regions can resume "
            "from it. Use every_save or end, which push the global weights."
        )
    if args.optim.startswith("schedule_free"):
        raise InputError(two_sets_of_weights(f"training.optim={args.optim.value}"))
    if args.deepspeed:
        raise InputError(
            "DeepSpeed inside a region is not supported. Use DDP (accelerate launch --multi_gpu)."
        )


def refuse_finished(facts: Facts, args: TrainingArguments, checkpoint: Path) -> None:
    """Raise RunFinished if the run of a checkpoint had finished, and no more steps are asked for; InputError if it had not, and
    none are left.
    """
    if args.max_steps > 0:
        is_over = args.max_steps <= facts.step
    else:
        trained = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        is_over = facts.finished and args.num_train_epochs <= trained.num_train_epochs
    if not is_over:
        return
    if not facts.finished:
        raise InputError(
            f"{checkpoint} is of step {facts.step} of a run that had not finished, and max_steps={args.max_steps} leaves nothing "
            f"to train. Raise max_steps, or use the global model of this step: {checkpoint}."
        )
    best = None
    if args.load_best_model_at_end:
        best = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).best_global_step
    model = checkpoint.with_name(f"{PREFIX}{best}") if best else checkpoint
    raise RunFinished(
        f"the run has finished at step {facts.step}: nothing is left to train, and nothing was changed. Its model is in "
        f"{model}. To train on, raise {'max_steps' if args.max_steps > 0 else 'num_train_epochs'}."
    )
