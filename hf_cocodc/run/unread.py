"""What nobody trains on, because the region that it belongs to is not there.

A part of the data belongs to the number of a region, and a region that comes back goes on at the inner step of the others. So
nobody trains on a sample twice, and what a region misses while it is away is reported.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..link.base import Link
from ..settings import ENV_REGIONS, RegionConfig, from_env
from .about import About
from .journal import Journal
from .shards import num_shards

logger = logging.getLogger(__name__)

_NOBODY: Mapping[str, int] = MappingProxyType({})


class Unread(NamedTuple):
    """Inner steps of a region's part of the data that brought nothing into the global params.

    Attributes:
        from_step: the last inner step before them that did; 0 at the start of the run.
        to_step: the last of them.
        samples: how many they would have read; None if unknown.
    """

    region: int
    from_step: int
    to_step: int
    samples: int | None

    @property
    def words(self) -> str:
        """
        >>> Unread(2, 100, 300, 1600).words, Unread(1, 7, 8, None).words
        ("region 2's data of steps 101 to 300 (1,600 samples)", "region 1's data of step 8")
        """
        steps = f"steps {self.from_step + 1} to {self.to_step}"
        if self.to_step == self.from_step + 1:
            steps = f"step {self.to_step}"
        samples = "" if self.samples is None else f" ({self.samples:,} samples)"
        return f"region {self.region}'s data of {steps}{samples}"


class Attendance:
    """Knows which inner steps of each region's data are in the global params. Regions 0 .. num_shards - 1 have a part of the
    data each, of which they read `samples` in one inner step (None if unknown).
    """

    def __init__(
        self, num_shards: int, members: Collection[int], step: int = 0, samples: int | None = None
    ) -> None:
        self._read = dict.fromkeys({*range(num_shards), *members}, step)
        self._members = frozenset(members)
        self._samples = samples

    @property
    def absent(self) -> list[int]:
        """Regions with a part of the data that do not take part now, in order."""
        return sorted(self._read.keys() - self._members)

    def landed(self, sent_at: int, members: Iterable[int], coasted: Mapping[str, int] = _NOBODY) -> None:
        """Count outer gradients of `members`, sent at inner step `sent_at`. `coasted`: the last inner step of each region, by
        its number, that trained no more by then.
        """
        for region in members:
            self._read[region] = max(self._read.get(region, 0), coasted.get(str(region), sent_at))

    def change(self, step: int, members: Collection[int]) -> list[Unread]:
        """From `step` on `members` take part; returns what those who come have missed. A late loss is noticed by its last
        landing: what a region trained after that is lost with it.
        """
        come = frozenset(members) - self._members
        self._members = frozenset(members)
        return self._close(come, step)

    def until(self, step: int) -> list[Unread]:
        """What absent regions have missed up to inner step `step`. They are counted from there afterwards."""
        return self._close(self.absent, step)

    def _close(self, regions: Iterable[int], step: int) -> list[Unread]:
        missed = []
        for region in sorted(regions):
            since = self._read.setdefault(region, 0)
            if step > since:
                samples = None if self._samples is None else (step - since) * self._samples
                missed.append(Unread(region, since, step, samples))
                self._read[region] = step
        return missed


def attendance_of(
    link: Link, regions: RegionConfig, about: About, step: int, is_new: bool = False
) -> Attendance:
    """The attendance of a run that begins, or goes on, at inner step `step`; regions are taken to read as much as this one. A
    newcomer (`is_new`) knows who takes part only once it does: what others missed before, they report.
    """
    count = from_env(regions.count, os.environ, ENV_REGIONS, "regions.count") if link.is_elastic else None
    shards = num_shards(link.num_regions if count is None else count, regions.max)
    samples = about.facts.get("batch")
    members = range(shards) if is_new else link.members
    return Attendance(shards, members, step, samples if isinstance(samples, int) else None)


def report_unread(journal: Journal, attendance: Attendance) -> Callable[[int], None]:
    """Follow the events of a run, and write into its journal and the log what nobody reads. Returns a function to call with the
    inner step before a save, because a resumed run counts from its checkpoint on.
    """
    if attendance.absent:
        logger.warning(
            "the data has a part for each region that may take part (regions.max). Nobody reads that of region %s until a region "
            "of this number joins.",
            ", ".join(map(str, attendance.absent)),
        )

    reported: list[dict[str, Any]] = []

    def tell(step: int, missed: Iterable[Unread]) -> None:
        for each in missed:
            reported.append({"kind": "unread", "step": step, **each._asdict()})
            journal.write(**reported[-1])

    def hear(kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "land" and "members" in facts:
            attendance.landed(facts["sent_at"], facts["members"], facts.get("coasted", _NOBODY))
            return
        if kind not in ("epoch", "finish"):
            return
        step = facts["step"]
        tell(step, attendance.change(step, facts["members"]) if kind == "epoch" else attendance.until(step))
        for unread in merged(reported):
            if unread.to_step == step:
                logger.warning("nobody has read %s.", unread.words)

    journal.listener = hear
    return lambda step: tell(step, attendance.until(step))


def merged(events: Iterable[Mapping[str, Any]]) -> list[Unread]:
    """The ranges of a journal's `unread` events, adjacent ones joined; by region, then by step.

    >>> event = {"kind": "unread", "region": 2, "from_step": 0, "to_step": 5, "samples": 40}
    >>> merged([event, {"kind": "land"}, event | {"from_step": 5, "to_step": 6, "samples": 8}])
    [Unread(region=2, from_step=0, to_step=6, samples=48)]
    """
    ranges: list[Unread] = []
    for unread in sorted(
        Unread(event["region"], event["from_step"], event["to_step"], event["samples"])
        for event in events
        if event["kind"] == "unread"
    ):
        last = ranges[-1] if ranges else None
        if last is None or (last.region, last.to_step) != (unread.region, unread.from_step):
            ranges.append(unread)
        else:
            known = last.samples is not None and unread.samples is not None
            samples = (last.samples or 0) + (unread.samples or 0) if known else None
            ranges[-1] = Unread(unread.region, last.from_step, unread.to_step, samples)
    return ranges
