"""A run's recipe for machines that join without one: what a region tells the coordinator, and what of it counts elsewhere.

Whoever joins trusts neither the coordinator nor the region with its machine: `doubtful` finds what could run code there.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ..errors import InputError, short
from .fields import Settings, is_own
from .recipe import Recipe
from .regions import RegionConfig

MOST_BYTES = 64 << 10
PLACES = ("model.name_or_path", "tokenizer.name_or_path", "data.path")
"""Keys that name a folder, or something on the Hub."""
_OF_A_MACHINE = {
    "training": ("output_dir", "resume_from_checkpoint", "push_to_hub", "disable_tqdm", "local_rank"),
    "regions": ("region", "coordinator", "run", "secret_file", "interface", "port", "announce", "join"),
}
"""Keys that say nothing of the run elsewhere; so do those with these beginnings, among them tokens:"""
_OF_AN_ACCOUNT = ("hub_", "trackio_")
_SECRETS = re.compile(r"\bhf_[A-Za-z0-9]{20,}|://[^/\s@]*:[^/\s@]*@")
"""A token of the Hub, and a URL with a password."""

_TEXTS = {
    "training": {
        *("lr_scheduler_type", "optim", "optim_args", "optim_target_modules", "torch_compile_mode"),
        *("logging_strategy", "eval_strategy", "save_strategy", "metric_for_best_model", "report_to"),
        *("run_name", "project", "log_level", "log_level_replica", "include_num_input_tokens_seen"),
        *("include_for_metrics", "train_sampling_strategy", "length_column_name", "label_names"),
        *("dataloader_multiprocessing_context", "ddp_backend", "fsdp"),
    },
    "peft": {
        *("task_type", "peft_type", "bias", "init_lora_weights", "target_modules", "exclude_modules"),
        *("modules_to_save", "layers_pattern", "target_parameters"),
    },
}
"""Keys whose text names neither code nor a file. The other keys of these sections may be numbers."""
_MAPPINGS = {
    "training": {
        *("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        *("liger_kernel_config", "fsdp_config", "accelerator_config"),
    },
    "peft": {"rank_pattern", "alpha_pattern", "trainable_token_indices"},
}
"""Keys whose mapping of plain words and numbers does not, either."""
_WORD = re.compile(r"[\w .+*()\[\]=,-]*")
"""Text that names no file, no repository (whose kernels Transformers would run) and no MODULE:NAME."""
_CODE_OF_CONFIGS = ("auto_map", "trust_remote_code")
_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation")
_KNOWN_IMPLEMENTATIONS = (
    *("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    *("batched_mm", "grouped_mm"),
)


class Handed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a region tells of its recipe.

    Attributes:
        text: the recipe, without what is of a machine or an account; empty if it cannot be handed over. In JSON: a few aliases
            of YAML may stand for billions of values.
        why: why it cannot; empty if it can.
        folders: those of `PLACES` that are folders or files on its machine, and not names on the Hub.
        batch: sequences of an inner step of a region.
    """

    text: Annotated[str, Meta(max_length=MOST_BYTES)] = ""
    why: Annotated[str, Meta(max_length=1000)] = ""
    folders: Annotated[tuple[Annotated[str, Meta(max_length=100)], ...], Meta(max_length=10)] = ()
    batch: Annotated[int, Meta(ge=0, le=1 << 53)] = 0


def handed_over(recipe: Recipe, regions: RegionConfig, batch: int) -> dict[str, Any]:
    """What a region tells the coordinator of its recipe, as JSON can express it: see `Handed`, which `received` makes of it.

    `regions`: its section, resolved: the recipe need not have the number of regions.
    """
    content = content_of(dataclasses.replace(recipe, regions=regions))
    _drop_own(content)
    try:
        text = json.dumps(content)
        is_same = json.loads(text) == content
    except (TypeError, ValueError, RecursionError):  # values that a script has put there may be anything
        is_same = False
    if not is_same:
        return {"why": "it has values that JSON cannot express"}
    if len(text.encode()) > MOST_BYTES:
        return {"why": f"it has {len(text.encode())} bytes, and a run keeps at most {MOST_BYTES}"}
    if _SECRETS.search(text):
        return {"why": "it holds a token, or an address with a password, which only its own machine may know"}
    folders = [key for key in PLACES if os.path.exists(at(recipe, key) or "")]
    return {"text": text, "folders": folders, "batch": batch}


