"""Which values settings of a method may have together. No torch: a command checks them before it loads anything.

The settings have their names in the section `outer` of a recipe. What one setting may be by itself is in `settings/outer.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from ..errors import InputError, nearest, shown

AUTO = "auto"
PATTERNS = ("whole", "strided", "sequential")
CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "fp4", "topk", "topk_2bit", "lowrank")
SPARSE = ("topk", "topk_2bit")
MERGES = ("replace", "mix", "additive", "compensate")
COMPENSATIONS = ("adaptive", "fixed", "lr_normalized", "additive")
MEANS = ("average", "radial")


def is_own(name: object) -> TypeGuard[str]:
    """Whether a setting names something of a user's own.

    >>> is_own("my_module:my_method"), is_own("diloco")
    (True, False)
    """
    return isinstance(name, str) and ":" in name


def one_of(setting: str, name: str, known: Sequence[str], more: str = "") -> None:
    """Raise InputError if `name` is not among the known ones; `more` ends the message."""
    if name not in known:
        raise InputError(f"outer.{setting}={shown(name)} is not known.{nearest(name, known)}{more}")


def mixing_alpha(given: float | None, overlap_steps: int | str) -> float:
    """The given weight of the local params, or the default of Streaming DiLoCo: 0 if tau is 0 or 1, else 0.5 (2501.18512)."""
    if given is not None:
        return given
    return 0.0 if overlap_steps in (0, 1) else 0.5


_NAMES = {
    "fragment_pattern": PATTERNS,
    "codec": CODECS,
    "mean": MEANS,
    "merge": MERGES,
    "compensation": COMPENSATIONS,
}
"""The names that settings may have. A codec may also be a user's own."""

_NEEDS: tuple[tuple[str, str, tuple[str | bool | None, ...]], ...] = (
    ("rank", "codec", ("lowrank",)),
    ("top_k", "codec", SPARSE),
    ("feedback_decay", "error_feedback", (True,)),
    ("mixing_alpha", "merge", ("mix",)),
    ("compensation", "merge", ("compensate",)),
    ("compensation_strength", "merge", ("compensate",)),
    ("utilization", "sends_per_interval", (None,)),
    ("split_rows", "fragment_pattern", ("strided", "sequential")),
)
"""(setting, other setting, values): the setting has an effect only if the other setting has one of these values."""

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


def idle(settings: Mapping[str, Any]) -> dict[str, tuple[str, tuple[str | bool | None, ...]]]:
    """The settings without effect: each with the other setting that it needs, and the values of that which would give it one.

    >>> idle({"rank": 64, "codec": "fp32"})
    {'rank': ('codec', ('lowrank',))}
    """
    return {
        name: (other, needed)
        for name, other, needed in _NEEDS
        if name in settings and other in settings and settings[other] not in needed
    }


def check(settings: Mapping[str, Any], given: Sequence[str] = ()) -> None:
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
    for name, known in _NAMES.items():
        value, more = settings.get(name), " Or MODULE:NAME, for one of your own." if name == "codec" else ""
        if isinstance(value, str) and not (more and is_own(value)):
            one_of(name, value, known, more)
    whole = {**_WITHOUT, **settings}
    for holds, message in _CONTRADICTIONS:
        if holds(whole):
            raise InputError(message.format_map(whole))
