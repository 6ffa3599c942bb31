"""Writes a first recipe for a model and a data set, with the settings of a method and a comment on every key of ours."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest, shown
from ..newer import INNER, known
from ..resolve import settings
from ..settings import OuterConfig
from ..settings.outer import AUTO, AUTO_VALUES
from ..settings.reading import read_yaml, yaml_of
from ..settings.recipe import Recipe
from ..settings.reference import keys

_TEMPLATE = Path(__file__).with_name("starter.yaml.j2")
_BLOCK_SIZE = 1024


def check_method(method: str) -> None:
    """Raises InputError if this package does not know it."""
    if method not in known():
        raise InputError(f"--method {shown(method)} is not known.{nearest(method, list(known()))}")


def positions_of(model: str) -> int | None:
    """The longest sequence that a model was made for; None if its config does not say, or cannot be read here."""
    from transformers import AutoConfig

    try:
        return getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    except Exception:  # the libraries raise anything; `train --dry-run` says what is wrong with the name
        return None


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
    positions: int | None = None,
) -> str:
    """A recipe in YAML, which trains `model` on `data` as it is. Raises InputError if a value is impossible.

    `model`: folder or name on the Hub, of trained weights and their tokenizer. `data`: what `datasets.load_dataset` loads, or
    "python-stdlib". `lora`: train an adapter instead of all parameters. `positions`: the longest sequence of the model.
    """
    given = dict(locals())
    from jinja2 import Environment, StrictUndefined

    meanings = {key.name: key.meaning for key in keys()}

    def about(key: str, more: str = "") -> str:
        return textwrap.fill(meanings[key] + more, 110, initial_indent="  # ", subsequent_indent="  # ")

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"shown": shown, "yaml": lambda value: yaml_of({"x": value})[2:].strip()}
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        **given,
        about=about,
        block_size=min(_BLOCK_SIZE, positions or _BLOCK_SIZE),
        inner=INNER.get(method),
        numbers=AUTO_VALUES.get(method, {}),
        outer=_outer(method),
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
