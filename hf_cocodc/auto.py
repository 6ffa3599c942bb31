"""What `outer_lr: auto` and `outer_momentum: auto` mean: values that follow the number of outer rounds of a run.

Papers train for hundreds or thousands of rounds; fine-tuning makes ten. A momentum of 0.9 remembers ten rounds, and with it an
outer gradient counts ten times in all: too much for so short a run. The values below come from studies that anyone can repeat
(`python -m tests.studies rounds`, `methods` and `auto`); docs/evidence/studies.md has their tables. They
differ from the papers' only where a study has shown that others are better.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .errors import InputError
from .resolve import settings
from .settings import OuterConfig
from .settings.outer import AUTO, FOLLOWING

MEASURED = 240
"""In runs of up to so many rounds a momentum of 0.9 was seen to cost more than it brings."""

SHORT_RUN: dict[str, dict[str, float]] = {
    "diloco": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "streaming": {"outer_lr": 0.6, "outer_momentum": 0.4},
    "eager": {"outer_lr": 0.6, "outer_momentum": 0.0},
    "co2": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "dilocox": {"outer_lr": 0.35, "outer_momentum": 0.0},
    "cocodc": {"outer_lr": 0.6, "outer_momentum": 0.4},
    "sparseloco": {"outer_lr": 1.4},
    "muloco": {"outer_lr": 1.0, "outer_momentum": 0.4},
}
"""By method: what `auto` means; the paper's values for a method that is not here."""

MEDIUM_RUN = 60
MEDIUM: dict[str, dict[str, float]] = {"diloco": {"outer_lr": 0.7, "outer_momentum": 0.6}}
"""The same from `MEDIUM_RUN` rounds on, for methods that were measured at 80."""

_MEMORIES = 24
"""A momentum may be too much in runs of at most so many times the rounds that it remembers, 1 / (1 - momentum)."""
_DELAYED = ("eager", "co2", "dilocox")
"""A delay of one round is worse with momentum: these warn in runs of any length."""
_TOO_FAR = 1.5
"""We warn if an outer gradient moves the params in all, outer_lr / (1 - momentum), by so many times what `auto` does."""


def rounds_of(config: OuterConfig, max_steps: int) -> int:
    """The outer rounds of a run of `max_steps` inner steps. DiLoCoX may make them shorter as it goes."""
    return max_steps // int(settings(config)["sync_interval"])  # type: ignore[call-overload]


def is_auto(config: OuterConfig) -> bool:
    """Whether a value still waits for the number of rounds."""
    return AUTO in (getattr(config, name) for name in FOLLOWING)


def for_rounds(config: OuterConfig, max_steps: int | None) -> OuterConfig:
    """`config` with numbers for `auto`. Raises InputError if it needs `max_steps` (inner steps) and they are None."""
    if not is_auto(config):
        return config
    if max_steps is None or max_steps <= 0:
        names = " and ".join(f"outer.{name}" for name in FOLLOWING if getattr(config, name) == AUTO)
        raise InputError(
            f"{names}=auto follows the number of outer rounds, and the number of inner steps is not known. Give max_steps, or "
            "numbers."
        )
    return dataclasses.replace(config, **values_for(str(config.method), rounds_of(config, max_steps)))


def too_few_rounds(config: OuterConfig, max_steps: int | None) -> str | None:
    """A warning if the outer momentum cannot work in a run of so many inner steps; None if it can, or if they are unknown."""
    shown = settings(config)
    lr, momentum = (shown.get(name) for name in FOLLOWING)
    method = str(shown["method"])
    if (
        method not in SHORT_RUN
        or not isinstance(lr, float)
        or not isinstance(momentum, float)
        or not max_steps
    ):
        return None
    rounds, memory = rounds_of(config, max_steps), 1 / (1 - momentum)
    better = values_for(method, rounds)
    is_short = rounds >= 0 and (method in _DELAYED or rounds <= min(round(_MEMORIES * memory), MEASURED))
    if not momentum or not is_short or lr * memory < _TOO_FAR * _reach(better):
        return None
    values = " and ".join(f"outer.{name}={value:g}" for name, value in better.items())
    return (
        f"outer.outer_lr={lr:g} with outer.outer_momentum={momentum:g}: the momentum remembers {memory:.3g} rounds, and "
        f"{max_steps} inner steps are {rounds}. In so short a run it costs more than it brings "
        "(docs/guides/which-method.md). "
        f"Set {values}, or both to auto; or make more rounds with a smaller outer.sync_interval."
    )


def _reach(values: Mapping[str, float]) -> float:
    return values["outer_lr"] / (1 - values.get("outer_momentum", 0.0))


def values_for(method: str, rounds: int) -> dict[str, Any]:
    """What `auto` means in a run of a method with so many rounds."""
    papers = {
        name: value for name, value in settings(OuterConfig(method=method)).items() if name in FOLLOWING
    }
    return {**papers, **SHORT_RUN.get(method, {}), **(MEDIUM.get(method, {}) if rounds >= MEDIUM_RUN else {})}


def in_words(method: str, name: str) -> str:
    """What `auto` means for a setting of a method.

    >>> in_words("diloco", "outer_momentum")
    'auto: 0, from 60 rounds on 0.6'
    """
    words, last = "auto: ", None
    for rounds in (0, MEDIUM_RUN):
        value = values_for(method, rounds)[name]
        if value != last:
            words += f"{value:g}" if last is None else f", from {rounds} rounds on {value:g}"
        last = value
    return words
