"""What the sections of a recipe demand of each other. No torch: a command checks this before it loads anything."""

import os

from ..errors import InputError, shown
from ..newer import INNER
from ..resolve import check as check_outer
from ..resolve import settings
from ..settings.recipe import Recipe

PATHS = ("/", "./", "../")
"""Beginnings of texts that can only be paths."""


def check_sections(recipe: Recipe) -> None:
    """Check the settings of the method, and what the sections demand of each other. Raises InputError."""
    check_outer(recipe.outer)
    inner = INNER.get(str(recipe.outer.method))
    if inner is not None and recipe.training.get("optim") != inner:
        given = shown(recipe.training["optim"]) if "optim" in recipe.training else "not given"
        raise InputError(
            f"outer.method={recipe.outer.method} is DiLoCo with {inner} inside, but training.optim is {given}. Set "
            f"training.optim={inner}, or outer.method=diloco with the same outer settings."
        )
    max_steps = recipe.training.get("max_steps", -1)
    if recipe.data.streaming and isinstance(max_steps, int) and max_steps <= 0:
        raise InputError(
            "data.streaming=true: a stream has no length. Set training.max_steps to the number of inner steps."
        )
    epochs = recipe.training.get("num_train_epochs", 3)
    if max_steps == 0 or (epochs == 0 and isinstance(max_steps, int) and max_steps < 0):
        name, value = ("num_train_epochs", epochs) if max_steps else ("max_steps", max_steps)
        raise InputError(
            f"training.{name}={value}: there is nothing to train. Set training.max_steps to the number of inner steps, or leave "
            "it out and set training.num_train_epochs."
        )
    if recipe.data.streaming and recipe.regions.shards == "dealt":
        raise InputError(
            "regions.shards=dealt with data.streaming=true: samples are dealt by their numbers, and a stream has none. "
            "Remove one of them."
        )
    for section in ("model", "tokenizer"):
        _refuse_missing(f"{section}.name_or_path", getattr(recipe, section).name_or_path)


def _refuse_missing(setting: str, name: str | None) -> None:
    """Refuse a path that is not there: libraries take it for a name on the Hub, and complain about its slashes."""
    if name is not None and name.startswith(PATHS) and not os.path.exists(name):
        raise InputError(
            f"{setting}={shown(name)}: there is no such folder or file. Correct the path, or give a name on the Hub."
        )


def outer_in_words(recipe: Recipe) -> str:
    """The settings of the method, with its defaults, in a line."""
    return ", ".join(f"{name}={value}" for name, value in settings(recipe.outer).items() if value is not None)
