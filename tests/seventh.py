"""A plugin for pytest: adds a seventh method, as a change of this package would, for the tests of all methods.

It takes the settings that tests/methods.py demands of every method, and no other.
"""

from __future__ import annotations

from hf_cocodc.methods import METHODS, Method
from hf_cocodc.parts import choose, closings, fragments, merges, outer, schedules
from hf_cocodc.parts.codecs.base import Codec
from hf_cocodc.settings import outer as of_settings


def seventh(
    *,
    sync_interval: int = 50,
    outer_lr: float = 0.5,
    outer_momentum: float = 0.5,
    codec: str | Codec = "fp32",
) -> Method:
    """Seventh: DiLoCo whose means travel for an inner step and land with SlowMo's momentum (2501.18512)."""
    return Method(
        fragments=fragments.whole(),
        schedule=schedules.every(sync_interval, 1),
        codec=choose.codec(codec, error_feedback=False, rank=64),
        outer=outer.chain(momentum=outer.momentum(outer_momentum), lr=outer.scale(outer_lr)),
        merge=merges.additive(),
        closing=closings.one_more_round,
    )


METHODS["seventh"] = seventh
of_settings.METHODS.append("seventh")
