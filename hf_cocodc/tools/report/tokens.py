"""Tokens on which regions have trained, by what their journals say of an inner step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .events import MOST

Spans = Mapping[int, Sequence[tuple[int, int]]]
"""The inner steps from which, and to which, each region did something."""


def trained(attendance: Spans, events: Iterable[Mapping[str, Any]]) -> Spans:
    """The attendance of a run without the inner steps in which a region only kept step with the others, as landings tell.

    Args:
        attendance: the inner steps from which, and to which, each region took part.
        events: of all journals.
    """
    landings = [event for event in events if event["kind"] in ("land", "void")]
    idle: dict[tuple[int, int], int] = {}
    for event in landings:
        for region, since in event.get("coasted", {}).items():
            idle[int(region), since] = max(idle.get((int(region), since), 0), event["sent_at"])
    found = dict(attendance)
    for (region, since), last in idle.items():
        trains_again = any(
            event["sent_at"] > last
            and region in event.get("members", ())
            and str(region) not in event.get("coasted", {})
            for event in landings
        )
        until = last if trains_again else MOST
        rows = found.get(region, ())
        parts = [part for a, b in rows for part in ((a, min(b, since)), (max(a, min(b, until)), b))]
        found[region] = [(a, b) for a, b in parts if a < b]
    return found


def tokens_at(step: int, starts: Mapping[int, Mapping[str, Any]], trained: Spans) -> int | None:
    """Tokens on which all regions together had trained at an inner step; None if no journal says how many a step has.

    Args:
        step: the inner step.
        starts: the event with which the journal of a region begins, by regions; a region without one is taken to have as many
            tokens as another one.
        trained: the inner steps from which, and to which, each region trained.
    """
    rates = {region: _per_step(start) for region, start in starts.items()}
    usual = next((rate for rate in rates.values() if rate), None)
    if usual is None:
        return None
    return sum(
        (rates.get(region) or usual) * max(min(step, until) - since, 0)
        for region, spans in trained.items()
        for since, until in spans
    )


def _per_step(start: Mapping[str, Any]) -> int | None:
    """Tokens of a region in an inner step; None if unknown."""
    training: Mapping[str, Any] = start.get("training", {})
    known = [training.get(name) for name in ("batch", "data.block_size")]
    if not all(type(each) is int and 0 < each < 2**31 for each in known):
        return None
    return math.prod(known)  # type: ignore[arg-type]
