"""From settings to parts: each function takes settings as a recipe writes them and returns the part that they name."""

import math
from collections.abc import Callable

from ..errors import InputError, nearest, shown
from . import codecs, fragments, merges, outer
from .codecs.base import Codec
from .fragments import Pattern
from .merges import Merge
from .outer import OuterTransform


def pattern(name: str, num_fragments: int, split_rows: bool) -> Pattern:
    """The fragment pattern called `name`, for `num_fragments` fragments; `split_rows` counts only for more than one."""
    if name == "whole":
        if num_fragments != 1:
            raise InputError(
                f"outer.num_fragments={num_fragments} with fragment_pattern=whole: the whole model is one fragment. "
                "Use fragment_pattern=strided, or num_fragments=1."
            )
        return fragments.whole()
    by_blocks = {"strided": fragments.strided, "sequential": fragments.sequential}
    if name not in by_blocks:
        raise InputError(
            f"outer.fragment_pattern={shown(name)} is not known.{nearest(name, ['whole', *by_blocks])}"
        )
    return by_blocks[name](num_fragments, split_rows)


CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": codecs.fp32,
    "bf16": codecs.bf16,
    "fp16": codecs.fp16,
    "int8": codecs.int8,
    "int4": codecs.int4,
    "fp4": codecs.fp4,
    "topk": codecs.topk,
    "topk_2bit": codecs.topk_2bit,
}
SPARSE = ("topk", "topk_2bit")


MEANS = ("average", "radial")


def codec(
    name: str | Codec,
    error_feedback: bool,
    rank: int,
    adaptive_rank: bool = False,
    mean: str = "average",
    decay: float = 1.0,
    top_k: int | None = None,
) -> Codec:
    """The codec called `name`, inside `feedback` if `error_feedback`, and inside `radial` if that is the `mean`.

    Instead of a name, a codec of a user's own. The rank arguments count only for lowrank, `top_k` only for top-k.
    """
    if isinstance(name, str) and name not in (*CODECS, "lowrank"):
        raise InputError(
            f"outer.codec={shown(name)} is not known.{nearest(name, [*CODECS, 'lowrank'])} Or MODULE:NAME, for one of your own."
        )
    if not isinstance(name, str):
        chosen = name
    elif name == "lowrank":
        chosen = codecs.lowrank(rank, rank_min=1 if adaptive_rank else None)
    elif name in SPARSE and top_k is not None:
        chosen = {"topk": codecs.topk, "topk_2bit": codecs.topk_2bit}[name](top_k)
    else:
        chosen = CODECS[name]()
    if error_feedback and name == "fp32":
        raise InputError(
            "outer.error_feedback=True with codec=fp32: fp32 loses nothing, so there is no error to feed back."
        )
    if name in SPARSE and not error_feedback:
        raise InputError(
            f"outer.codec={name} without outer.error_feedback would lose all but a few values permanently. Set "
            "error_feedback=true."
        )
    if mean not in MEANS:
        raise InputError(f"outer.mean={shown(mean)} is not known.{nearest(mean, list(MEANS))}")
    if mean == "radial" and name in ("lowrank", *SPARSE):
        raise InputError(
            f"outer.mean=radial with codec={name}: directions lose their lengths where a codec keeps only a part of them. Use "
            "another codec, or mean=average."
        )
    chosen = codecs.feedback(chosen, decay) if error_feedback else chosen
    return codecs.radial(chosen) if mean == "radial" else chosen


def mixing_alpha(given: float | None, overlap_steps: int | str) -> float:
    """The given weight of the local params, or the default of Streaming DiLoCo: 0 if tau is 0 or 1, else 0.5 (2501.18512)."""
    if given is not None:
        return given
    return 0.0 if overlap_steps in (0, 1) else 0.5


def merge(
    name: str, mixing_alpha: float = 0.5, compensation: str = "adaptive", compensation_strength: float = 0.5
) -> Merge:
    """The merge called `name`; the other arguments count only for mix and compensate."""
    known: dict[str, Callable[[], Merge]] = {
        "replace": merges.replace,
        "mix": lambda: merges.mix(mixing_alpha),
        "additive": merges.additive,
        "compensate": lambda: merges.compensate_delay(compensation, compensation_strength),
    }
    if name not in known:
        raise InputError(f"outer.merge={shown(name)} is not known.{nearest(name, list(known))}")
    return known[name]()


def penalty(value: float | str) -> OuterTransform:
    """CO2's staleness penalty: measured for "gap", else the given constant."""
    try:
        constant = None if value == "gap" else float(value)
    except ValueError:
        constant = 0.0
    if constant is not None and not 1 <= constant < math.inf:
        raise InputError(
            f"outer.staleness_penalty={shown(value)} must be gap, none, or a number of at least 1."
        )
    return outer.staleness_penalty(constant)


def clip(value: float | str, sync_interval: int) -> float | None:
    """CO2's bound on the outer momentum in inner learning rates, from one in rounds of `sync_interval` inner steps.

    None for "none".
    """
    if value == "none":
        return None
    if isinstance(value, str) or not 0 < value < math.inf:
        raise InputError(
            f"outer.clip_momentum={shown(value)} must be none, or a positive number of rounds: 1 lets the momentum move a weight "
            "by at most sync_interval inner learning rates."
        )
    return value * sync_interval


def check_overlap(overlap_steps: int | str, sync_interval: int) -> None:
    """Raise InputError if `overlap_steps` is "auto" or not smaller than `sync_interval`."""
    if overlap_steps == "auto":
        raise InputError(
            "outer.overlap_steps=auto needs measured times, and only method=cocodc uses them. Set the number of inner steps that "
            "a transfer takes; hf-cocodc bench link measures a transfer."
        )
    if int(overlap_steps) >= sync_interval:
        raise InputError(
            f"outer.overlap_steps={overlap_steps} must be smaller than outer.sync_interval={sync_interval}: a fragment must "
            "land before it is sent again. Lower overlap_steps or raise sync_interval."
        )
