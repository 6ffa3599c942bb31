"""What a run is, as frozen dataclasses: the sections of a recipe and their YAML.

`OuterConfig` and `RegionConfig` are flat, with a help text a field, so `HfArgumentParser` turns them into flags. A
field left at None takes the method's default (`methods.py`) or, for regions, the environment's value. No torch in here.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import InputError

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
            require(self, name, lambda v: v >= 1, "must be at least 1")
        _take_number(self, "overlap_steps")
        _take_number(self, "staleness_penalty")
        require(
            self,
            "overlap_steps",
            lambda v: v == "auto" or (isinstance(v, int) and v >= 0),
            "must be from 0, or auto",
        )
        require(self, "clip_momentum", lambda v: v > 0, "must be positive")
        require(self, "compensation_strength", lambda v: v >= 0, "must not be negative")
        require(self, "utilization", lambda v: 0 < v <= 1, "must lie in (0, 1]")
        require(self, "outer_lr", lambda v: v > 0, "must be positive")
        require(self, "outer_momentum", lambda v: 0 <= v < 1, "must lie in [0, 1)")
        require(self, "mixing_alpha", lambda v: 0 <= v <= 1, "must lie in [0, 1]")
        require(self, "device", lambda v: v in DEVICES, f"must be one of {', '.join(DEVICES)}")

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
        require(self, "count", lambda v: v >= 1, "must be at least 1", "regions")
        _take_number(self, "connections")
        require(
            self,
            "connections",
            lambda v: v == "auto" or (isinstance(v, int) and 1 <= v <= 64),
            "must lie in 1 .. 64, or be auto",
            "regions",
        )
        require(self, "rate_limit", lambda v: v > 0, "must be positive", "regions")
        require(self, "timeout_s", lambda v: v > 0, "must be positive", "regions")
        require(self, "region", lambda v: v >= 0, "must not be negative", "regions")
        require(
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


def _take_number(config: Any, name: str) -> None:
    """A number in words, as a flag gives it where a word is allowed too."""
    value = getattr(config, name)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            object.__setattr__(config, name, int(value) if value.isdigit() else float(value))


def require(config: Any, name: str, holds: Any, rule: str, section: str = "outer") -> None:
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise InputError(f"{section}.{name}={value} {rule}.")
