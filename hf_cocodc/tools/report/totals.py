"""Running totals of one region, from its journal alone."""

from collections.abc import Sequence
from typing import NamedTuple

from ...run.journal import BEGINNINGS
from .events import Event, figure


class RegionTotals(NamedTuple):
    """What a region has done by an event of its journal.

    Attributes:
        bytes_sent: bytes that it has sent, to all other regions together.
        blocked_s: seconds that training waited for the link.
    """

    bytes_sent: float = 0.0
    blocked_s: float = 0.0


def totals(events: Sequence[Event]) -> list[RegionTotals]:
    """The totals after each event.

    Each event says what it has added. Some lines name the totals of their process, in which there is more, such as
    broadcasts. The process of a region that has come back counts from 0; one that goes on from its own checkpoint does not.
    """
    found: list[RegionTotals] = []
    now = before = RegionTotals()
    for event in events:
        kind, named = event["kind"], figure(event, "bytes_sent")
        added = RegionTotals(
            named or 0.0 if kind in ("land", "void") else 0.0, figure(event, "blocked_s") or 0.0
        )
        if kind in BEGINNINGS:
            before = now if named is not None and named < now.bytes_sent else RegionTotals()
            now = now._replace(bytes_sent=max(now.bytes_sent, before.bytes_sent + (named or 0.0)))
        elif kind == "log":
            told = before.bytes_sent + (figure(event, "outer/bytes_sent") or 0.0)
            now = now._replace(bytes_sent=max(now.bytes_sent, told))
        elif kind == "finish":
            now = RegionTotals(
                max(now.bytes_sent, before.bytes_sent + (named or 0.0)), before.blocked_s + added.blocked_s
            )
        else:
            now = RegionTotals(now.bytes_sent + added.bytes_sent, now.blocked_s + added.blocked_s)
        found.append(now)
    return found
