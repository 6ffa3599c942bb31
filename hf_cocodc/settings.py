"""The settings of a run as frozen dataclasses: the sections `outer` and `regions` of a recipe.

`OuterConfig` and `RegionConfig` are flat, and each field has a help text: `HfArgumentParser` can turn them into flags. A
field that is None takes the default of the method (`methods.py`) or, in `RegionConfig`, the value from the environment.
This module must not import torch.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import InputError, shown

logger = logging.getLogger(__name__)

ENV_REGION = "HF_COCODC_REGION"
ENV_REGIONS = "HF_COCODC_REGIONS"
ENV_STORE = "HF_COCODC_STORE"
ENV_RUN = "HF_COCODC_RUN"
DEVICES = ("host", "model")
ON_NONFINITE = ("restart", "stop")
OF_EVERY_METHOD = ("method", "digest_interval", "on_nonfinite", "nonfinite_rounds", "device")
"""Fields of `OuterConfig` that are no settings of a method."""
ENDINGS = ("auto", "finish", "stop", "continue")


def _help(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """How regions synchronise. A field that is None takes the default of the method, which comes from its paper."""

    method: str = _help("Method: diloco, streaming, eager, co2, dilocox or cocodc.", "diloco")
    sync_interval: int | None = _help("H: each fragment is sent once every H inner steps.")
    num_fragments: int | None = _help("P: number of parts of the model that are sent separately.")
    fragment_pattern: str | None = _help("Which blocks form a fragment: whole, strided or sequential.")
    split_rows: bool | None = _help(
        "Split large parameters outside the blocks (embedding, head) by rows, so that fragments have similar sizes."
    )
    overlap_steps: int | str | None = _help(
        "tau: inner steps between the send and the landing of a transfer; auto follows the link (cocodc only)."
    )
    merge: str | None = _help(
        "How local params take in global params at a landing: replace, mix, additive or compensate."
    )
    mixing_alpha: float | None = _help(
        "Weight of the local params at a landing (merge=mix): 0 means only global, 1 only local."
    )
    outer_lr: float | None = _help("Learning rate of the outer optimizer.")
    outer_momentum: float | None = _help("Nesterov momentum of the outer optimizer.")
    codec: str | None = _help(
        "Format in which outer gradients travel: fp32, bf16, fp16, int8, int4, fp4, topk or lowrank."
    )
    error_feedback: bool | None = _help(
        "Add the values that the codec loses in one transfer to the next one."
    )
    rank: int | None = _help("Rank r_1 of the low-rank codec.")
    staleness_penalty: float | str | None = _help(
        "CO2's staleness penalty Lambda, which divides the update: gap (measured; about 2 in a steady run, as if outer_lr "
        "were half), none, or a constant of at least 1."
    )
    clip_momentum: float | str | None = _help(
        "CO2's bound phi on each element of the outer momentum, in units of one round's steps: 1 means sync_interval inner "
        "learning rates. none: no bound."
    )
    compensation: str | None = _help("CoCoDC's compensation: adaptive, fixed, lr_normalized or additive.")
    compensation_strength: float | None = _help("CoCoDC's lambda (lambda_0 with compensation=adaptive).")
    utilization: float | None = _help("CoCoDC's gamma: share of the link's time to use.")
    sends_per_interval: int | None = _help(
        "CoCoDC's N: transfers per sync_interval inner steps; by default as many as the link allows."
    )
    digest_interval: int = _help(
        "Rounds between two checks that all regions hold the same global params. A check adds a checksum to the transfer.",
        10,
    )
    on_nonfinite: str = _help(
        "What a region does after nonfinite_rounds: restart (take the global params and a fresh state of the inner optimizer) "
        "or stop (all regions stop with a checkpoint).",
        "restart",
    )
    nonfinite_rounds: int = _help(
        "Rounds in a row with an outer gradient that is not finite, after which a region does what on_nonfinite says.",
        3,
    )
    device: str = _help(
        "Memory for global params and outer state: host (CPU memory) or model (the device of the model's parameters).",
        "host",
    )

    def __post_init__(self) -> None:
        for name in ("sync_interval", "num_fragments", "digest_interval", "rank", "sends_per_interval"):
            require(self, name, lambda v: v >= 1, "must be at least 1")
        require(self, "nonfinite_rounds", lambda v: v >= 1, "must be at least 1")
        require(
            self, "on_nonfinite", lambda v: v in ON_NONFINITE, f"must be one of {', '.join(ON_NONFINITE)}"
        )
        _take_number(self, "overlap_steps")
        _take_number(self, "staleness_penalty")
        _take_number(self, "clip_momentum")
        require(
            self,
            "overlap_steps",
            lambda v: v == "auto" or (isinstance(v, int) and v >= 0),
            "must be a whole number from 0, or auto",
        )
        require(self, "compensation_strength", lambda v: v >= 0, "must not be negative")
        require(self, "utilization", lambda v: 0 < v <= 1, "must lie in (0, 1]")
        require(self, "outer_lr", lambda v: v > 0, "must be positive")
        require(self, "outer_momentum", lambda v: 0 <= v < 1, "must lie in [0, 1)")
        require(self, "mixing_alpha", lambda v: 0 <= v <= 1, "must lie in [0, 1]")
        require(self, "device", lambda v: v in DEVICES, f"must be one of {', '.join(DEVICES)}")

    def given(self) -> dict[str, Any]:
        """The arguments for the method, without the fields that are None."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None and name not in OF_EVERY_METHOD
        }


