"""Finds out in seconds, before any region is started, whether a recipe can be trained.

It does not guess the rules of the libraries: it builds what the regions will build, without memory for weights and without
touching a GPU, and reports what the libraries say.
"""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any, get_type_hints

import psutil

from ..errors import InputError, nearest, reason, short, shown
from ..recipes.reading import converted
from ..recipes.recipe import Recipe
from . import building
from .building import blaming

MOST_TENSORS = 50_000  # no known model has as many; one of millions would take minutes to build

MISFITS = (
    "must match the size of tensor",
    "shapes cannot be multiplied",
    "is invalid for input of size",
    "probability has to be between",
)
"""What torch says about tensors that do not fit together, and about a wrong dropout."""


def check(recipe: Recipe) -> None:
    """Check a recipe as far as possible without building anything.

    Raises:
        InputError: the recipe cannot work.
    """
    from transformers import TrainingArguments

    from ..resolve import from_config

    from_config(recipe.outer)
    _known_fields("training", recipe.training, TrainingArguments)
    if recipe.data.streaming and recipe.training.get("max_steps", -1) <= 0:
        raise InputError(
            "data.streaming=true: a stream has no length. Set training.max_steps to the number of inner steps."
        )
    if recipe.peft is not None:
        from peft import LoraConfig

        _known_fields("peft", recipe.peft, LoraConfig)


def preflight(recipe: Recipe, regions_here: int = 1) -> None:
    """Check a recipe and build what its regions will build, the model without weights.

    Reads the configs and tokenizers that the recipe names, as a region would; no weights, no data.

    Args:
        recipe: the run.
        regions_here: number of regions that this machine will train at once.

    Raises:
        InputError: the recipe cannot work.
    """
    check(recipe)
    with _quietly():
        _trainer_parts(recipe)
        tokenizer = building.tokenizer(recipe)
        _model_parts(recipe, len(tokenizer), regions_here)


_ALSO = {"resume_from_checkpoint": bool}
"""Types that Trainer takes besides those of its hints."""


def _known_fields(section: str, given: dict[str, Any], kind: type) -> None:
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = get_type_hints(kind)
    for key, value in given.items():
        if key not in known:
            close = nearest(key, known).split(" Known:")[0]
            raise InputError(
                f"recipe: unknown key {section}.{short(key)}.{close} Use a field of {kind.__name__}."
            )
        converted(value, hints[key] | _ALSO.get(key, hints[key]), f"{section}.{key}")


def _trainer_parts(recipe: Recipe) -> None:
    """Build what Trainer makes of its arguments: trackers, loader, optimizer and learning rate schedule."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import Trainer, TrainingArguments, get_scheduler, set_seed
    from transformers.integrations import get_reporting_integration_callbacks

    from ..integrations.attaching import refuse_arguments

    class Arguments(TrainingArguments):
        """Arguments that do not choose a device: that would start CUDA, or join a process group, in this process."""

        @cached_property
        def _setup_devices(self) -> torch.device:
            self._n_gpu, self.distributed_state = 0, None
            return torch.device("cpu")

    args = building.arguments(recipe, Arguments)
    refuse_arguments(args)
    if args.gradient_accumulation_steps < 1:
        raise InputError(
            f"training.gradient_accumulation_steps={args.gradient_accumulation_steps} must be at least 1."
        )
    with blaming("training.report_to"):
        trackers = get_reporting_integration_callbacks(args.report_to)
    for tracker in trackers:
        _make(tracker)
    with blaming("training"):
        set_seed(args.seed)
        args.ddp_timeout_delta  # noqa: B018  a number that is too large raises
        for batch_size in (args.train_batch_size, args.eval_batch_size):
            DataLoader(
                TensorDataset(torch.zeros(1)),
                batch_size,
                num_workers=args.dataloader_num_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                persistent_workers=args.dataloader_persistent_workers,
                multiprocessing_context=args.dataloader_multiprocessing_context,
            )
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **settings)
        steps = max(args.max_steps, 1)
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )


def _make(tracker: type) -> None:
    """Make a tracker's callback as Trainer does: it then imports its package."""
    problem = None
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None  # MLflow's raises again while it is deleted, half made
    try:
        tracker()
    except Exception as error:
        problem = reason(error)
    finally:
        sys.unraisablehook = hook
    if problem is not None:
        raise InputError(f"training.report_to: {problem}.")


def _model_parts(recipe: Recipe, vocab_size: int, regions_here: int) -> None:
    """Build the model on the meta device, with its adapter, and cut it into fragments."""
    import torch
    from transformers.utils import find_adapter_config_file

    from ..resolve import from_config

    name = recipe.model.name_or_path
    if name is not None:
        with blaming(f"model.name_or_path={shown(name)}"):
            if find_adapter_config_file(name) is not None:  # its base model is named in there
                return
    config = building.config(recipe, vocab_size)
    with torch.device("meta"), _within_memory(regions_here):
        model = building.random_weights(recipe, config)
        model = building.finished(recipe, model, vocab_size)
        _forward(model)
    from_config(recipe.outer).fragments(model)


def _forward(model: Any) -> None:
    """Pass a few tokens through a model on meta: shapes that do not fit together show only there."""
    import torch

    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    except Exception as error:
        # other errors may come from the meta device, or from inputs that the model wants; they say nothing about its config
        if any(words in str(error) for words in MISFITS):
            raise InputError(f"model.config: the model cannot compute: {reason(error)}.") from error


@contextlib.contextmanager
def _within_memory(regions_here: int) -> Iterator[None]:
    """Stop the building of a model in this block once its weights, in each region here, cannot fit into this machine.

    Raises:
        InputError: they cannot, or the model has too many tensors.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    memory = psutil.virtual_memory().total
    tensors = num_bytes = 0

    def count(module: Any, name: str, param: Any) -> None:
        nonlocal tensors, num_bytes
        if param is not None:
            tensors, num_bytes = tensors + 1, num_bytes + param.nbytes * regions_here
        if num_bytes > memory:
            raise InputError(
                f"model: the weights of {regions_here} region(s) on this machine need more than {num_bytes / 1e9:.1f} GB, but it "
                f"has {memory / 1e9:.1f} GB. Make the model smaller, train it in bfloat16 (model.dtype), or train fewer regions "
                "here (--region)."
            )
        if tensors > MOST_TENSORS:
            raise InputError(
                f"model: the model has more than {MOST_TENSORS} parameter tensors. Make it smaller (num_hidden_layers)."
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence warnings of libraries: each region prints them, too, into its log."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
