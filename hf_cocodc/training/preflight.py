"""Finds out in seconds, before any region is started, whether a recipe can be trained.

It does not guess the rules of the libraries: it builds what the regions will build, without memory for weights and without
touching a GPU, and reports what the libraries say.
"""

import contextlib
import dataclasses
import enum
import logging
import sys
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any, get_args, get_type_hints

import psutil

from ..errors import InputError, nearest, reason, short, shown
from ..settings.fields import converted, loosened
from ..settings.recipe import Recipe
from . import building
from .building import blaming
from .data import NO_EOS
from .precheck import check_sections
from .trial import refuse_nonsense, try_step

logger = logging.getLogger(__name__)

MISFITS = (
    "must match the size of tensor",
    "shapes cannot be multiplied",
    "must have same reduction dim",
    "is invalid for input of size",
    "must divide the number of heads",
    "probability has to be between",
)
"""What torch says about tensors that do not fit together, and about a wrong dropout."""

_WORDS = {"optim": [building.MUON]}
"""Words that we take besides those of a library."""
_ALSO = {"resume_from_checkpoint": bool, "fsdp": bool, "lora_alpha": float}
"""Types that Trainer and PEFT take besides those of their hints."""


def check(recipe: Recipe) -> None:
    """Check a recipe as far as possible without building anything. Raises InputError if it cannot work."""
    from ..resolve import from_config

    check_sections(recipe)
    from_config(recipe.outer)
    known_fields("training", recipe.training)
    if recipe.peft is not None:
        known_fields("peft", recipe.peft)
    refuse_nonsense(recipe)


def preflight(recipe: Recipe, tries: bool = False) -> int | None:
    """Check a recipe and build what its regions will build, the model without weights. Raises InputError if it cannot work.

    Reads the configs and tokenizers that the recipe names; no weights, no data. `tries`: also make a step, if the model is small.
    Returns the number of parameters that are trained; None if only a region finds the model.
    """
    check(recipe)
    with _quietly():
        args = _arguments(recipe)
        tokenizer = building.tokenizer(recipe)
        if tokenizer.eos_token_id is None:
            raise InputError(NO_EOS)
        model = _model(recipe, len(tokenizer))
        needs_model = (
            args.optim_target_modules is not None or "lomo" in args.optim or building.has_muon(recipe)
        )
        if model is not None or not needs_model:
            with blaming("training"):
                _optimizer(args, model, building.inner_optimizer(recipe, args, model))
        if tries and model is not None:
            on_cpu = bool(recipe.training.get("use_cpu")) or not _has_accelerator()
            try_step(recipe, args, tokenizer, sum(each.numel() for each in model.parameters()), on_cpu)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and recipe.data.block_size > positions:
        logger.warning(
            "data.block_size=%d is more than the %d positions that the model is made for (max_position_embeddings). Rotary "
            "positions are trained beyond them; others fail. If you do not want this, lower data.block_size.",
            recipe.data.block_size,
            positions,
        )
    return None if model is None else sum(each.numel() for each in model.parameters() if each.requires_grad)


def on_meta(recipe: Recipe) -> Any:
    """The model of a recipe on the meta device; this machine need not have the GPU or the memory to train it.

    Raises InputError if the recipe cannot work, or names an adapter, whose base model only its region finds.
    """
    check(recipe)
    known = recipe.model.config is None or "vocab_size" in recipe.model.config
    with _quietly():
        model = _model(recipe, 0 if known else len(building.tokenizer(recipe)), has_to_fit=False)
    if model is None:
        raise InputError(
            f"model.name_or_path={shown(recipe.model.name_or_path)} is an adapter, of which the size is not known before it is "
            "loaded. Name its base model, and describe the adapter in the section peft."
        )
    return model


