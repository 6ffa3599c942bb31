"""The norm guard: what counts of each region, from numbers that all regions have."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cocodc.errors import InputError
from hf_cocodc.parts.guard import LONGEST_HISTORY, WARM_UP, Guard, agreed, believed, judge, reference
from hf_cocodc.settings import OuterConfig

GUARD = Guard(clip=5, drop=50)
NORMS = st.floats(0, 1e308) | st.just(math.inf)


def test_nothing_out_of_the_ordinary_changes_nothing() -> None:
    """The weights are the very ones that the regions said, and the mean divides by their sum: the same bits."""
    weights = (0.1, 0.7, 0.0)
    verdict = judge(GUARD, 1.0, [1.0, 5.0, 0.0], weights)
    assert verdict.weights == weights
    assert (verdict.divisor, verdict.fates) == (None, ("", "", ""))


@pytest.mark.parametrize(
    ("norms", "weights", "fates"),
    [
        ([4.0, 10.0], [1.0, 1.0], ("", "")),
        ([4.0, 20.1], [1.0, 1.0 * 20 / 20.1], ("", "clipped")),
        ([4.0, 201.0], [1.0, 0.0], ("", "dropped")),
        ([4.0, math.inf, 3.0], [1.0, 0.0, 1.0], ("", "dropped", "")),
        ([1e9], [1.0], ("",)),
        ([1e9, 1e9], [1.0, 1.0], ("", "")),
        ([1.0] * 7 + [1e4], [1.0] * 7 + [0.0], ("",) * 7 + ("dropped",)),
    ],
    ids=str,
)
def test_what_is_far_too_large_counts_less(
    norms: list[float], weights: list[float], fates: tuple[str, ...]
) -> None:
    """Beside the larger one of the history (2 here) and the regions now; alone, or all together, nothing is too large."""
    verdict = judge(GUARD, 2.0, norms, [1.0] * len(norms))
    assert verdict.weights == pytest.approx(weights)
    assert verdict.fates == fates
    left = len(norms) - fates.count("dropped")
    assert verdict.total == left, "a clipped region's part is smaller, the others' parts are not larger"


def test_without_a_history_only_the_worst_is_dropped() -> None:
    """Until eight transfers of a fragment have landed, the regions now are all there is, if they count alike."""
    assert reference([3.0] * (WARM_UP - 1)) == 0
    assert reference([3.0] * WARM_UP) == 3
    assert judge(GUARD, 0.0, [1.0, 49.0], [1.0, 1.0]).fates == ("", "")
    assert judge(GUARD, 0.0, [1.0, 51.0, 0.0], [0.5, 0.5, 0.0]).fates == ("", "dropped", "")
    assert judge(GUARD, 0.0, [1.0, 51.0], [0.1, 1.0]).fates == ("", "")


def test_a_region_that_stands_still_lets_nothing_pass() -> None:
    """Its norm is zero, and so may be the median of the regions now; the history judges all the same."""
    assert judge(GUARD, 1.0, [0.0, 1e9], [1.0, 1.0]).fates == ("", "dropped")
    assert judge(GUARD, 1.0, [0.0, 0.0, 6.0], [1.0, 1.0, 1.0]).fates == ("", "", "clipped")


def test_nobody_judges() -> None:
    """Where there is no guard, where nobody counts, and where the ordinary norm is zero."""
    for verdict in (
        judge(None, 1.0, [1.0, 1e9], [1.0, 1.0]),
        judge(GUARD, 1.0, [1.0, 1e9], [0.0, 0.0]),
        judge(GUARD, 0.0, [0.0, 1e9], [1.0, 1.0]),
    ):
        assert not any(verdict.fates)
        assert verdict.divisor is None


def test_the_settings_allow_what_the_guard_can_remember() -> None:
    """Settings import no part, and name the bounds themselves."""
    for history in (WARM_UP, LONGEST_HISTORY):
        assert OuterConfig(guard={"history": history}).guard["history"] == history  # type: ignore[index]
    for history in (WARM_UP - 1, LONGEST_HISTORY + 1):
        with pytest.raises(InputError, match=f"from {WARM_UP} to {LONGEST_HISTORY}"):
            OuterConfig(guard={"history": history})


def test_what_a_codec_adds_makes_no_mean_void() -> None:
    """Of regions that count; what it adds changes nothing else."""
    plain = judge(GUARD, 1.0, [1.0, 60.0, 2.0], [1.0, 1.0, 0.0])
    fed = judge(GUARD, 1.0, [1.0, 60.0, 2.0], [1.0, 1.0, 0.0], [7.0, 4.0, 1e9])
    assert (plain.most, fed.most) == (50.0, 120.0)
    assert fed._replace(most=plain.most) == plain


@settings(max_examples=200, derandomize=True)
@given(
    rows=st.lists(st.tuples(NORMS, st.sampled_from([0.0, 1e-9, 0.3, 1.0])), min_size=1, max_size=8),
    ordinary=st.floats(0, 1e308),
    data=st.data(),
)
def test_whatever_is_sent(rows: list[tuple[float, float]], ordinary: float, data: st.DataObject) -> None:
    """Every region comes to the same verdict in any order; never are all dropped; no mean has more than clip times a limit."""
    norms, weights = map(list, zip(*rows, strict=True))
    verdict = judge(GUARD, ordinary, norms, weights)
    if any(weights):
        assert any(verdict.weights)
    largest = max((norm for norm, weight in zip(norms, verdict.weights, strict=True) if weight), default=0.0)
    assert believed(min(largest, 1e154) ** 2, verdict) < math.inf, "no mean is larger than what counts in it"
    for norm, said, weight, fate in zip(norms, weights, verdict.weights, verdict.fates, strict=True):
        assert 0 <= weight <= said
        assert (weight == said) == (not fate or not said)
        if verdict.limit and weight:
            assert norm * weight / said <= GUARD.clip * verdict.limit * (1 + 1e-9)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = judge(GUARD, ordinary, [norms[i] for i in order], [weights[i] for i in order])
    assert shuffled.fates == tuple(verdict.fates[i] for i in order)
    assert shuffled.weights == tuple(verdict.weights[i] for i in order)


@settings(max_examples=100, derandomize=True)
@given(sound=st.lists(st.floats(0.5, 2), min_size=2, max_size=5), wrong=st.lists(NORMS, max_size=4))
def test_fewer_than_half_cannot_move_what_is_ordinary(sound: list[float], wrong: list[float]) -> None:
    """Whatever they send, it stays within the norms of the others."""
    wrong = wrong[: (len(sound) - 1) // 2 if len(sound) % 2 else len(sound) // 2 - 1]
    norms = [*wrong, *sound]
    now = agreed(norms, [1.0] * len(norms))
    assert now is not None
    assert min(sound) <= now <= max(sound)
