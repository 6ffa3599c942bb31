"""Tokens on which regions have trained, by what their journals say of an inner step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def tokens_at(
    step: int, starts: Mapping[int, Mapping[str, Any]], attendance: Mapping[int, Sequence[tuple[int, int]]]
) -> int | None:
    """Tokens on which all regions together had trained at an inner step; None if no journal says how many a step has.

    Args:
        step: the inner step.
        starts: the event with which the journal of a region begins, by regions; a region without one is taken to have as many
            tokens as another one.
        attendance: the inner steps from which, and to which, each region took part.
    """
    rates = {region: _per_step(start) for region, start in starts.items()}
    usual = next((rate for rate in rates.values() if rate), None)
    if usual is None:
        return None
    return sum(
        (rates.get(region) or usual) * max(min(step, until) - since, 0)
        for region, spans in attendance.items()
        for since, until in spans
    )


def _per_step(start: Mapping[str, Any]) -> int | None:
    """Tokens of a region in an inner step; None if unknown."""
    training: Mapping[str, Any] = start.get("training", {})
    known = [training.get(name) for name in ("batch", "data.block_size")]
    if not all(type(each) is int and 0 < each < 2**31 for each in known):
        return None
    return math.prod(known)  # type: ignore[arg-type]