def _arguments(recipe: Recipe) -> Any:
    """The arguments of Trainer, after building what it makes of them without a model: trackers and loaders."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import TrainingArguments, set_seed
    from transformers.integrations import get_reporting_integration_callbacks

    from ..trainer.attaching import refuse_arguments

    class Arguments(TrainingArguments):
        """Arguments that do not choose a device: that would start CUDA, or join a process group, in this process."""

        @cached_property
        def _setup_devices(self) -> torch.device:
            self._n_gpu, self.distributed_state = 0, None
            return torch.device("cpu")

    _refuse_format(recipe)
    with _without_cuda():
        args = building.arguments(recipe, Arguments)
    refuse_arguments(args, recipe.evaluation.on)
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
        # only newer releases of transformers have such an argument
        start_method = getattr(args, "dataloader_multiprocessing_context", None)
        for batch_size in (args.train_batch_size, args.eval_batch_size):
            DataLoader(
                TensorDataset(torch.zeros(1, device="cpu")),
                batch_size,
                num_workers=args.dataloader_num_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                persistent_workers=args.dataloader_persistent_workers,
                multiprocessing_context=start_method,
            )
    return args


def _refuse_format(recipe: Recipe) -> None:
    """Refuse a number format that this machine does not train in. Trainer ignores fp16 on a CPU, or its region fails."""
    given, by_choice = recipe.training, bool(recipe.training.get("use_cpu"))
    if not by_choice and _has_accelerator():
        return
    why = "training.use_cpu=true trains on the CPU" if by_choice else "this machine has no GPU"
    if given.get("fp16"):
        raise InputError(
            f"training.fp16=true needs a GPU, but {why}. Compute in float32 (--set training.fp16=false), or in bfloat16 (--set "
            "training.fp16=false --set training.bf16=true --set training.use_cpu=true)."
        )
    for name in ("bf16", "bf16_full_eval"):
        if given.get(name) and not by_choice:
            raise InputError(
                f"training.{name}=true needs a GPU, but {why}. To compute in float32: --set training.{name}=false. To compute in "
                "bfloat16 on the CPU: --set training.use_cpu=true."
            )


def _optimizer(args: Any, model: Any, ours: Any) -> None:
    """Build the learning rate schedule and, unless it is `ours`, the optimizer, as Trainer does."""
    import torch
    from transformers import Trainer, get_scheduler

    from ..run.inner_optimizer import refuse_two_sets_of_weights

    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    parameters: Any = [torch.nn.Parameter(torch.zeros(1, device="cpu"))]
    refuse_two_sets_of_weights(kind)
    is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if not is_class or "model" in settings:
        kind, settings = torch.optim.SGD, {"lr": args.learning_rate}  # it takes a whole model, not on meta
    for name in ("params", "optimizer_dict"):  # GaLore and its like choose the parameters themselves
        parameters = settings.pop(name, parameters)
    optimizer = ours or kind(parameters, **settings)
    steps = max(args.max_steps, 1)
    get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        args.get_warmup_steps(steps),
        steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    """Let TrainingArguments believe in a CUDA device with bf16 and TF32: asking it would start CUDA, and hold GPU memory."""
    import torch
    from transformers import training_args

    asked = {
        name: getattr(training_args, name)
        for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available")
    }
    has_gpu = torch.cuda.device_count() > 0  # counts without starting CUDA
    try:
        for name, ask in asked.items():
            setattr(training_args, name, (lambda: True) if has_gpu else ask)
        yield
    finally:
        for name, ask in asked.items():
            setattr(training_args, name, ask)


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


def _model(recipe: Recipe, vocab_size: int, has_to_fit: bool = True) -> Any:
    """The model on the meta device, with its adapter, after cutting it into fragments. None if only its region finds it."""
    import torch
    from transformers.utils import find_adapter_config_file

    from ..resolve import from_config

    name = recipe.model.name_or_path
    if name is not None:
        with blaming(f"model.name_or_path={shown(name)}"):
            if find_adapter_config_file(name) is not None:  # its base model is named in there
                return None
    config = building.config(recipe, vocab_size)
    has_known_size = recipe.model.config is not None or (
        getattr(config, "quantization_config", None) is None
        and (recipe.model.dtype or config.dtype) is not None
    )
    with torch.device("meta"):
        model = building.random_weights(recipe, config)
        model = building.finished(recipe, model, vocab_size)
        _forward(model)
    if has_known_size and has_to_fit:
        _refuse_too_large(recipe, model)
    from_config(recipe.outer).fragments(model)
    return model


def _forward(model: Any) -> None:
    """Pass a few tokens through a model on meta: shapes that do not fit together show only there."""
    import torch

    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="cpu"))
    except Exception as error:
        # other errors may come from the meta device, or from inputs that the model wants; they say nothing about its config
        if any(words in str(error) for words in MISFITS):
            raise InputError(f"model.config: the model cannot compute: {reason(error)}.") from error


def _refuse_too_large(recipe: Recipe, model: Any) -> None:
    """Raise InputError for a model whose weights alone surely do not fit into the memory of this machine.

    With a GPU, host memory holds weights only while they are built; trained ones are read from files, without a limit. DeepSpeed
    divides weights among ranks and disks: no limit either.
    """
    import torch

    has_gpu = not recipe.training.get("use_cpu") and _has_accelerator()
    if recipe.training.get("deepspeed") or (has_gpu and recipe.model.config is None):
        return
    params = list(model.parameters())  # each tensor once, even if modules share it
    num_bytes, memory = sum(param.nbytes for param in params), psutil.virtual_memory().total
    if num_bytes <= memory:
        return
    is_wide = recipe.model.dtype in (None, "float32") and any(p.dtype == torch.float32 for p in params)
    remedy = ", or use bfloat16 (model.dtype)" if is_wide else ""
    raise InputError(
        f"model: the weights need {num_bytes / 1e9:.1f} GB, but this machine has {memory / 1e9:.1f} GB. Take a smaller "
        f"model{remedy}."
    )


def _has_accelerator() -> bool:
    """Whether this machine has a GPU or its like. Does not start it."""
    import torch

    kind = torch.accelerator.current_accelerator()  # the one that torch was built for
    return torch.cuda.device_count() > 0 or (kind is not None and kind.type != "cuda")


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


def known_fields(section: str, given: dict[str, Any]) -> None:
    """Check a section against a library's dataclass. Raises InputError for an unknown key, a wrong type, or an unknown word."""
    if section == "training":
        from transformers import TrainingArguments as Kind
    else:
        from peft import LoraConfig as Kind
    hints, known = get_type_hints(Kind), {each.name: each for each in dataclasses.fields(Kind) if each.init}
    for key, value in given.items():
        if key not in known:
            raise InputError(
                f"unknown key {section}.{short(key)}.{nearest(key, [*known])} Use a field of {Kind.__name__}."
            )
        converted(value, loosened(hints[key] | _ALSO.get(key, hints[key])), f"{section}.{key}")
        options: list[Any] = [each for each in get_args(hints[key]) if isinstance(each, enum.EnumMeta)]
        words = [word.value for option in options for word in option] + _WORDS.get(key, [])
        words += known[key].metadata.get("choices", ())  # what a flag may be
        if words and isinstance(value, str) and value not in words:
            raise InputError(f"{section}.{key}={shown(value)} is not known.{nearest(value, words)}")
