"""What a run is, as frozen dataclasses: the sections of a recipe and their YAML.

`OuterConfig` and `RegionConfig` are flat, with a help text a field, so `HfArgumentParser` turns them into flags. A
field left at None takes the method's default (`methods.py`) or, for regions, the environment's value. No torch in here.
"""

import contextlib
import dataclasses
import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from .errors import InputError, nearest

T = TypeVar("T")

ENV_REGION = "HF_COCODC_REGION"
ENV_REGIONS = "HF_COCODC_REGIONS"
ENV_STORE = "HF_COCODC_STORE"
DEVICES = ("host", "model")
ENDINGS = ("auto", "finish", "stop", "continue")


def _help(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """How regions synchronise. A field left at None takes its method's default, which is its paper's."""

    method: str = _help("Method: diloco, streaming, eager, co2, dilocox or cocodc.", "diloco")
    sync_interval: int | None = _help("H: inner steps in which each fragment is sent once.")
    num_fragments: int | None = _help("P: parts of the model that are sent on their own.")
    fragment_pattern: str | None = _help("Which blocks form a fragment: whole, strided or sequential.")
    overlap_steps: int | str | None = _help(
        "tau: inner steps made while a transfer travels; auto follows the link (cocodc only)."
    )
    merge: str | None = _help(
        "What becomes of local params at a landing: replace, mix, additive or compensate."
    )
    mixing_alpha: float | None = _help(
        "Weight of the local params where global params land: 0 global only, 1 local only."
    )
    outer_lr: float | None = _help("Learning rate of the outer optimizer.")
    outer_momentum: float | None = _help("Nesterov momentum of the outer optimizer.")
    codec: str | None = _help(
        "What outer gradients travel as: fp32, bf16, fp16, int8, int4, fp4, topk or lowrank."
    )
    error_feedback: bool | None = _help("Add what a codec lost in one transfer to the next one.")
    rank: int | None = _help("Rank r_1 of the low-rank codec.")
    staleness_penalty: float | str | None = _help(
        "CO2's penalty Lambda: gap, none, or a constant of at least 1."
    )
    clip_momentum: float | None = _help("CO2's bound phi on each element of the outer momentum.")
    compensation: str | None = _help("CoCoDC's compensation: adaptive, fixed, lr_normalized or additive.")
    compensation_strength: float | None = _help("CoCoDC's lambda (lambda_0 where compensation=adaptive).")
    utilization: float | None = _help("CoCoDC's gamma: share of the link's time to use.")
    sends_per_interval: int | None = _help(
        "CoCoDC's N: transfers in sync_interval steps; by default as the link allows."
    )
    digest_interval: int = _help(
        "Rounds between two checks that all regions hold the same global params; those transfers take longer by a checksum.",
        10,
    )
    device: str = _help(
        "Where global params and outer state are kept: host (the CPU's memory) or model (with the model's parameters).",
        "host",
    )

    def __post_init__(self) -> None:
        for name in ("sync_interval", "num_fragments", "digest_interval", "rank", "sends_per_interval"):
            _require(self, name, lambda v: v >= 1, "must be at least 1")
        _take_number(self, "overlap_steps")
        _take_number(self, "staleness_penalty")
        _require(
            self,
            "overlap_steps",
            lambda v: v == "auto" or (isinstance(v, int) and v >= 0),
            "must be from 0, or auto",
        )
        _require(self, "clip_momentum", lambda v: v > 0, "must be positive")
        _require(self, "compensation_strength", lambda v: v >= 0, "must not be negative")
        _require(self, "utilization", lambda v: 0 < v <= 1, "must lie in (0, 1]")
        _require(self, "outer_lr", lambda v: v > 0, "must be positive")
        _require(self, "outer_momentum", lambda v: 0 <= v < 1, "must lie in [0, 1)")
        _require(self, "mixing_alpha", lambda v: 0 <= v <= 1, "must lie in [0, 1]")
        _require(self, "device", lambda v: v in DEVICES, f"must be one of {', '.join(DEVICES)}")

    def given(self) -> dict[str, Any]:
        """The method's arguments that are not left to its defaults."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None and name not in ("method", "digest_interval", "device")
        }


@dataclass(frozen=True, kw_only=True)
class RegionConfig:
    """Which region this is, and how it reaches the others. Fields left at None come from the environment."""

    region: int | None = _help(f"This region, from 0 (environment {ENV_REGION}).")
    count: int | None = _help(f"M: number of regions (environment {ENV_REGIONS}).")
    store: str | None = _help(f"HOST:PORT of the store that all regions reach (environment {ENV_STORE}).")
    interface: str | None = _help(
        "Network interface of the link, such as wg0; by default the one that reaches the store."
    )
    connections: int | str | None = _help(
        "TCP connections to each other region; auto takes as many as the round trip asks for.", "auto"
    )
    rate_limit: float | None = _help(
        "Mbit/s that this region sends at most, to leave room on a link that others use; no limit by default."
    )
    timeout_s: float = _help("Seconds without a sign of life after which a region counts as lost.", 120.0)
    when_one_ends: str = _help(
        "When one region ends early. auto: all finish if its training has come to an end, all stop with a checkpoint if it "
        "was interrupted; finish or stop: always that; continue: as auto, but the others go on while it has come to an end.",
        "auto",
    )

    def __post_init__(self) -> None:
        _require(self, "count", lambda v: v >= 1, "must be at least 1", "regions")
        _take_number(self, "connections")
        _require(
            self,
            "connections",
            lambda v: v == "auto" or (isinstance(v, int) and 1 <= v <= 64),
            "must lie in 1 .. 64, or be auto",
            "regions",
        )
        _require(self, "rate_limit", lambda v: v > 0, "must be positive", "regions")
        _require(self, "timeout_s", lambda v: v > 0, "must be positive", "regions")
        _require(self, "region", lambda v: v >= 0, "must not be negative", "regions")
        _require(
            self, "when_one_ends", lambda v: v in ENDINGS, f"must be one of {', '.join(ENDINGS)}", "regions"
        )
        if self.store is not None and not re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+):\d{1,5}", self.store):
            raise InputError(f"regions.store={self.store!r} must be HOST:PORT, for example 10.0.0.1:29650.")

    def resolved(self, env: Mapping[str, str] | None = None) -> "RegionConfig":
        """The same with None filled from the environment, and checked: who is alone needs no store.

        Raises:
            InputError: a value and the environment contradict each other, or something needed is missing.
        """
        env = os.environ if env is None else env
        region = from_env(self.region, env, ENV_REGION, "regions.region")
        count = from_env(self.count, env, ENV_REGIONS, "regions.count")
        store = self.store or env.get(ENV_STORE)
        count = 1 if count is None else count
        if region is None:
            if count > 1:
                raise InputError(
                    f"regions.count={count} but this process does not know which region it is. Set {ENV_REGION} to "
                    f"0 .. {count - 1} (hf-cocodc train does it for you)."
                )
            region = 0
        if region >= count:
            raise InputError(
                f"region {region} of {count}: regions are numbered 0 .. {count - 1}. Lower {ENV_REGION} or raise "
                f"{ENV_REGIONS} (regions.count)."
            )
        if count > 1 and store is None:
            raise InputError(
                f"{count} regions need a store to find each other. Start one with `hf-cocodc store` where all of them "
                f"reach it, and set {ENV_STORE}=HOST:PORT (regions.store, --store)."
            )
        return dataclasses.replace(self, region=region, count=count, store=store)


def from_env(value: int | None, env: Mapping[str, str], key: str, name: str) -> int | None:
    """`value`, or the environment's where it is None.

    Raises:
        InputError: the two contradict each other, or the environment's is no number.
    """
    if key not in env:
        return value
    if not re.fullmatch(r"\d+", env[key]):
        raise InputError(f"{key}={env[key]!r} must be a whole number from 0.")
    if value is not None and value != int(env[key]):
        raise InputError(
            f"{name}={value} but the environment says {key}={env[key]}. Make them equal, or unset one."
        )
    return int(env[key])


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Either a `config` (with `model_type`) to start from random weights, or a `name_or_path` to load."""

    config: dict[str, Any] | None = None
    name_or_path: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if (self.config is None) == (self.name_or_path is None):
            raise InputError(
                "model needs exactly one of config (random weights) and name_or_path (trained weights)."
            )
        if self.config is not None and "model_type" not in self.config:
            raise InputError("model.config needs model_type, for example llama.")
        known = ("float32", "bfloat16", "float16")
        if self.dtype is not None and self.dtype not in known:
            raise InputError(f"model.dtype={self.dtype!r} is not known.{nearest(self.dtype, known)}")


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """Either `builtin: bytes` or a `name_or_path` to load."""

    builtin: str | None = None
    name_or_path: str | None = None

    def __post_init__(self) -> None:
        if (self.builtin is None) == (self.name_or_path is None):
            raise InputError("tokenizer needs exactly one of builtin (bytes) and name_or_path.")
        if self.builtin not in (None, "bytes"):
            raise InputError(
                f"tokenizer.builtin={self.builtin!r} is not known.{nearest(str(self.builtin), ['bytes'])}"
            )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Text, from `datasets` (`path`, `name`, `split`) or `builtin: python-stdlib`, packed into blocks of tokens."""

    builtin: str | None = None
    path: str | None = None
    name: str | None = None
    split: str = "train"
    eval_split: str = "test"
    text_column: str = "text"
    streaming: bool = False
    block_size: int = 1024
    eval_blocks: int | None = None

    def __post_init__(self) -> None:
        if (self.builtin is None) == (self.path is None):
            raise InputError(
                "data needs exactly one of builtin (python-stdlib) and path (anything datasets loads)."
            )
        if self.builtin not in (None, "python-stdlib"):
            raise InputError(
                f"data.builtin={self.builtin!r} is not known.{nearest(str(self.builtin), ['python-stdlib'])}"
            )
        _require(self, "block_size", lambda v: v >= 2, "must be at least 2 tokens", "data")
        _require(self, "eval_blocks", lambda v: v >= 1, "must be at least 1", "data")


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """What is measured on the held-out split, and on which weights."""

    metrics: list[str] = field(default_factory=lambda: ["perplexity", "accuracy"])
    on: str = "global"

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in ("perplexity", "accuracy"):
                raise InputError(
                    f"evaluation.metrics: {name!r} is not known.{nearest(name, ['perplexity', 'accuracy'])}"
                )
        if self.on not in ("global", "local"):
            raise InputError(
                f"evaluation.on={self.on!r} is not known.{nearest(self.on, ['global', 'local'])}"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete run. `training` holds any `TrainingArguments` field, `peft` any `LoraConfig` field."""

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
        """Read a recipe from YAML; each override is "section.key=value", its value YAML too.

        Raises:
            InputError: no such file, broken YAML, unknown keys, impossible values; the message says where.
        """
        file = Path(path)
        if not file.is_file():
            raise InputError(
                f"recipe {str(path)!r} is not a file. Recipes of this project lie under recipes/."
            )
        content = _read_yaml(file.read_text(encoding="utf-8"), str(path))
        if not isinstance(content, dict):
            raise InputError(
                f"recipe {str(path)!r} must be a mapping of sections, for example outer: and training:."
            )
        for override in overrides:
            _override(content, override)
        return cls.from_dict(content, f"recipe {file.name}")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """The recipe that nested mappings describe; raises InputError as `load` does."""
        return _build(cls, content, where, "")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where PyYAML still reads 1.1: 4e-4 is a number, `on` and `no` are words. A key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise InputError(
            f"{where}{line}: not valid YAML: {getattr(error, 'problem', None) or error}."
        ) from error


def _override(content: dict, override: str) -> None:
    key, equals, value = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise InputError(f"--set {override!r} must be SECTION.KEY=VALUE, for example outer.sync_interval=50.")
    target = content.setdefault(section, {})
    *parents, last = name.split(".")
    for parent in parents:
        if isinstance(target, dict):
            target = target.setdefault(parent, {})
    if not isinstance(target, dict):
        raise InputError(f"--set {override!r}: {key.rpartition('.')[0]} is not a mapping in the recipe.")
    target[last] = _read_yaml(value, f"--set {override!r}")


def _build(cls: type[T], content: Any, where: str, section: str) -> T:
    if not isinstance(content, Mapping):
        raise InputError(f"{where}: {section} must be a mapping of keys, not {content!r}.")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    dot = f"{section}." if section else ""
    for key in content:
        if key not in fields:
            raise InputError(f"{where}: unknown key {dot}{key}.{nearest(str(key), list(fields))}")
    for name, each in fields.items():
        if name not in content and each.default is each.default_factory is dataclasses.MISSING:
            raise InputError(
                f"{where}: section {dot}{name} is missing. A recipe needs model, tokenizer, data and training."
            )
    values = {key: _convert(value, hints[key], where, f"{dot}{key}") for key, value in content.items()}
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _convert(value: Any, hint: Any, where: str, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where, name)  # type: ignore[arg-type]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = tuple(get_origin(option) or option for option in options)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("nothing" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise InputError(f"{where}: {name}={value!r} must be {wanted}, not {type(value).__name__}.")
    return value


def _take_number(config: Any, name: str) -> None:
    """A number in words, as a flag gives it where a word is allowed too."""
    value = getattr(config, name)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            object.__setattr__(config, name, int(value) if value.isdigit() else float(value))


def _require(config: Any, name: str, holds: Any, rule: str, section: str = "outer") -> None:
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise InputError(f"{section}.{name}={value} {rule}.")
