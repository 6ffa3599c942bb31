"""The section `outer` of a recipe: how regions synchronize."""

import contextlib
import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, nearest, shown
from .fields import Settings, documented, expert, require, setting, take_number

METHODS = ("diloco", "streaming", "eager", "co2", "dilocox", "cocodc", "sparseloco", "muloco")
"""The names of `newer.known`: importing the methods would import torch."""
PARTS = {"fragments", "schedule", "codec", "outer", "merge", "closing"}
"""The fields of every `Method`."""
DEVICES = ("auto", "model", "host")
ON_NONFINITE = ("restart", "stop")
WEIGHTS = ("equal", "steps", "tokens")
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
"""What may be `auto`, together."""
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

GUARD: dict[str, float] = {"clip": 3.0, "drop": 6.0, "history": 16}
"""The default of `outer.guard`."""
_HISTORY = 8, 4096
"""The fewest and the most landings that `outer.guard` can remember: `parts.guard.WARM_UP` and `LONGEST_HISTORY`."""


@documented
@dataclass(frozen=True, kw_only=True)
class OuterConfig(Settings):
    """How regions synchronize. A field that is None takes the default of the method, which comes from its paper."""

    SECTION = "outer"

    method: Any | str | None = setting(
        f"Method: {', '.join(METHODS[:-1])} or {METHODS[-1]}; or MODULE:NAME, a function of your own that returns a Method. In a "
        "script, it may also be a Method.",
        "diloco",
    )
    options: dict[str, Any] | str | None = setting(
        "Settings of your own method or codec that have no key here: {k: 32, decay: 0.9}, or k=32,decay=0.9."
    )
    sync_interval: int | None = setting("H: each fragment is sent once every H inner steps.")
    num_fragments: int | None = setting("P: number of parts of the model that are sent separately.")
    fragment_pattern: str | None = setting("Which blocks form a fragment: whole, strided or sequential.")
    overlap_steps: int | str | None = setting(
        "tau: inner steps between the send and the landing of a transfer; auto follows the link (cocodc only)."
    )
    merge: str | None = setting(
        "How a landing updates the local params: replace, mix, additive or compensate."
    )
    mixing_alpha: float | None = setting(
        "Weight of the local params at a landing (merge=mix): 0 means only global, 1 only local."
    )
    outer_lr: float | str | None = setting(
        "Learning rate of the outer optimizer; auto, with outer_momentum: auto, means values that our studies found."
    )
    outer_momentum: float | str | None = setting("Nesterov momentum of the outer optimizer, or auto.")
    codec: str | None = setting(
        "Format in which outer gradients travel: fp32, bf16, fp16, int8, int4, fp4, topk, topk_2bit or lowrank; or MODULE:NAME, "
        "a codec of your own, or a function that returns one."
    )
    error_feedback: bool | None = setting(
        "Add the values that the codec loses in one transfer to the next one."
    )
    rank: int | None = setting("Rank r_1 of the low-rank codec.")
    mean: str | None = setting(
        "Mean of the outer gradients: average, or radial. Radial is the mean of their norms times the mean of their directions, "
        "for each parameter in a block: updates do not get shorter with more regions. It costs one more round trip, and is "
        "refused with eager, lowrank, top-k and FSDP2."
    )
    weights: str = setting(
        "Share of a region in a mean: equal; steps (inner steps that it has trained since the last send, divided by the steps "
        "that were due); or tokens (that it has trained on since the last send). A region that joins a running run counts by "
        "steps at first, even with equal.",
        "equal",
    )
    device: str = setting(
        "Where global params and outer state rest: model (with the model's parameters), host (pinned memory of the host, from "
        "where they visit the model's device slice by slice), or auto (with the model if they take at most a tenth of its "
        "device's memory, else host). They are computed with on the model's device in each case.",
        "auto",
    )
    split_rows: bool | None = expert(
        "Split large parameters outside the blocks (embedding, head) by rows, so that fragments have similar sizes."
    )
    feedback_decay: float | None = expert(
        "SparseLoCo's beta: share of the lost values that error feedback sends again."
    )
    top_k: int | None = expert("SparseLoCo's k: values sent of each block of 64 x 64, at most 4096.")
    staleness_penalty: float | str | None = expert(
        "CO2's staleness penalty Lambda, which divides the update: gap (measured; about 2 in a steady run, as if outer_lr "
        "were half), none, or a constant of at least 1."
    )
    clip_momentum: float | str | None = expert(
        "CO2's bound phi on each element of the outer momentum, in units of one round's steps: 1 means sync_interval inner "
        "learning rates. none: no bound."
    )
    compensation: str | None = expert("CoCoDC's compensation: adaptive, fixed, lr_normalized or additive.")
    compensation_strength: float | None = expert("CoCoDC's lambda (lambda_0 with compensation=adaptive).")
    utilization: float | None = expert("CoCoDC's gamma: share of the link's time to use.")
    sends_per_interval: int | None = expert(
        "CoCoDC's N: transfers per sync_interval inner steps; by default as many as the link allows."
    )
    digest_interval: int = expert(
        "Rounds between two checks that all regions hold the same global params. A check adds a checksum to the transfer.",
        10,
    )
    on_nonfinite: str = expert(
        "What a region does after nonfinite_rounds: restart (take the global params and a fresh state of the inner optimizer) "
        "or stop (all regions stop with a checkpoint).",
        "restart",
    )
    nonfinite_rounds: int = expert(
        "If a region does not count in full for this many rounds in a row, because its outer gradient is not finite or the guard "
        "clips or drops it, it does what on_nonfinite says. After as many void means in a row, all regions stop.",
        3,
    )
    guard: dict[str, float] | str | None = expert(
        "Norm guard: an outer gradient with more than clip times the ordinary norm is scaled down to clip times that norm. One "
        "with more than drop times is left out, and if most regions have more, none counts. The ordinary norm is the larger of "
        "two medians: that of the fragment's last history landings (at the present learning rate), and that of the regions now. "
        "Default: clip=3,drop=6,history=16 (in a recipe {clip: 3, drop: 6, history: 16}); none: no guard."
    )

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", "diloco")
        if not isinstance(self.method, str) and not _is_method(self.method):
            raise InputError(
                f"outer.method={shown(self.method)} must be text: {', '.join(METHODS[:-1])} or {METHODS[-1]}; or MODULE:NAME, "
                "for one of your own. In a script also a Method."
            )
        if isinstance(self.method, str) and ":" not in self.method and self.method not in METHODS:
            raise InputError(
                f"outer.method={shown(self.method)} is not known.{nearest(self.method, METHODS)} Or MODULE:NAME, for one of your "
                "own."
            )
        if self.options is not None:
            object.__setattr__(self, "options", _options(self.options))
        for name in ("sync_interval", "num_fragments", "digest_interval", "rank", "sends_per_interval"):
            require(self, name, lambda v: v >= 1, "must be at least 1")
        require(self, "nonfinite_rounds", lambda v: v >= 1, "must be at least 1")
        require(
            self, "on_nonfinite", lambda v: v in ON_NONFINITE, f"must be one of {', '.join(ON_NONFINITE)}"
        )
        if self.guard is not None:
            object.__setattr__(self, "guard", guard_settings(self.guard))
        for name in ("overlap_steps", "staleness_penalty", "clip_momentum", *FOLLOWING):
            take_number(self, name)
        require(
            self,
            "overlap_steps",
            lambda v: v == AUTO or (isinstance(v, int) and v >= 0),
            "must be a whole number from 0, or auto",
        )
        require(self, "compensation_strength", lambda v: v >= 0, "must not be negative")
        require(self, "feedback_decay", lambda v: 0 <= v <= 1, "must lie in [0, 1]")
        require(self, "top_k", lambda v: 1 <= v <= 4096, "must lie in 1 .. 4096")
        require(self, "utilization", lambda v: 0 < v <= 1, "must lie in (0, 1]")
        for name in FOLLOWING:
            if type(getattr(self, name)) is int:
                object.__setattr__(self, name, float(getattr(self, name)))
        above_0 = lambda v: v != 0 and _is_in(v, 0)  # noqa: E731
        require(self, "outer_lr", lambda v: v == AUTO or above_0(v), "must be positive, or auto")
        require(
            self, "outer_momentum", lambda v: v == AUTO or _is_in(v, 0, 1), "must lie in [0, 1), or be auto"
        )
        require(
            self,
            "staleness_penalty",
            lambda v: v in ("gap", "none") or _is_in(v, 1),
            "must be gap, none, or a number of at least 1",
        )
        require(
            self,
            "clip_momentum",
            lambda v: v == "none" or above_0(v),
            "must be none, or a positive number of rounds: 1 lets the momentum move a weight by at most sync_interval inner "
            "learning rates",
        )
        require(self, "mixing_alpha", lambda v: 0 <= v <= 1, "must lie in [0, 1]")
        require(self, "weights", lambda v: v in WEIGHTS, f"must be one of {', '.join(WEIGHTS)}")
        require(self, "device", lambda v: v in DEVICES, f"must be one of {', '.join(DEVICES)}")

    def given(self) -> dict[str, Any]:
        """The arguments for the method: fields that are not None."""
        named = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {
            name: value for name, value in named.items() if value is not None and name not in OF_EVERY_METHOD
        }


