"""Which values settings of a method may have together. No torch: a command checks them before it loads anything.

The settings have their names in the section `outer` of a recipe; rules about one that a method lacks do not apply.
"""

import math
from collections.abc import Mapping, Sequence
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


def check(settings: Mapping[str, Any]) -> None:
    """Check all settings of a method, defaults included. Raises InputError for an unknown name, or a contradiction of two."""
    for rule in (_fragments, _codec, _merge, _overlap, _sends, _penalty, _clip):
        rule(settings)


def _fragments(settings: Mapping[str, Any]) -> None:
    name, num_fragments = settings.get("fragment_pattern", "whole"), settings.get("num_fragments", 1)
    one_of("fragment_pattern", name, PATTERNS)
    if name == "whole" and num_fragments != 1:
        raise InputError(
            f"outer.num_fragments={num_fragments} with fragment_pattern=whole: the whole model is one fragment. "
            "Use fragment_pattern=strided, or num_fragments=1."
        )
    if settings["sync_interval"] < num_fragments:
        raise InputError(
            f"outer.sync_interval={settings['sync_interval']} is smaller than outer.num_fragments={num_fragments}, but each "
            "fragment is sent once every sync_interval inner steps. Raise sync_interval or lower num_fragments."
        )


def _codec(settings: Mapping[str, Any]) -> None:
    name, mean = settings.get("codec", "fp32"), settings.get("mean", "average")
    has_feedback = settings.get("error_feedback", False)
    if isinstance(name, str) and not is_own(name):
        one_of("codec", name, CODECS, " Or MODULE:NAME, for one of your own.")
    if has_feedback and name == "fp32":
        raise InputError(
            "outer.error_feedback=True with codec=fp32: fp32 loses nothing, so there is no error to feed back."
        )
    if name in SPARSE and not has_feedback:
        raise InputError(
            f"outer.codec={name} without outer.error_feedback would lose all but a few values permanently. Set "
            "error_feedback=true."
        )
    one_of("mean", mean, MEANS)
    if mean == "radial" and name in ("lowrank", *SPARSE):
        raise InputError(
            f"outer.mean=radial with codec={name}: directions lose their lengths where a codec keeps only a part of them. Use "
            "another codec, or mean=average."
        )


def _merge(settings: Mapping[str, Any]) -> None:
    name = settings.get("merge", "replace")
    one_of("merge", name, MERGES)
    if name == "compensate":
        one_of("compensation", settings.get("compensation", "adaptive"), COMPENSATIONS)


def _overlap(settings: Mapping[str, Any]) -> None:
    overlap_steps, sync_interval = settings.get("overlap_steps", 0), settings["sync_interval"]
    if overlap_steps == AUTO:
        if "utilization" not in settings:
            raise InputError(
                "outer.overlap_steps=auto needs measured times, and only method=cocodc uses them. Set the number of inner steps "
                "that a transfer takes; hf-cocodc bench link measures a transfer."
            )
        return
    if int(overlap_steps) >= sync_interval:
        raise InputError(
            f"outer.overlap_steps={overlap_steps} must be smaller than outer.sync_interval={sync_interval}: a fragment must "
            "land before it is sent again. Lower overlap_steps or raise sync_interval."
        )
    # a method that mixes replaces as a special case of that: it is warned of, see `resolve.lost_steps`
    if overlap_steps and settings.get("merge") == "replace" and "mixing_alpha" not in settings:
        raise InputError(
            f"outer.overlap_steps={overlap_steps} with merge=replace would throw away the steps made during a "
            "transfer. Use merge=additive or merge=compensate, or overlap_steps=0."
        )


def _sends(settings: Mapping[str, Any]) -> None:
    sends = settings.get("sends_per_interval")
    if sends is not None and not settings["num_fragments"] <= sends <= settings["sync_interval"]:
        raise InputError(
            f"outer.sends_per_interval={sends} must lie between outer.num_fragments={settings['num_fragments']} (each fragment "
            f"is sent at least once) and outer.sync_interval={settings['sync_interval']} (at most one send per inner step)."
        )


def _penalty(settings: Mapping[str, Any]) -> None:
    value = settings.get("staleness_penalty", "none")
    is_constant = not isinstance(value, str) and 1 <= value < math.inf
    if value not in ("gap", "none") and not is_constant:
        raise InputError(
            f"outer.staleness_penalty={shown(value)} must be gap, none, or a number of at least 1."
        )


def _clip(settings: Mapping[str, Any]) -> None:
    value = settings.get("clip_momentum", "none")
    if value != "none" and (isinstance(value, str) or not 0 < value < math.inf):
        raise InputError(
            f"outer.clip_momentum={shown(value)} must be none, or a positive number of rounds: 1 lets the momentum move a weight "
            "by at most sync_interval inner learning rates."
        )
