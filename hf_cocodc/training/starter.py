"""Writes a first recipe for a model and a data set, with the settings of a method and a comment on every key of ours."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from ..errors import InputError, nearest, shown
from ..newer import INNER, known
from ..resolve import settings
from ..settings import OuterConfig
from ..settings.outer import AUTO, AUTO_VALUES, FOLLOWING
from ..settings.reading import read_yaml
from ..settings.recipe import Recipe
from ..settings.reference import keys
from ..settings.writing import scalar

_WIDTH = 110
_BUILTIN = "python-stdlib"
_ON_TRAINING = {
    "output_dir": "Each region writes into a folder of its own below this one.",
    "max_steps": "Inner steps of each region.",
    "per_device_train_batch_size": "Sequences that a GPU takes at once: raise it until its memory is full.",
    "gradient_accumulation_steps": "A region's batch is this times the line above, times its GPUs.",
    "optim": "The inner optimizer: Muon for matrices, AdamW for the rest.",
    "learning_rate": "For the inner optimizer, as for AdamW: what you would take in one place.",
    "bf16": "Compute in bfloat16 (autocast): true for a GPU that has it.",
    "save_steps": "Checkpoints are exact: after a stop, the same command with --resume goes on.",
    "report_to": "Or tensorboard, trackio, wandb.",
    "seed": "Equal in all regions; each draws its own samples in any case.",
}
_OFFERED: dict[str, dict[str, Any]] = {"regions": {"rate_limit": 90.0, "min": 1}}
"""By section: keys that are written as comments, with a value as an example."""


def starter(
    model: str,
    data: str,
    *,
    data_name: str | None = None,
    text_column: str = "text",
    eval_split: str = "test",
    method: str = "streaming",
    num_regions: int = 2,
    max_steps: int = 1000,
    lora: bool = False,
    bf16: bool = True,
) -> str:
    """A recipe in YAML, which trains `model` on `data` as it is. Raises InputError if a value is impossible.

    `model`: folder or name on the Hub, of trained weights and their tokenizer. `data`: what `datasets.load_dataset` loads, or
    "python-stdlib". `lora`: train an adapter instead of all parameters.
    """
    if method not in known():
        raise InputError(f"--method {shown(method)} is not known.{nearest(method, list(known()))}")
    is_builtin = data == _BUILTIN
    of_data: dict[str, Any] = {"builtin": data} if is_builtin else {"path": data, "name": data_name}
    if not is_builtin:
        of_data |= {"text_column": text_column, "eval_split": eval_split}
    content: dict[str, Any] = {
        "model": {"name_or_path": model, "dtype": "bfloat16" if lora else "float32"},
        "tokenizer": {"name_or_path": model},
        "data": {**of_data, "block_size": 1024, "eval_blocks": 128},
        "peft": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"} if lora else None,
        "training": {
            "output_dir": f"runs/{model.rstrip('/').rpartition('/')[2].lower()}-{method}",
            "max_steps": max_steps,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 16,
            "per_device_eval_batch_size": 1,
            "optim": INNER.get(method),
            "learning_rate": 2e-4 if lora else 2e-5,
            "lr_scheduler_type": "cosine",
            "warmup_steps": max(1, max_steps // 20),
            "bf16": bf16,
            "logging_steps": 10,
            "eval_strategy": "steps",
            "eval_steps": max(1, max_steps // 10),
            "eval_on_start": True,
            "save_strategy": "steps",
            "save_steps": max(1, max_steps // 10),
            "save_total_limit": 2,
            "report_to": "none",
            "seed": 42,
        },
        "outer": _outer(method),
        "regions": {"count": num_regions},
    }
    text = "\n".join(
        [
            f"# {method}: trains {shown(model)} on {shown(data)}, in {num_regions} regions. Written by `hf-cocodc recipe new`.",
            "# `hf-cocodc recipe keys` lists all keys. The values under `outer` are the method's own, most of them its paper's.",
            *(
                line
                for name, section in content.items()
                if section is not None
                for line in _section(name, section)
            ),
            "",
        ]
    )
    Recipe.from_dict(read_yaml(text, "the recipe"))
    return text


def _outer(method: str) -> dict[str, Any]:
    """The settings of a method, without those that follow from others by default; `auto` where our studies found other values."""
    defaults = {name: each.default for name, each in inspect.signature(known()[method]).parameters.items()}
    return {
        name: AUTO if name in AUTO_VALUES.get(method, {}) else value
        for name, value in settings(OuterConfig(method=method)).items()
        if defaults.get(name, value) is not None
    }


def _section(name: str, section: dict[str, Any]) -> Iterator[str]:
    meanings = {key.name: key.meaning for key in keys()}
    yield f"{name}:"
    for key, value in section.items():
        if value is None:
            continue
        meaning = _ON_TRAINING.get(key, "") if name == "training" else meanings.get(f"{name}.{key}", "")
        if key in FOLLOWING and value == AUTO:
            meaning = f"{meaning} Here {AUTO_VALUES[section['method']][key]:g}."
        yield from _comment(meaning, "  ")
        yield f"  {key}: {scalar(value)}"
    for key, value in _OFFERED.get(name, {}).items():
        yield from _comment(meanings[f"{name}.{key}"], "  ")
        yield f"  # {key}: {scalar(value)}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
