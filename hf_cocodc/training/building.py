"""Builds what a recipe describes: the arguments of Trainer, the tokenizer and the model.

The libraries raise every kind of exception for an unusable value; each becomes an InputError that names the recipe's section.
"""

import contextlib
import copy
import difflib
import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..errors import CocodcError, InputError, expanded, nearest, reason, short, shown
from ..settings.fields import within
from ..settings.outer import pairs
from ..settings.recipe import Recipe

logger = logging.getLogger(__name__)

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
MOST_LAYERS = 1000
"""No known model has as many."""
MUON = "muon"
"""What `training.optim` says for the optimizer that Trainer does not have."""


def output_dir(recipe: Recipe) -> Path:
    """The folder of the whole run. Each region writes to `region-{r}` in it."""
    name = str(getattr(recipe.outer.method, "name", recipe.outer.method))
    given = recipe.training.get("output_dir") or f"runs/{name.rpartition(':')[2]}"
    if not isinstance(given, str):
        raise InputError(
            f"training.output_dir={shown(given)} must be text or null, not {type(given).__name__}."
        )
    return expanded(given)


def cache_trouble(error: BaseException) -> str:
    """That a cache of the libraries cannot be written, if `error` comes from that; else empty."""
    import datasets
    from huggingface_hub import constants

    causes: BaseException | None = error
    while causes is not None and not (isinstance(causes, OSError) and causes.errno in _NOT_WRITABLE):
        causes = causes.__cause__ or causes.__context__
    for cache in (Path(constants.HF_HUB_CACHE), Path(datasets.config.HF_DATASETS_CACHE)):
        above = (cache, *cache.parents)
        there = next((each for each in above if each.exists()), cache)
        if causes is not None and (
            cache.parts[0] == "~"
            or not (there.is_dir() and os.access(there, os.W_OK))
            or Path(str(causes.filename))
            in above  # in /proc even root can make nothing, whatever its rights say
        ):
            return f"the cache of Hugging Face's libraries, {cache}, cannot be written. Set HF_HOME to a folder that can be"
    return ""


@contextlib.contextmanager
def blaming(section: str) -> Iterator[None]:
    """Turn an exception of a library inside the block into an InputError about a section of the recipe."""
    import torch

    try:
        yield
    # a GPU that is full or broken is no fault of a value: its traceback shows where
    except (CocodcError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise InputError(f"{section}: {cache_trouble(error) or reason(error)}.") from error


def arguments(recipe: Recipe, kind: type) -> Any:
    """The `TrainingArguments` of a recipe. Raises InputError if a value is refused."""
    given = recipe.training
    if has_muon(recipe):
        from ..run.muon import BETAS

        given = {"adam_beta2": BETAS[1], **given, "optim": "adamw_torch"}
    with blaming("training"):
        args = kind(**{**given, "output_dir": str(output_dir(recipe))})
    wanted = args.dataloader_num_workers
    args.dataloader_num_workers = at_most_cores("training.dataloader_num_workers", wanted)
    return args


def batch_of(args: Any) -> int:
    """Sequences of an inner step of a region."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def at_most_cores(setting: str, wanted: int) -> int:
    """A number of processes; as many as this process may use cores, with a line in the log, if more are `wanted`."""
    from ..parts.tensors.slices import cores

    if wanted > cores():
        logger.warning(
            "%s=%d, but this process may use %d cores: it is %d.", setting, wanted, cores(), cores()
        )
    return min(wanted, cores())


def has_muon(recipe: Recipe) -> bool:
    """Whether a recipe trains with Muon: a Trainer is then given its optimizer."""
    return recipe.training.get("optim") == MUON


def inner_optimizer(recipe: Recipe, args: Any, model: Any) -> Any:
    """Trainer's inner optimizer; None if it makes its own.

    Raises:
        InputError: `training.optim_args` has what Muon does not take, or the model has nothing for Muon.
    """
    if not has_muon(recipe):
        return None
    from ..run.muon import muon

    with blaming(f"training.optim_args={shown(args.optim_args)}"):
        return muon(
            model,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            **pairs(args.optim_args or {}),
        )


def tokenizer(recipe: Recipe) -> Any:
    """The tokenizer of a recipe. Raises InputError if there is none of this name."""
    from transformers import AutoTokenizer

    from .data import byte_tokenizer

    if recipe.tokenizer.builtin == "bytes":
        return byte_tokenizer()
    with blaming(_named("tokenizer.name_or_path", recipe.tokenizer.name_or_path)):
        return AutoTokenizer.from_pretrained(recipe.tokenizer.name_or_path)


def model(recipe: Recipe, vocab_size: int) -> Any:
    """A recipe's model, with its adapter. Raises InputError if it cannot be built, or knows fewer than `vocab_size` tokens."""
    from transformers import AutoModelForCausalLM

    section = recipe.model
    if section.config is not None:
        return finished(recipe, random_weights(recipe, config(recipe, vocab_size)), vocab_size)
    with blaming(_named("model.name_or_path", section.name_or_path)):
        trained = AutoModelForCausalLM.from_pretrained(section.name_or_path, dtype=_dtype(recipe) or "auto")
    return finished(recipe, trained, vocab_size)


def config(recipe: Recipe, vocab_size: int) -> Any:
    """The config of a recipe's model: from the recipe, or the one that belongs to trained weights."""
    from transformers import AutoConfig

    section = recipe.model
    if section.config is not None:
        kind = section.config["model_type"]
        _refuse_misspelled(section.config, _config_of(kind))
        with blaming("model.config"):
            config = AutoConfig.for_model(**{"vocab_size": vocab_size, **section.config})
        layers = getattr(config, "num_hidden_layers", None)
        if isinstance(layers, int):  # a million would take minutes to build, without a byte of memory
            within(1, MOST_LAYERS).check("model.config.num_hidden_layers", layers)
        return config
    with blaming(_named("model.name_or_path", section.name_or_path)):
        return AutoConfig.from_pretrained(section.name_or_path)


def _config_of(model_type: str) -> type:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"model.config.model_type={shown(model_type)} is not known.{nearest(model_type, list(CONFIG_MAPPING))}"
        )
    return CONFIG_MAPPING[model_type]


