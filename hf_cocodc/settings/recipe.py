"""A recipe: a complete run as frozen dataclasses, one per section of the YAML file."""

import argparse
import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from . import OuterConfig, RegionConfig
from .fields import Limit, Names, Settings, at_least, build, hints_of, setting
from .reading import override_key, read_recipe


def _need_one(section: Any, name: str, **choices: str) -> None:
    """Raise InputError unless exactly one of two keys is given."""
    first, second = choices
    if (getattr(section, first) is None) == (getattr(section, second) is None):
        remedy = (
            "Give one of them."
            if getattr(section, first) is None
            else f"Remove one of them, for example with --set {name}.{first}=null."
        )
        described = " and ".join(f"{key} ({meaning})" for key, meaning in choices.items())
        raise InputError(f"{name} needs exactly one of {described}. {remedy}")


@dataclass(frozen=True, kw_only=True)
class ModelSection(Settings):
    """The model: a `config` (with `model_type`) for random weights, or a `name_or_path` for trained weights."""

    SECTION = "model"

    config: dict[str, Any] | None = setting(
        "Fields of a Transformers configuration, with model_type: a model with random weights."
    )
    name_or_path: str | None = setting("A folder or a name on the Hub: a model with trained weights.")
    dtype: str | None = setting(
        "Number format of the weights: float32, bfloat16 or float16; by default the model's own.",
        Names(("float32", "bfloat16", "float16")),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_one(self, "model", config="random weights", name_or_path="trained weights")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise InputError("model.config needs model_type: a word, for example llama.")


@dataclass(frozen=True, kw_only=True)
class TokenizerSection(Settings):
    """The tokenizer: `builtin: bytes`, or a `name_or_path` to load."""

    SECTION = "tokenizer"

    builtin: str | None = setting("bytes: each byte is a token.", Names(["bytes"]))
    name_or_path: str | None = setting("A folder, or a name on the Hub.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_one(self, "tokenizer", builtin="bytes", name_or_path="a folder, or a name on the Hub")


@dataclass(frozen=True, kw_only=True)
class DataSection(Settings):
    """Text from `datasets` (`path`, `name`, `split`) or `builtin: python-stdlib`, packed into blocks of tokens."""

    SECTION = "data"

    builtin: str | None = setting(
        "python-stdlib: the source of Python's standard library.", Names(["python-stdlib"])
    )
    path: str | None = setting(
        "Anything that datasets.load_dataset loads: a name on the Hub, or a folder of files."
    )
    name: str | None = setting("Configuration of the data set, for example wikitext-103-raw-v1.")
    split: str = setting("Split to train on.", default="train")
    eval_split: str = setting("Held-out split.", default="test")
    text_column: str = setting("Column that holds the text.", default="text")
    streaming: bool = setting("Read the data set during training, without a copy on the disk.", default=False)
    block_size: int = setting(
        "Tokens in a sequence: text is packed into blocks of this length.",
        Limit(lambda length: length >= 2, "must be at least 2 tokens"),
        default=1024,
    )
    num_proc: int | None = setting(
        "Processes that pack the text, at most one for each core; one by default. A stream is packed while it is read.",
        at_least(1),
    )
    eval_blocks: int | None = setting(
        "Blocks of the held-out split to evaluate on; all by default.", at_least(1)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_one(self, "data", builtin="python-stdlib", path="anything datasets loads")


@dataclass(frozen=True, kw_only=True)
class EvaluationSection(Settings):
    """The metrics on the held-out split, and the weights (global or local) on which they are measured."""

    SECTION = "evaluation"

    metrics: list[str] = setting(
        "perplexity, accuracy (of the next token), or both.",
        Names(["perplexity", "accuracy"]),
        default=["perplexity", "accuracy"],
    )
    on: str = setting(
        "Weights that are evaluated: global, or local (each region's own).",
        Names(["global", "local"]),
        default="global",
    )


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """A complete run. `training` accepts every field of `TrainingArguments`, `peft` every field of `LoraConfig`."""

    SECTION = ""

    model: ModelSection
    tokenizer: TokenizerSection
    data: DataSection
    training: dict[str, Any]
    outer: OuterConfig = field(default_factory=OuterConfig)
    regions: RegionConfig = field(default_factory=RegionConfig)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    peft: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: str | os.PathLike, overrides: Sequence[str] = ()) -> "Recipe":
        """Read a recipe: a YAML file, or one that comes with the package, by its name (quickstart/diloco). It may extend
        another one (`extends: other.yaml`): see `reading.read_recipe`.

        Args:
            path: the file or the name.
            overrides: changes, each "section.key=value"; the value is YAML, too.

        Raises:
            InputError: the file does not exist, is not valid YAML, or has an unknown key or an impossible value. The message
                says where.
        """
        content, where = read_recipe(path)
        return cls.from_dict(content, where, overrides)

    @classmethod
    def from_dict(
        cls, content: Mapping[str, Any], where: str = "recipe", overrides: Sequence[str] = ()
    ) -> "Recipe":
        """Build a recipe from nested mappings, with changes. Raises InputError like `load`, which begins with `where`."""
        if overrides:
            content = copy.deepcopy(dict(content))
        for override in overrides:
            override_key(content, override, _is_key)  # type: ignore[arg-type]
        try:
            return build(cls, content)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def _is_key(key: str) -> bool:
    """Whether recipes have this section, or this key of one of ours: a library knows those of the others."""
    section, *names = key.split(".")
    kind = hints_of(Recipe).get(section)
    if not names or kind is None:
        return kind is not None
    is_ours = isinstance(kind, type) and issubclass(kind, Settings)
    return is_ours and len(names) == 1 and names[0] in hints_of(kind)


def facts_of_data(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of its training data and tokenizer, by names in the recipe: regions compare it before they train.

    Of a folder or a file, only the last part of its path counts: it may lie elsewhere on each machine.
    """
    kept = ("builtin", "name", "split", "text_column", "streaming", "block_size")
    return {
        **{f"data.{name}": getattr(recipe.data, name) for name in kept},
        "data.path": _of_any_machine(recipe.data.path),
        "tokenizer.builtin": recipe.tokenizer.builtin,
        "tokenizer.name_or_path": _of_any_machine(recipe.tokenizer.name_or_path),
    }


def _of_any_machine(name: str | None) -> str | None:
    return Path(name).absolute().name if name is not None and os.path.exists(name) else name


def add_recipe(parser: argparse.ArgumentParser, is_needed: bool = True) -> None:
    """Add the recipe and `--set`, which become `options.recipe` and `options.overrides`."""
    parser.add_argument(
        "recipe",
        nargs=None if is_needed else "?",
        help="recipe: a YAML file, or one that comes with the package: quickstart/METHOD",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="change a value of the recipe, for example outer.sync_interval=50; may be given more than once",
    )
