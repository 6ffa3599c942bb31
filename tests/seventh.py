"""A plugin for pytest: adds a seventh method, as a change of this package would, for the tests of all methods."""

from __future__ import annotations

from hf_cocodc.methods import METHODS, Method
from hf_cocodc.parts import choose, closings, outer, schedules


def seventh(
    *,
    sync_interval: int = 50,
    num_fragments: int = 4,
    fragment_pattern: str = "sequential",
    split_rows: bool = False,
    overlap_steps: int = 2,
    outer_lr: float = 0.5,
    outer_momentum: float = 0.5,
    codec: str = "bf16",
    error_feedback: bool = False,
    rank: int = 64,
    merge: str = "additive",
) -> Method:
    """Seventh: Streaming DiLoCo with SlowMo's momentum and no mixing (2501.18512)."""
    choose.check_overlap(overlap_steps, sync_interval)
    return Method(
        fragments=choose.pattern(fragment_pattern, num_fragments, split_rows),
        schedule=schedules.staggered(sync_interval, overlap_steps),
        codec=choose.codec(codec, error_feedback, rank),
        outer=outer.chain(momentum=outer.momentum(outer_momentum), lr=outer.scale(outer_lr)),
        merge=choose.merge(merge),
        closing=closings.one_more_round,
    )


METHODS["seventh"] = seventh