def _known_to(kind: type) -> list[str]:
    """The settings of a config, among other names; empty if it cannot be asked."""
    with contextlib.suppress(Exception):  # some need arguments
        return dir(kind())
    return []


def _refuse_misspelled(given: Mapping[str, Any], kind: type) -> None:
    """Refuse a key that a config does not have, but nearly: Transformers takes any, and builds a model without it."""
    known = _known_to(kind)
    for key in given:
        close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.85)
        if key not in known and close:
            raise InputError(
                f"model.config.{short(str(key))} is no setting of {kind.__name__}. Did you mean {close[0]!r}?"
            )


def _named(setting: str, name: str | None) -> str:
    """A setting that names a folder or a repository, for a message."""
    here = (
        ""
        if name is None or os.path.exists(name)
        else ", which is no folder here, and thus a name on the Hub"
    )
    return f"{setting}={shown(name)}{here}"


def random_weights(recipe: Recipe, config: Any) -> Any:
    """A model with random weights, in the dtype of the recipe, else of the config, else fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    with blaming("model.config"):
        return AutoModelForCausalLM.from_config(config, dtype=_dtype(recipe) or config.dtype or torch.float32)


def finished(recipe: Recipe, model: Any, vocab_size: int) -> Any:
    """The model with the recipe's adapter, after a check that it knows all `vocab_size` tokens."""
    rows = model.get_input_embeddings().num_embeddings
    if rows < vocab_size:
        raise InputError(
            f"the model's vocabulary has {rows} entries but the tokenizer has {vocab_size}. Raise "
            "model.config.vocab_size, or use the model's own tokenizer."
        )
    if recipe.peft is None:
        return model
    from peft import LoraConfig, get_peft_model

    with blaming("peft"):
        adapter = LoraConfig(
            **{"task_type": "CAUSAL_LM", **copy.deepcopy(recipe.peft)}
        )  # PEFT adds to our lists
        if next(model.parameters()).is_meta and _is_known_start(adapter):
            adapter.init_lora_weights = True  # some starts need values, which a model on meta has not
        return get_peft_model(model, adapter)


def _is_known_start(adapter: Any) -> bool:
    """Whether PEFT names this word in its hint. It refuses other words itself, on meta, too."""
    words = [
        word
        for option in get_args(get_type_hints(type(adapter))["init_lora_weights"])
        for word in get_args(option)
    ]
    # in "pissa_niter_[number of iters]" the brackets stand for a number
    patterns = [re.sub(r"\[.*?\]", "[0-9]+", word) for word in words if isinstance(word, str)]
    return any(re.fullmatch(each, str(adapter.init_lora_weights), re.IGNORECASE) for each in patterns)


def _dtype(recipe: Recipe) -> Any:
    import torch

    return getattr(torch, recipe.model.dtype) if recipe.model.dtype else None
