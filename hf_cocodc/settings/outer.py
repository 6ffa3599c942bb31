"""The section `outer` of a recipe: how regions synchronize. All rules of its settings are here.

A field has what a setting may be by itself, and which other setting it needs. What settings must not be together is in
`_CONTRADICTIONS`. Defaults of a method are those of its function (`methods.py`).
"""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import InputError, shown
from .fields import (
    Limit,
    Names,
    Settings,
    among,
    at_least,
    build,
    documented,
    expert,
    rules_of,
    setting,
    within,
)

PATTERNS = ("whole", "strided", "sequential")
CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "fp4", "codebook_2bit", "topk", "topk_2bit", "lowrank")
SPARSE = ("topk", "topk_2bit")
MERGES = ("replace", "mix", "additive", "compensate")
COMPENSATIONS = ("adaptive", "fixed", "lr_normalized", "additive")
MEANS = ("average", "radial")
OF_EVERY_METHOD = (
    "method",
    "options",
    "weights",
    "digest_interval",
    "on_nonfinite",
    "nonfinite_rounds",
    "guard",
    "device",
)
"""Fields of `OuterConfig` that are no settings of a method."""

AUTO = "auto"
FOLLOWING = ("outer_lr", "outer_momentum")
"""What may be `auto`, together, and is where neither is given."""
AUTO_VALUES: dict[str, dict[str, float]] = {
    "diloco": {"outer_lr": 0.7, "outer_momentum": 0.6},
    "streaming": {"outer_lr": 0.6, "outer_momentum": 0.4},
    "eager": {"outer_lr": 0.6, "outer_momentum": 0.0},
    "co2": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "dilocox": {"outer_lr": 0.35, "outer_momentum": 0.0},
    "cocodc": {"outer_lr": 0.6, "outer_momentum": 0.4},
    "sparseloco": {"outer_lr": 2.0},
    "muloco": {"outer_lr": 1.0, "outer_momentum": 0.4},
}
"""By method: what `auto` means (`hf_cocodc/auto.py` says where it comes from)."""
METHODS = list(AUTO_VALUES)
"""The names of `newer.known`."""


class OnlyWith(NamedTuple):
    """A setting that has an effect only if another one has one of these values."""

    other: str
    values: Sequence[str | bool | None]