@dataclass(frozen=True, kw_only=True)
class RegionConfig:
    """Which region this is, and how it reaches the others. Fields that are None take the value from the environment."""

    region: int | None = _help(f"Number of this region, from 0 (environment {ENV_REGION}).")
    count: int | None = _help(f"M: number of regions (environment {ENV_REGIONS}).")
    store: str | None = _help(f"HOST:PORT of the store that all regions reach (environment {ENV_STORE}).")
    run: str | None = _help(
        f"Name of the run, equal in all its regions: runs of different names can meet at one store (environment {ENV_RUN}). "
        "By default the name of the output folder; of the script where there is no output folder."
    )
    interface: str | None = _help(
        "Network interface of the link, for example wg0; by default the interface that reaches the store."
    )
    connections: int | str | None = _help(
        "TCP connections to each other region; auto chooses the number by the round-trip time.", "auto"
    )
    rate_limit: float | None = _help(
        "Highest rate in Mbit/s at which this region sends, to leave room on a shared link; no limit by default."
    )
    start_timeout_s: float = _help("Seconds to wait at the start until all regions are there.", 600.0)
    timeout_s: float = _help("A region is lost after this many seconds without a sign of life.", 120.0)
    stuck_timeout_s: float = _help(
        "A region that is alive but makes no inner step is lost after this many seconds.", 1200.0
    )
    may_differ: list[str] | str | None = _help(
        "Names of training and data settings that may differ between regions, and change at a resume: a list, or separated "
        "by commas. For example learning_rate,batch."
    )
    when_one_ends: str = _help(
        "What happens when one region ends early. auto: all regions finish if its training is over, and all stop with a "
        "checkpoint if it was interrupted. finish or stop: always that. continue: like auto, but the others go on if its "
        "training is over.",
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
        for name in ("start_timeout_s", "timeout_s", "stuck_timeout_s"):
            require(
                self, name, lambda v: 0 < v <= 1e6, "must be positive, and at most 1e6 (11 days)", "regions"
            )
        require(
            self,
            "may_differ",
            lambda v: isinstance(v, str) or all(isinstance(name, str) for name in v),
            "must be names",
            "regions",
        )
        require(self, "run", lambda v: 0 < len(v) <= 100, "must have 1 .. 100 characters", "regions")
        require(self, "region", lambda v: v >= 0, "must not be negative", "regions")
        require(
            self, "when_one_ends", lambda v: v in ENDINGS, f"must be one of {', '.join(ENDINGS)}", "regions"
        )
        if self.store is not None:
            found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+):(\d{1,5})", self.store)
            if found is None or not 1 <= int(found[2]) <= 65_535:
                raise InputError(
                    f"regions.store={shown(self.store)} must be HOST:PORT, for example 10.0.0.1:29650, with a port in 1 .. 65535."
                )
            check_host("regions.store", found[1].strip("[]"))

    @property
    def allowed(self) -> list[str]:
        """The names in `may_differ`, sorted."""
        names = self.may_differ.split(",") if isinstance(self.may_differ, str) else self.may_differ or []
        return sorted({name.strip() for name in names} - {""})

    def resolved(self, env: Mapping[str, str] | None = None) -> "RegionConfig":
        """A checked copy in which the environment fills the fields that are None. A single region needs no store.

        Raises:
            InputError: a value contradicts the environment, or a needed value is missing.
        """
        env = os.environ if env is None else env
        region = from_env(self.region, env, ENV_REGION, "regions.region")
        count = from_env(self.count, env, ENV_REGIONS, "regions.count")
        store = self.store or env.get(ENV_STORE)
        if count is None:
            check_alone(region, store)
            warn_alone()
            count = 1
        if region is None:
            if count > 1:
                raise InputError(
                    f"regions.count={count} but this process does not know which region it is. Set {ENV_REGION} to "
                    f"0 .. {count - 1} (hf-cocodc train sets it for you)."
                )
            region = 0
        if region >= count:
            raise InputError(
                f"region {region} of {count}: regions are numbered 0 .. {count - 1}. Lower {ENV_REGION} or raise "
                f"{ENV_REGIONS} (regions.count)."
            )
        if count > 1 and store is None:
            raise InputError(
                f"{count} regions need a store to find each other. Start one with `hf-cocodc store` on a "
                f"machine that all regions can reach, and set {ENV_STORE}=HOST:PORT (regions.store, --store)."
            )
        return dataclasses.replace(self, region=region, count=count, store=store, run=self.name_of_run(env))

    def name_of_run(self, env: Mapping[str, str]) -> str | None:
        """`run`, or the name in the environment if it is None.

        Raises:
            InputError: the two names differ.
        """
        if self.run is not None and env.get(ENV_RUN, self.run) != self.run:
            raise InputError(
                f"regions.run={shown(self.run)} but the environment says {ENV_RUN}={shown(env[ENV_RUN])}. Make them equal, or "
                "unset one."
            )
        return self.run or env.get(ENV_RUN)


