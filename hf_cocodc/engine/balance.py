"""This region's part of the global batch: what it says of its speed with transfers, and the deal after each landing."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ..link.base import Arrival, Link
from ..parts.deal import OWN, Deal, Pace, Portion, SampleQueue, after, coarse
from ..validation import Count, whole
from .account import Record

logger = logging.getLogger(__name__)

_MOST_SAMPLES = 2**31 - 1
"""No inner step has so many, whatever a region says."""


class Batch(NamedTuple):
    """Samples of an inner step of this region, by its own settings, and of one micro-batch; of all its ranks together."""

    samples: int
    unit: int


NOT_DEALT = Batch(0, 0)


class Balance:
    """Follows the deal (`parts.deal`) of one region.

    Args:
        rule: of the global batch (`parts.deal.after`); None: nobody asks which samples a region has.
        batch: of this region by its own settings.
    """

    def __init__(self, rule: str | None, batch: Batch, link: Link, record: Record) -> None:
        self._rule, self._own, self._link, self._record = rule, batch, link, record
        self._deal, self._queue = Deal(), SampleQueue()
        self._timed = batch.samples
        self.portion = Portion(0, -1, 0, batch.samples)

    def begin(self, step: int) -> None:
        """At the start of a run, after inner step `step`: hear the batches of all regions. A collective call of all regions."""
        if self._rule is None:
            return
        records = self._link.gather(self._own, "the batches of the regions")
        pairs = zip(self._link.parties, records, strict=True)
        own = {region: min(max(each.samples, 1), _MOST_SAMPLES) for region, each in pairs}
        self._deal = Deal(batch=sum(own.values()), own=own, samples=own)
        self._go_on(SampleQueue(since=step, samples=own))

    @property
    def shares(self) -> bool:
        """Whether regions share a global batch by their speeds."""
        return self._rule not in (None, OWN)

    @property
    def work(self) -> float:
        """An inner step, as a multiple of one by the region's own settings."""
        return self.portion.samples / self._own.samples if self._own.samples else 1.0

    def counted(self, tokens: int | None) -> int | None:
        """What an inner step has trained on: its tokens, if they are known, else its samples."""
        return self.portion.samples if tokens is None and self.shares else tokens

    def note_timed(self) -> None:
        """Inner steps have been timed since the last call: those that had so many samples as the next one has."""
        self._timed = self.portion.samples

    @property
    def said(self) -> Batch:
        """The part of a trailer that is about this; beside it is the time of these inner steps."""
        return NOT_DEALT if self._rule is None else Batch(self._timed, self._own.unit)

    def hear(self, arrival: Arrival, step: int, num_fragments: int) -> None:
        """Deal anew, if that is due at this landing."""
        trailers = dict(zip(arrival.members, arrival.trailers, strict=False))
        if self._rule is None or not trailers or not all(each.unit for each in trailers.values()):
            return
        said = {r: Pace(each.step_time_s, each.samples, each.unit) for r, each in trailers.items()}
        is_first = not self._deal.paces
        self._deal, why = after(self._deal, said, self._rule, num_fragments)
        deal = self._deal
        self._go_on(self._queue.then(step, deal.samples))
        if why:
            speeds = {str(region): round(pace.speed, 3) for region, pace in deal.paces.items()}
            samples = {str(region): count for region, count in deal.samples.items()}
            self._record("deal", step=step, samples=samples, speeds=speeds, why=why)
        if why or (is_first and deal.paces.keys() == said.keys()):
            self._say_if_coarse(step)

    def _go_on(self, queue: SampleQueue) -> None:
        self._queue = queue
        self.portion = queue.portion(self._link.region, self._own.samples)

    def _say_if_coarse(self, step: int) -> None:
        deal = self._deal
        message = coarse(deal.samples, deal.paces)
        if not message:
            return
        if self._link.region == min(deal.samples):
            logger.warning("%s", message)
        self._record("note", step=step, message=message)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, under its name in checkpoints; nothing if each region has its own batch."""
        if self._rule is None:
            return {}
        deal, queue = (msgspec.to_builtins(each, str_keys=True) for each in (self._deal, self._queue))
        del queue["samples"]  # the deal's
        return {"deal": {**deal, "timed": self._timed, "queue": queue}}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state with what `state_dict` returned. If it is of a run that dealt nothing, all regions `begin`.

        Raises KeyError, TypeError or ValueError if it is damaged.
        """
        if self._rule is None:
            return
        if "deal" not in saved:
            self.begin(saved["inner_step"])
            return
        state = saved["deal"]
        self._deal = whole(Deal, state)
        self._timed = msgspec.convert(state["timed"], Count)
        self._go_on(whole(SampleQueue, {**state["queue"], "samples": state["samples"]}))
