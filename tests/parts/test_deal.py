"""How a global batch is dealt: against a search through all deals, and over landings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cocodc.parts.deal import (
    GAIN,
    MOST,
    PER_REGION,
    ROUNDS,
    Deal,
    Pace,
    SampleQueue,
    after,
    deal_of,
    ideal_time_s,
    step_time_s,
)

OWN = 4


def pace(speed: float, samples: int = OWN, unit: int = 1) -> Pace:
    """Of a region that makes `speed` samples a second."""
    return Pace(samples / speed if speed else 0.0, samples, unit)


def said(*speeds: float, samples: dict[int, int] | None = None) -> dict[int, Pace]:
    return {region: pace(speed, (samples or {}).get(region, OWN)) for region, speed in enumerate(speeds)}


def all_deals(batch: int, regions: int) -> list[dict[int, int]]:
    counts = itertools.product(range(1, batch + 1), repeat=regions)
    return [dict(enumerate(each)) for each in counts if sum(each) == batch]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.integers(3, 9))
def test_no_other_deal_makes_the_slowest_inner_step_shorter(speeds: list[float], batch: int) -> None:
    paces = said(*speeds)
    found = deal_of(batch, paces, dict.fromkeys(paces, OWN))
    assert sum(found.values()) == batch and min(found.values()) >= 1
    best = min(step_time_s(each, paces) for each in all_deals(batch, len(speeds)))
    assert step_time_s(found, paces) == pytest.approx(best)
    assert ideal_time_s(batch, paces) <= best * (1 + 1e-9)


def test_micro_batches_of_different_sizes() -> None:
    """The sum comes as near to the global batch as it can."""
    paces = {0: pace(8.0, 16, 8), 1: pace(1.0, 3, 3)}
    found = deal_of(19, paces, {0: 16, 1: 3})
    assert found[0] % 8 == found[1] % 3 == 0
    assert abs(sum(found.values()) - 19) <= 4


@pytest.mark.parametrize(
    "lie",
    [
        Pace(1.0, 2**31, 1),
        Pace(1e-8, 2**31, 1),
        Pace(1e300, 1, 1),
        Pace(1.0, 2**31, 2**31),
        Pace(1.0, 2**30, 2**30 * 2 // 3),
    ],
)
def test_a_region_that_lies_about_itself_keeps_no_other_busy(lie: Pace) -> None:
    """Nor does it make anybody count to two billion."""
    honest = {0: pace(1.0), 1: pace(2.0)}
    deal, _ = after(Deal(), {**honest, 2: lie})
    assert all(1 <= deal.samples[region] <= MOST * OWN for region in honest)


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 5)), min_size=1, max_size=5), st.integers(1, 200)
)
def test_the_deal_is_that_of_dealing_one_by_one(regions: list[tuple[float, int]], batch: int) -> None:
    """The floors leave little to deal; the result is as if each micro-batch went to whoever is ready first."""
    paces = {region: pace(speed, samples=8 * unit, unit=unit) for region, (speed, unit) in enumerate(regions)}
    found = deal_of(batch, paces, dict.fromkeys(paces, 10**6))
    units = dict.fromkeys(paces, 1)
    left = batch - sum(each.unit for each in paces.values())
    while fitting := [region for region, each in paces.items() if 2 * left >= each.unit]:
        region = min(fitting, key=lambda r: ((units[r] + 1) * paces[r].unit / paces[r].speed, r))
        units[region] += 1
        left -= paces[region].unit
    by_one = {region: count * paces[region].unit for region, count in units.items()}
    assert step_time_s(found, paces) <= step_time_s(by_one, paces) * (1 + 1e-6)
    assert abs(sum(found.values()) - batch) <= max(abs(sum(by_one.values()) - batch), 5)


def test_nothing_is_dealt_before_all_speeds_are_known() -> None:
    deal, why = after(Deal(), said(3.0, 0.0))
    assert (deal.samples, why) == ({0: OWN, 1: OWN}, "")
    deal, why = after(deal, said(3.0, 1.0))
    assert deal.samples == {0: 6, 1: 2} and why


def test_a_speed_that_changes_for_a_moment_changes_nothing() -> None:
    deal, _ = after(Deal(), said(1.0, 1.0))
    for _ in range(3):
        for _ in range(ROUNDS - 1):
            deal, why = after(deal, said(1.0, 0.3))
            assert not why
        deal, why = after(deal, said(1.0, 1.0))
        assert (deal.samples, why) == ({0: OWN, 1: OWN}, "")


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_speed_that_stays_different_is_dealt_anew(fragments: int) -> None:
    deal, _ = after(Deal(), said(1.0, 1.0))
    for landing in range(ROUNDS * fragments):
        assert deal.samples == {0: OWN, 1: OWN}, landing
        deal, why = after(deal, said(3.0, 1.0), num_fragments=fragments)
    assert deal.samples == {0: 6, 1: 2} and why == "speeds have changed"


def test_small_differences_change_nothing() -> None:
    deal, _ = after(Deal(), said(1.0, 1.0))
    for _ in range(2 * ROUNDS):
        deal, why = after(deal, said(1.0, 1 / (GAIN - 0.01)))
        assert not why


def test_the_others_take_over_the_share_of_a_lost_region_and_give_it_back() -> None:
    """With a fixed batch. The speed counts, not the number of samples with which it was measured."""
    deal, _ = after(Deal(), said(2.0, 1.0, 1.0))
    assert deal.samples == {0: 6, 1: 3, 2: 3}
    left = said(2.0, 1.0, samples=dict(deal.samples))
    deal, why = after(deal, left)
    assert deal.samples == {0: 8, 1: 4} and why == "regions have come or gone"
    back = said(2.0, 1.0, 1.0, samples={**deal.samples, 2: OWN})
    deal, why = after(deal, back)
    assert deal.samples == {0: 6, 1: 3, 2: 3} and why


def test_a_batch_per_region_follows_the_regions() -> None:
    deal, _ = after(Deal(), said(1.0, 1.0, 1.0), rule=PER_REGION)
    deal, _ = after(deal, said(1.0, 1.0), rule=PER_REGION)
    assert deal.samples == {0: OWN, 1: OWN}
    deal, _ = after(deal, said(3.0, 1.0, 2.0, 2.0), rule=PER_REGION)
    assert deal.samples == {0: 6, 1: 2, 2: 4, 3: 4}


def test_a_newcomer_whose_speed_is_unknown_keeps_its_own_batch() -> None:
    deal, _ = after(Deal(), said(3.0, 1.0))
    deal, why = after(deal, said(3.0, 1.0, 0.0, samples=dict(deal.samples)))
    assert (deal.samples, why) == ({0: 6, 1: 2, 2: OWN}, "")


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), min_size=1, max_size=12))
def test_the_fixed_batch_stays_whatever_comes_and_goes(queue: list[list[float]]) -> None:
    deal = Deal()
    for speeds in queue:
        deal, _ = after(deal, said(*speeds, samples=dict(deal.samples)))
        if deal.batch >= len(speeds):  # each region has one micro-batch at least
            members = range(len(speeds))
            assert sum(deal.samples[region] for region in members) == deal.batch


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.dictionaries(st.integers(0, 4), st.integers(1, 6), min_size=1)),
        min_size=1,
        max_size=8,
    )
)
def test_every_sample_is_in_one_part_whatever_comes_and_goes(
    changes: list[tuple[int, dict[int, int]]],
) -> None:
    """Each change: so many inner steps later, regions have so many samples. All samples are dealt, in order; and each region
    counts its own without a gap.
    """
    queue, step, dealt = SampleQueue(samples={0: 1}), 0, []
    own: dict[int, list[int]] = {}
    for steps, samples in changes:
        for _ in range(steps):
            step += 1
            for region in sorted(queue.samples):
                part = queue.portion(region, own=9)
                dealt += range(part.begins(step), part.begins(step) + part.samples)
                own.setdefault(region, []).extend(
                    range(part.begins_own(step), part.begins_own(step) + part.samples)
                )
        queue = queue.then(step, samples)
        assert queue.portion(5, own=9).first == -1
    assert dealt == list(range(len(dealt)))
    assert all(numbers == list(range(len(numbers))) for numbers in own.values())