def received(told: Mapping[str, Any]) -> Handed:
    """What a coordinator hands on. Raises InputError if that is nothing that `handed_over` returns."""
    try:
        return msgspec.convert(told, Handed)
    except msgspec.ValidationError as error:
        raise InputError(f"the coordinator gives what is no recipe of this version ({error}).") from None


def content_of(settings: Settings) -> dict[str, Any]:
    """The keys of a recipe or of a section that are not at their default: what a file of it holds."""
    content = {}
    for each in dataclasses.fields(settings):  # type: ignore[arg-type]
        value, default = getattr(settings, each.name), each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        if value != default or each.name == "method":
            content[each.name] = content_of(value) if isinstance(value, Settings) else value
    return content


def read_handed(handed: Handed, where: str) -> dict[str, Any]:
    """The sections of a recipe that is handed over, without what is of another machine. Raises InputError, which begins with
    `where`, if it is none.
    """
    try:
        content = json.loads(handed.text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {short(error, 200).rstrip('.')}.") from error
    Recipe.from_dict(content if isinstance(content, dict) else {}, where)
    _drop_own(content)
    return content


def _drop_own(content: dict[str, Any]) -> None:
    for section, names in _OF_A_MACHINE.items():
        kept = content.get(section)
        for key in [*kept] if kept else []:
            if key in names or (section == "training" and key.startswith(_OF_AN_ACCOUNT)):
                content[section] = {name: value for name, value in content[section].items() if name != key}


def at(recipe: Recipe, key: str) -> Any:
    """The value of SECTION.KEY."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def doubtful(recipe: Recipe, overrides: Iterable[str]) -> dict[str, Any]:
    """What somebody else's recipe may not decide: keys and values that run code, or may name it. Those that `overrides` give
    ("section.key=value") are the user's own.
    """
    mine = [override.partition("=")[0].strip() for override in overrides]
    return {
        key: value
        for key, value in _doubtful(recipe)
        if not any(key == own or key.startswith(f"{own}.") for own in mine)
    }


def _doubtful(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    for name in ("method", "codec"):
        if is_own(getattr(recipe.outer, name)):
            yield f"outer.{name}", getattr(recipe.outer, name)
    for section, given in (("training", recipe.training), ("peft", recipe.peft or {})):
        for name, value in given.items():
            is_mapping = isinstance(value, Mapping)
            if is_mapping and name in _MAPPINGS[section] and _is_plain(value):
                continue
            is_number = _is_number(value) and name not in _CODE_OF_CONFIGS
            if not is_mapping and (name in _TEXTS[section] or is_number):
                continue
            yield f"{section}.{name}", value
    yield from _of_config("model.config", recipe.model.config or {})


def _of_config(place: str, config: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = f"{place}.{name}"
        if name in _CODE_OF_CONFIGS or (name in _IMPLEMENTATIONS and value not in _KNOWN_IMPLEMENTATIONS):
            yield key, value
        elif isinstance(value, Mapping):
            yield from _of_config(key, value)
        elif not _is_plain(value):
            yield key, value


def _is_number(value: Any) -> bool:
    """Whether a value has no text in it."""
    if isinstance(value, list):
        return all(map(_is_number, value))
    return value is None or isinstance(value, bool | int | float)


def _is_plain(value: Any) -> bool:
    """Whether every text in a value is a `_WORD`."""
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return _WORD.fullmatch(value) is not None if isinstance(value, str) else _is_number(value)
