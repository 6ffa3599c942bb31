"""From settings to parts: each function returns the part that settings of a recipe name.

The names and numbers have been checked (`settings/outer.py`), also against each other.
"""

from . import codecs, fragments, merges, outer
from .codecs.base import Codec
from .fragments import Pattern
from .merges import Merge
from .outer import OuterTransform


def pattern(name: str, num_fragments: int, split_rows: bool) -> Pattern:
    """The fragment pattern called `name`; `split_rows` counts only for more than one fragment."""
    if name == "whole":
        return fragments.whole()
    return {"strided": fragments.strided, "sequential": fragments.sequential}[name](num_fragments, split_rows)


def codec(
    name: str | Codec,
    error_feedback: bool,
    rank: int,
    adaptive_rank: bool = False,
    mean: str = "average",
    decay: float = 1.0,
    top_k: int = 64,
) -> Codec:
    """The codec called `name`, or a user's own, inside `feedback` if `error_feedback`, inside `radial` if that is the `mean`.

    The rank arguments count only for lowrank, `top_k` only for top-k.
    """
    if not isinstance(name, str):
        chosen = name
    elif name == "lowrank":
        chosen = codecs.lowrank(rank, rank_min=1 if adaptive_rank else None)
    elif name in ("topk", "topk_2bit"):
        chosen = getattr(codecs, name)(top_k)
    else:
        chosen = getattr(codecs, name)()
    chosen = codecs.feedback(chosen, decay) if error_feedback else chosen
    return codecs.radial(chosen) if mean == "radial" else chosen


def merge(
    name: str, mixing_alpha: float = 0.5, compensation: str = "adaptive", compensation_strength: float = 0.5
) -> Merge:
    """The merge called `name`; the other arguments count only for mix and compensate."""
    if name == "mix":
        return merges.mix(mixing_alpha)
    if name == "compensate":
        return merges.compensate_delay(compensation, compensation_strength)
    return {"replace": merges.replace, "additive": merges.additive}[name]()


def penalty(value: float | str) -> OuterTransform:
    """CO2's staleness penalty: measured for "gap", else the given constant."""
    return outer.staleness_penalty(None if value == "gap" else float(value))


def clip(value: float | str, sync_interval: int) -> float | None:
    """CO2's bound on the outer momentum, in inner learning rates, from one in rounds; None for "none"."""
    return None if value == "none" else float(value) * sync_interval