def _any_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _is_in(value: Any, least: float, below: float = math.inf) -> bool:
    """Whether a value is a number from `least`, and below `below`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < below


_SHARE = Limit(lambda value: 0 <= value <= 1, "must lie in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Settings):
    """What `outer.guard` holds."""

    SECTION = "outer.guard"

    clip: float = setting("From how many times the ordinary norm on a norm is scaled down.", default=3.0)
    drop: float = setting("From how many times the ordinary norm on it is left out.", default=6.0)
    history: int = setting("Landings whose median is ordinary.", within(8, 4096), default=16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.clip <= self.drop:
            raise InputError(
                f"outer.guard: clip={self.clip:g} and drop={self.drop:g} must be finite, clip more than 1 and drop not less than "
                "clip. 1 is the ordinary norm."
            )


GUARD = GuardSettings().to_dict()
"""The default of `outer.guard`."""


@documented
@dataclass(frozen=True, kw_only=True)
class OuterConfig(Settings):
    """How regions synchronize. A field that is None takes the default of the method, which comes from its paper; outer_lr and
    outer_momentum are auto if both are None.
    """

    SECTION = "outer"

    method: Any | str | None = setting(
        f"Method: {_any_of(METHODS)}; or MODULE:NAME, a function of your own that returns a Method.",
        Names(METHODS, or_own=True),
        default="diloco",
    )
    options: dict[str, Any] | str | None = setting(
        "Settings of your own method or codec that have no key here: {k: 32, decay: 0.9}, or k=32,decay=0.9."
    )
    sync_interval: int | None = setting("H: each fragment is sent once every H inner steps.", at_least(1))
    num_fragments: int | None = setting(
        "P: number of parts of the model that are sent separately.", at_least(1)
    )
    fragment_pattern: str | None = setting(
        f"Which blocks form a fragment: {_any_of(PATTERNS)}.", Names(PATTERNS)
    )
    overlap_steps: int | str | None = setting(
        "tau: inner steps between the send and the landing of a transfer; auto follows the link (cocodc only).",
        Limit(
            lambda steps: steps == AUTO or (isinstance(steps, int) and steps >= 0),
            "must be a whole number from 0, or auto",
        ),
    )
    merge: str | None = setting(f"How a landing updates the local params: {_any_of(MERGES)}.", Names(MERGES))
    mixing_alpha: float | None = setting(
        "Weight of the local params at a landing (merge=mix): 0 means only global, 1 only local.",
        _SHARE,
        OnlyWith("merge", ["mix"]),
    )
    outer_lr: float | str | None = setting(
        "Learning rate of the outer optimizer. auto stands for values that our studies found, of outer_lr and outer_momentum. If "
        "there is a number for one of them only, the other one is the method's own.",
        Limit(lambda rate: rate == AUTO or (rate != 0 and _is_in(rate, 0)), "must be positive, or auto"),
    )
    outer_momentum: float | str | None = setting(
        "Nesterov momentum of the outer optimizer, or auto: see outer_lr.",
        Limit(lambda share: share == AUTO or _is_in(share, 0, 1), "must lie in [0, 1), or be auto"),
    )
    codec: Any | str | None = setting(
        f"Format in which outer gradients travel: {_any_of(CODECS)}; or MODULE:NAME, a codec of your own, or a function that "
        "returns one.",
        Names(CODECS, or_own=True),
    )
    error_feedback: bool | None = setting(
        "Add the values that the codec loses in one transfer to the next one."
    )
    rank: int | None = setting("Rank r_1 of the low-rank codec.", at_least(1), OnlyWith("codec", ["lowrank"]))
    mean: str | None = setting(
        "Mean of the outer gradients: average, or radial. Radial is the mean of their norms times the mean of their directions, "
        "for each parameter in a block: updates do not get shorter with more regions. It costs one more round trip, and is "
        "refused with eager, lowrank, top-k and FSDP2.",
        Names(MEANS),
    )
    weights: str = setting(
        "Share of a region in a mean: equal; steps (inner steps that it has trained since the last send, divided by the steps "
        "that were due); or tokens (that it has trained on since the last send). A region that joins a running run counts by "
        "steps at first, even with equal.",
        among("equal", "steps", "tokens"),
        default="equal",
    )
    device: str = setting(
        "Where global params and outer state rest: model (with the model's parameters), host (pinned memory of the host, from "
        "where they visit the model's device slice by slice), or auto (with the model if they take at most a tenth of its "
        "device's memory, else host). They are computed with on the model's device in each case.",
        among("auto", "model", "host"),
        default="auto",
    )
    split_rows: bool | None = expert(
        "Split large parameters outside the blocks (embedding, head) by rows, so that fragments have similar sizes.",
        OnlyWith("fragment_pattern", ["strided", "sequential"]),
    )
    feedback_decay: float | None = expert(
        "SparseLoCo's beta, and MuLoCo's: share of the lost values that error feedback sends again.",
        _SHARE,
        OnlyWith("error_feedback", [True]),
    )
    top_k: int | None = expert(
        "SparseLoCo's k: values sent of each block of 64 x 64, at most 4096.",
        within(1, 4096),
        OnlyWith("codec", SPARSE),
    )
    staleness_penalty: float | str | None = expert(
        "CO2's staleness penalty Lambda, which divides the update: gap (measured; about 2 in a steady run, as if outer_lr "
        "were half), none, or a constant of at least 1.",
        Limit(
            lambda value: value in ("gap", "none") or _is_in(value, 1),
            "must be gap, none, or a number of at least 1",
        ),
    )
    clip_momentum: float | str | None = expert(
        "CO2's bound phi on each element of the outer momentum, in units of one round's steps: 1 means sync_interval inner "
        "learning rates. none: no bound.",
        Limit(
            lambda rounds: rounds == "none" or (rounds != 0 and _is_in(rounds, 0)),
            "must be none, or a positive number of rounds: 1 lets the momentum move a weight by at most sync_interval inner "
            "learning rates",
        ),
    )
    compensation: str | None = expert(
        f"CoCoDC's compensation: {_any_of(COMPENSATIONS)}.",
        Names(COMPENSATIONS),
        OnlyWith("merge", ["compensate"]),
    )
    compensation_strength: float | None = expert(
        "CoCoDC's lambda (lambda_0 with compensation=adaptive).",
        Limit(lambda strength: strength >= 0, "must not be negative"),
        OnlyWith("merge", ["compensate"]),
    )
    utilization: float | None = expert(
        "CoCoDC's gamma: share of the link's time to use.",
        Limit(lambda share: 0 < share <= 1, "must lie in (0, 1]"),
        OnlyWith("sends_per_interval", [None]),
    )
    sends_per_interval: int | None = expert(
        "CoCoDC's N: transfers per sync_interval inner steps; by default as many as the link allows.",
        at_least(1),
    )
    digest_interval: int = expert(
        "Rounds between two checks that all regions hold the same global params. A check adds a checksum to the transfer.",
        at_least(1),
        default=10,
    )
    on_nonfinite: str = expert(
        "What a region does after nonfinite_rounds: restart (take the global params and a fresh state of the inner optimizer) "
        "or stop (all regions stop with a checkpoint).",
        among("restart", "stop"),
        default="restart",
    )
    nonfinite_rounds: int = expert(
        "If a region does not count in full for this many rounds in a row, because its outer gradient is not finite or the guard "
        "clips or drops it, it does what on_nonfinite says. After as many void means in a row, all regions stop.",
        at_least(1),
        default=3,
    )
    guard: dict[str, Any] | str | None = expert(
        "Norm guard: an outer gradient with more than clip times the ordinary norm is scaled down to clip times that norm. One "
        "with more than drop times is left out, and if most regions have more, none counts. The ordinary norm is the larger of "
        "two medians: that of the fragment's last history landings (at the present learning rate), and that of the regions now. "
        "Default: clip=3,drop=6,history=16 (in a recipe {clip: 3, drop: 6, history: 16}); none: no guard."
    )

    def __post_init__(self) -> None:
        for name in ("method", "codec"):
            object.__setattr__(self, name, _name_of(name, getattr(self, name)))
        if self.method is None:
            object.__setattr__(self, "method", "diloco")
        super().__post_init__()
        if self.options is not None:
            object.__setattr__(self, "options", _options(self.options))
        if self.guard not in (None, "none"):
            guard = build(GuardSettings, pairs(self.guard), "outer.guard").to_dict()
            object.__setattr__(self, "guard", guard)

    def given(self) -> dict[str, Any]:
        """The arguments for the method: fields that are not None."""
        named = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {
            name: value for name, value in named.items() if value is not None and name not in OF_EVERY_METHOD
        }


def _name_of(setting: str, given: Any) -> str | None:
    """MODULE:NAME of a function that a script gives itself; text as it is. Raises InputError for anything else."""
    if given is None or isinstance(given, str):
        return given
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    if getattr(sys.modules.get(str(module)), name, None) is not given:
        raise InputError(
            f"outer.{setting}={shown(given)} must be text, or in a script a function that returns a {setting}, at the top of the "
            "script or of a module: regions compare its name, its arguments and its source."
        )
    return f"{module}:{name}"


def _options(given: Any) -> dict[str, Any]:
    """The options of a user's own method, comparable between regions. Raises InputError if they are no mapping of names, one is
    also the name of another setting, or a value is no plain one.

    >>> _options("k=32, decay=0.9")
    {'k': 32, 'decay': 0.9}
    """
    options = pairs(given)
    if not isinstance(options, dict) or not all(
        isinstance(name, str) and name.isidentifier() for name in options
    ):
        raise InputError(f"outer.options={shown(given)} must be a mapping of names, for example {{k: 32}}.")
    for name, value in options.items():
        if name in {each.name for each in dataclasses.fields(OuterConfig)}:
            raise InputError(f"outer.options: {name} is a setting itself. Write outer.{name}={shown(value)}.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"outer.options: {name}={shown(value)} must be a number, text, true, false, null, or a list or mapping of them."
            ) from error
    return dict(options)


def pairs(given: Any) -> Any:
    """A mapping that is given as text (k=32,decay=0.9); anything else as it is."""
    if not isinstance(given, str):
        return given
    parts = (each.partition("=") for each in given.split(","))
    return {name.strip(): _value(text.strip()) for name, _, text in parts}


def _value(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def alpha_of(given: float | None, overlap_steps: int | str) -> float:
    """The given weight of the local params, or the default of Streaming DiLoCo: 0 if tau is 0 or 1, else 0.5 (2501.18512)."""
    if given is not None:
        return given
    return 0.0 if overlap_steps in (0, 1) else 0.5


_WITHOUT = {
    "fragment_pattern": "whole",
    "num_fragments": 1,
    "overlap_steps": 0,
    "codec": "fp32",
    "error_feedback": False,
}
"""What a method does that lacks a setting."""

_BOTH = "one value is good only with the other. Set both to auto, or both to numbers."

_CONTRADICTIONS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        lambda s: s["fragment_pattern"] == "whole" and s["num_fragments"] != 1,
        "outer.num_fragments={num_fragments} with fragment_pattern=whole: the whole model is one fragment. "
        "Use fragment_pattern=strided, or num_fragments=1.",
    ),
    (
        lambda s: s["sync_interval"] < s["num_fragments"],
        "outer.sync_interval={sync_interval} is smaller than outer.num_fragments={num_fragments}, but each fragment is sent once "
        "every sync_interval inner steps. Raise sync_interval or lower num_fragments.",
    ),
    (
        lambda s: s["error_feedback"] and s["codec"] == "fp32",
        "outer.error_feedback=True with codec=fp32: fp32 loses nothing, so there is no error to feed back.",
    ),
    (
        lambda s: s["codec"] in SPARSE and not s["error_feedback"],
        "outer.codec={codec} without outer.error_feedback would lose all but a few values permanently. Set error_feedback=true.",
    ),
    (
        lambda s: s.get("mean") == "radial" and s["codec"] in ("lowrank", *SPARSE),
        "outer.mean=radial with codec={codec}: directions lose their lengths where a codec keeps only a part of them. Use "
        "another codec, or mean=average.",
    ),
    (
        lambda s: s["overlap_steps"] == AUTO and "utilization" not in s,
        "outer.overlap_steps=auto needs measured times, and only method=cocodc uses them. Set the number of inner steps that a "
        "transfer takes; hf-cocodc bench link measures a transfer.",
    ),
    (
        lambda s: s["overlap_steps"] != AUTO and int(s["overlap_steps"]) >= s["sync_interval"],
        "outer.overlap_steps={overlap_steps} must be smaller than outer.sync_interval={sync_interval}: a fragment must land "
        "before it is sent again. Lower overlap_steps or raise sync_interval.",
    ),
    (
        # a method that mixes replaces as a special case of that: it is warned of, see `resolve.lost_steps`
        lambda s: s["overlap_steps"] != 0 and s.get("merge") == "replace" and "mixing_alpha" not in s,
        "outer.overlap_steps={overlap_steps} with merge=replace would throw away the steps made during a transfer. Use "
        "merge=additive or merge=compensate, or overlap_steps=0.",
    ),
    (
        lambda s: (
            s.get("sends_per_interval") is not None
            and not s["num_fragments"] <= s["sends_per_interval"] <= s["sync_interval"]
        ),
        "outer.sends_per_interval={sends_per_interval} must lie between outer.num_fragments={num_fragments} (each fragment is "
        "sent at least once) and outer.sync_interval={sync_interval} (at most one send per inner step).",
    ),
    (
        lambda s: s.get("outer_lr") == AUTO and s.get("outer_momentum", AUTO) != AUTO,
        "outer.outer_lr=auto, but outer.outer_momentum={outer_momentum!r}: " + _BOTH,
    ),
    (
        lambda s: s.get("outer_momentum") == AUTO and s["outer_lr"] != AUTO,
        "outer.outer_momentum=auto, but outer.outer_lr={outer_lr!r}: " + _BOTH,
    ),
)
"""(whether it holds, message): what must not hold of the settings of a method."""


def idle(settings: Mapping[str, Any]) -> dict[str, OnlyWith]:
    """The settings without effect, and what would give them one.

    >>> idle({"rank": 64, "codec": "fp32"})
    {'rank': OnlyWith(other='codec', values=['lowrank'])}
    """
    return {
        name: needs
        for name, needs in rules_of(OuterConfig, OnlyWith).items()
        if name in settings and settings.get(needs.other, needs.values[0]) not in needs.values
    }


def check_settings(settings: Mapping[str, Any], given: Sequence[str] = ()) -> None:
    """Check all settings of a method, defaults included; `given` has the names of those that are not.

    Raises InputError for one that is given and would have no effect, for an unknown name, and for a contradiction.
    """
    for name, (other, needed) in idle(settings).items():
        if name in given:
            values = " or ".join("null" if value is None else str(value) for value in needed)
            way_out = f"outer.{other} in the same way" if None in needed else f"set outer.{other}={values}"
            raise InputError(
                f"outer.{name}={shown(settings[name])} has an effect only with outer.{other}={values}, "
                f"but outer.{other} is {settings[other]}. Remove outer.{name} (--set outer.{name}=null), or {way_out}."
            )
    for name, known in rules_of(OuterConfig, Names).items():
        if isinstance(settings.get(name), str):
            known.check(f"outer.{name}", settings[name])
    whole = {**_WITHOUT, **settings}
    for holds, message in _CONTRADICTIONS:
        if holds(whole):
            raise InputError(message.format_map(whole))
