"""Every row is read once in a pass, whatever regions come and go; and an ordered dataset gives all of them the same mix."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import pytest

from hf_cocodc.parts.deal import FIXED, OWN, Deal, Pace, Portion, SampleQueue, after
from hf_cocodc.run.feed import DealtSamples

ROWS, INTERVAL, ROUNDS, BATCH = 150, 5, 40, 4
"""A pass is 12.5 inner steps of three regions: it ends within rounds, and within inner steps."""


class Region:
    """What a region trains: its own speed, and the rows of each round, with those that were dealt to it."""

    def __init__(self, number: int, speed: float) -> None:
        self.number, self.speed = number, speed
        self.is_alive, self.is_new = True, False

    def rows(self, portion: Portion, first_step: int, steps: int, seed: int | None) -> list[int]:
        sampler = DealtSamples(ROWS, 3, seed, lambda: (portion, first_step))
        return list(islice(iter(sampler), steps * portion.samples))

    def pace(self, portion: Portion) -> Pace:
        return Pace(portion.samples / self.speed, portion.samples, 1)


class Churn:
    """Three regions; after each round one may be lost in the middle of it, and lost ones may have come in.

    Counts, for each number in the order of all passes, how often it has landed; `unread`: dealt to a region that was lost before
    its round landed; `drawn`: read by regions that had come in, before their first landing.
    """

    def __init__(self, seed: int, rule: str, order: int | None) -> None:
        draws = random.Random(seed)
        self.landed: Counter[int] = Counter()
        self.unread: list[int] = []
        self.drawn: list[int] = []
        self.rows_of_pass: dict[int, Counter[int]] = {}
        self.losses = self.returns = self.most_unread = self.most_drawn = 0
        regions = [Region(number, draws.choice([1.0, 2.0, 4.0])) for number in range(3)]
        own = dict.fromkeys(range(3), BATCH)
        deal, queue = Deal(batch=3 * BATCH, own=own, samples=own), SampleQueue(samples=own)
        for round_ in range(ROUNDS):
            first = round_ * INTERVAL + 1
            lost = draws.choice(regions) if draws.random() < 0.35 else None
            alive = [each for each in regions if each.is_alive]
            if lost is not None and (not lost.is_alive or len(alive) == 1):
                lost = None
            said: dict[int, Pace] = {}
            for each in alive:
                portion = queue.portion(each.number, BATCH)
                if each is lost:
                    if portion.first >= 0:
                        self.unread += self._numbers(portion, first)
                        self.most_unread = max(self.most_unread, INTERVAL * portion.samples)
                    continue
                rows = each.rows(portion, first, INTERVAL, order)
                assert len(rows) == INTERVAL * portion.samples
                if portion.first < 0:
                    assert each.is_new
                    self.drawn += rows
                    self.most_drawn = max(self.most_drawn, len(rows))
                else:
                    numbers = self._numbers(portion, first)
                    self.landed.update(numbers)
                    for number, row in zip(numbers, rows, strict=True):
                        self.rows_of_pass.setdefault(number // ROWS, Counter())[row] += 1
                each.is_new = False
                said[each.number] = each.pace(portion)
            deal, _ = after(deal, said, rule)
            queue = queue.then(first + INTERVAL - 1, deal.samples)
            for each in regions:
                if not each.is_alive and draws.random() < 0.3:
                    each.is_alive = each.is_new = True
                    self.returns += 1
            if lost is not None:
                lost.is_alive = False
                self.losses += 1
        self.dealt = queue.place + (ROUNDS * INTERVAL - queue.since) * sum(queue.samples.values())

    @staticmethod
    def _numbers(portion: Portion, first: int) -> list[int]:
        steps = range(first, first + INTERVAL)
        return [
            n for step in steps for n in range(portion.begins(step), portion.begins(step) + portion.samples)
        ]


@pytest.mark.parametrize("rule", [OWN, FIXED])
@pytest.mark.parametrize("order", [None, 0])
def test_every_row_is_read_once_in_20_runs_of_churn(rule: str, order: int | None) -> None:
    """Landed work: of all that is dealt, nothing lands twice, and what does not land is what was dealt to a region in the round
    in which it was lost. What a region reads twice is what it draws in the round in which it has come in.
    """
    losses = returns = 0
    for seed in range(20):
        churn = Churn(seed, rule, order)
        assert set(churn.landed.values()) == {1}
        assert set(churn.landed).isdisjoint(churn.unread) and len(set(churn.unread)) == len(churn.unread)
        assert set(churn.landed) | set(churn.unread) == set(range(churn.dealt))
        assert len(churn.unread) <= churn.losses * churn.most_unread
        assert len(churn.drawn) <= churn.returns * churn.most_drawn
        for number, rows in churn.rows_of_pass.items():
            missed = sum(each // ROWS == number for each in churn.unread)
            is_whole = (number + 1) * ROWS <= churn.dealt
            assert set(rows.values()) == {1}
            assert len(rows) == ROWS - missed or not is_whole
        losses, returns = losses + churn.losses, returns + churn.returns
    assert losses > 100 and returns > 100


LABELS = [0] * 600 + [1] * 360 + [2] * 240
"""Of rows that are sorted by source."""


def check_mix(counts: Sequence[Mapping[int, int]], shares: Mapping[int, float]) -> None:
    """Each part has the same share of each label, within binomial scatter (four standard deviations, and a row)."""
    for part in counts:
        size = sum(part.values())
        for label, share in shares.items():
            scatter = 4 * math.sqrt(size * share * (1 - share)) + 1
            assert abs(part[label] - size * share) <= scatter, (label, part)


def dealt_labels(order: int | None, steps: int) -> Iterator[Counter[int]]:
    """Of the rows of three regions, 4 : 2 : 1 in speed, in so many inner steps."""
    queue = SampleQueue(samples={0: 8, 1: 4, 2: 2})
    for region in range(3):
        portion = queue.portion(region, 9)
        sampler = DealtSamples(len(LABELS), 3, order, lambda portion=portion: (portion, 1))
        yield Counter(LABELS[row] for row in islice(iter(sampler), steps * portion.samples))


@pytest.mark.parametrize("order", [None, 0, 1])
@pytest.mark.parametrize("passes", [1, 2.5])
def test_an_ordered_dataset_is_dealt_in_the_same_mix(order: int | None, passes: float) -> None:
    """Also in the order of the data: neighbors go to all regions in turn."""
    counts = list(dealt_labels(order, int(passes * len(LABELS)) // 14))
    whole = sum(counts, Counter())
    check_mix(counts, {label: count / whole.total() for label, count in whole.items()})