def check_alone(region: int | None, store: str | None) -> None:
    """Check a region that was not told how many regions there are: it is alone.

    Raises:
        InputError: it was told its number, or a store: it is meant to have company.
    """
    told = f"which region this is ({region})" if region is not None else f"a store ({store})"
    if region is not None or store is not None:
        raise InputError(
            f"{told} is given, but not how many regions there are: this region would train alone. Set {ENV_REGIONS} "
            f"(regions.count) in every region; to train alone, set it to 1."
        )


@functools.cache
def warn_alone() -> None:
    """Say, once in a process, that nothing told this region of others."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "training as a single region: nobody else takes part, because nothing says how many regions there are. For several "
            "regions, set in each of them:\n    export %s=2\n    export %s=0    # 1 in the next region\n    export %s=HOST:PORT"
            "    # of `hf-cocodc store`\nIf you mean to train alone, say so: %s=1, or RegionConfig(count=1).",
            *(ENV_REGIONS, ENV_REGION, ENV_STORE, ENV_REGIONS),
        )


def from_env(value: int | None, env: Mapping[str, str], key: str, name: str) -> int | None:
    """`value`, or the value of `key` in the environment if `value` is None.

    Raises:
        InputError: the two values contradict each other, or the one from the environment is not a number.
    """
    if key not in env:
        return value
    if not re.fullmatch(r"\d{1,9}", env[key]):
        raise InputError(f"{key}={shown(env[key])} must be a whole number from 0.")
    if value is not None and value != int(env[key]):
        raise InputError(
            f"{name}={value} but the environment says {key}={env[key]}. Make them equal, or unset one."
        )
    return int(env[key])


def check_host(name: str, host: str) -> None:
    """Raise InputError if `host` cannot be the name or the address of a machine. Whether there is one, only a network can say."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise InputError(f"{name}: {shown(host)} is not the name of a machine ({error}).") from error


def _take_number(config: Any, name: str) -> None:
    """Turn a field that holds a number as text into a number. Flags give text to fields that also accept a word."""
    value = getattr(config, name)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            object.__setattr__(config, name, int(value) if value.isdigit() else float(value))


def require(config: Any, name: str, holds: Any, rule: str, section: str = "outer") -> None:
    """Raise InputError with `rule` if `holds` is false for the field `name`; None is always allowed."""
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise InputError(f"{section}.{name}={shown(value)} {rule}.")