def _is_method(given: Any) -> bool:
    """Whether it has the parts of a Method, whose class would import torch."""
    return (
        dataclasses.is_dataclass(given)
        and not isinstance(given, type)
        and {each.name for each in dataclasses.fields(given)} >= PARTS
    )


def _is_in(value: Any, least: float, below: float = math.inf) -> bool:
    """Whether a value is a number from `least`, and below `below`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < below


def _options(given: Any) -> dict[str, Any]:
    """The options of a user's own method, comparable between regions. Raises InputError if they are no mapping of names, one is
    also the name of another setting, or a value is no plain one.

    >>> _options("k=32, decay=0.9")
    {'k': 32, 'decay': 0.9}
    """
    options = _pairs(given)
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


def _pairs(given: Any) -> Any:
    """A mapping that is given as text (k=32,decay=0.9); anything else as it is."""
    if not isinstance(given, str):
        return given
    pairs = (each.partition("=") for each in given.split(","))
    return {name.strip(): _value(text.strip()) for name, _, text in pairs}


def _value(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def guard_settings(given: Any) -> dict[str, float] | str:
    """All settings of the norm guard, or "none". Raises InputError if a value cannot be.

    >>> guard_settings("clip=3,drop=30"), guard_settings({"history": 8})
    ({'clip': 3.0, 'drop': 30.0, 'history': 16}, {'clip': 3.0, 'drop': 6.0, 'history': 8})
    """
    if given == "none":
        return "none"
    limits = _pairs(given)
    if not isinstance(limits, dict):
        raise InputError(f"outer.guard={shown(given)} must be none, or {{clip: 3, drop: 6, history: 16}}.")
    guard: dict[str, float] = {name: float(value) for name, value in GUARD.items()}
    for name, value in limits.items():
        if name not in guard:
            raise InputError(
                f"outer.guard={shown(given)}: {shown(name)} is not known.{nearest(str(name), list(GUARD))}"
            )
        try:
            guard[name] = float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"outer.guard: {name}={shown(value)} is not a number.") from error
    if not 1 < guard["clip"] <= guard["drop"] < math.inf:
        raise InputError(
            f"outer.guard: clip={guard['clip']:g} and drop={guard['drop']:g} must be finite, clip more than 1 and drop not less "
            "than clip. 1 is the ordinary norm."
        )
    history, (least, most) = guard["history"], _HISTORY
    if not (least <= history <= most and history.is_integer()):
        raise InputError(
            f"outer.guard: history={history:g} must be a whole number from {least} to {most}. With fewer landings nobody knows "
            "what is ordinary."
        )
    return guard | {"history": int(history)}
