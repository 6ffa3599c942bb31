"""The norm guard: what counts of each region, from numbers that all regions have."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cocodc.errors import InputError
from hf_cocodc.parts.guard import (
    LONGEST_HISTORY,
    NOT_BOUNDED,
    RATES_DIFFER,
    WARM_UP,
    Guard,
    Ordinary,
    Said,
    Verdict,
    agreed,
    believed,
    is_far,
    judge,
    ordinary,
)
from hf_cocodc.settings import OuterConfig

GUARD = Guard(clip=5, drop=50)
KNOWN = Ordinary(2.0)
NORMS = st.floats(0, 1e308) | st.just(math.inf)


def say(norms: list[float], weights: list[float] | None = None, **more: float) -> list[Said]:
    return [
        Said(norm, weight, **more) for norm, weight in zip(norms, weights or [1.0] * len(norms), strict=True)
    ]


def test_nothing_out_of_the_ordinary_changes_nothing() -> None:
    """The weights are the very ones that the regions said, and the mean divides by their sum: the same bits."""
    weights = [0.1, 0.7, 0.0]
    verdict = judge(GUARD, Ordinary(1.0), say([1.0, 5.0, 0.0], weights))
    assert verdict.weights == tuple(weights)
    assert (verdict.divisor, verdict.fates) == (None, ("", "", ""))


@pytest.mark.parametrize(
    ("norms", "weights", "fates"),
    [
        ([4.0, 10.0], [1.0, 1.0], ("", "")),
        ([4.0, 20.1], [1.0, 1.0 * 20 / 20.1], ("", "clipped")),
        ([4.0, 201.0], [1.0, 0.0], ("", "dropped")),
        ([4.0, math.inf, 3.0], [1.0, 0.0, 1.0], ("", "dropped", "")),
        ([1.0] * 7 + [1e4], [1.0] * 7 + [0.0], ("",) * 7 + ("dropped",)),
    ],
    ids=str,
)
def test_what_is_far_too_large_counts_less(
    norms: list[float], weights: list[float], fates: tuple[str, ...]
) -> None:
    """Beside the larger one of the history (2 here) and the regions now."""
    verdict = judge(GUARD, KNOWN, say(norms))
    assert verdict.weights == pytest.approx(weights)
    assert verdict.fates == fates
    left = len(norms) - fates.count("dropped")
    assert verdict.total == left, "a clipped region's part is smaller, the others' parts are not larger"


@pytest.mark.parametrize(
    ("norms", "fates"),
    [
        ([99.0, 99.0], ("", "")),
        ([101.0], ("",)),
        ([1e9, 1e9, 2e9], ("", "", "")),
        ([101.0, 1e9], ("void", "void")),
        ([1.0, 1e6, 1e6], ("", "void", "void")),
        ([1.0, 2.0, 1e6, 1e6], ("", "", "dropped", "dropped")),
    ],
    ids=str,
)
def test_a_majority_far_above_the_history_is_no_new_normal(
    norms: list[float], fates: tuple[str, ...]
) -> None:
    """Beyond 50 times the history (2 here) the mean is void if regions differ. All together may go as fast as they like."""
    verdict = judge(GUARD, KNOWN, say(norms))
    assert verdict.fates == fates
    assert verdict.is_void == ("void" in fates)
    assert believed(1e-9, verdict) == (math.inf if verdict.is_void else 1e-9)


@pytest.mark.parametrize(
    ("norms", "weights", "fates"),
    [
        ([1.0, 49.0], [1.0, 1.0], ("", "clipped")),
        ([1.0, 51.0], [1.0, 1.0], ("", "void")),
        ([1.0, 51.0], [0.1, 1.0], ("", "")),
        ([51.0, 1.0], [0.1, 1.0], ("dropped", "")),
        ([1.0, 51.0], [0.99, 1.0], ("", "void")),
        ([1.0, 2.0, 1e6], [0.5, 0.51, 0.52], ("", "", "dropped")),
        ([1.0, 2.0, 101.0], [1.0, 1.0, 1.0], ("", "", "dropped")),
        ([1.0, 51.0, 51.0], [1.0, 1.0, 1.0], ("", "void", "void")),
        ([1.0, 51.0, 0.0], [0.5, 0.5, 0.0], ("", "void", "")),
        ([0.0, 0.0, 51.0], [1.0, 1.0, 1.0], ("", "", "")),
        ([0.0, 1.0, 2.0, 3.0, 101.0], [1.0] * 5, ("", "", "", "", "dropped")),
    ],
    ids=str,
)
def test_without_a_history_the_regions_now_judge(
    norms: list[float], weights: list[float], fates: tuple[str, ...]
) -> None:
    """Those that have trained alike. Fewer than half can be wrong; where as many say one thing as the other, no mean counts."""
    assert judge(GUARD, Ordinary(), say(norms, weights)).fates == fates


def test_a_history_begins_after_the_warm_up() -> None:
    """Of norms and of paces on their own: checkpoints of earlier versions have no paces."""
    assert ordinary([3.0] * (WARM_UP - 1), []) == Ordinary()
    assert ordinary([3.0] * WARM_UP, [7.0]) == Ordinary(3.0, 0.0)
    assert ordinary([3.0] * WARM_UP, [7.0] * WARM_UP) == Ordinary(3.0, 7.0)


def test_norms_may_follow_the_learning_rate() -> None:
    """A spike of all regions' rate, and their norms with it, is no fault; the same norms without it are one."""
    known = Ordinary(2.0, 20.0)  # at a rate of 0.1
    assert not any(judge(GUARD, known, say([2e3, 2e3], rate=100.0)).fates)
    assert judge(GUARD, known, say([2e3, 2e4], rate=0.1)).is_void
    assert not any(judge(GUARD, known, say([2.0, 2.0], rate=1e-9)).fates), "norms fall later than rates"


def test_outside_of_what_can_be_compared_nothing_is_judged() -> None:
    """Steps that nothing bounds, and rates that differ on purpose; a rate a thousand times too large is no purpose."""
    free = [Said(1.0), Said(1e9, is_bounded=False)]
    assert judge(GUARD, KNOWN, free) == Verdict((1.0, 1.0), fates=("", ""), outside=NOT_BOUNDED)
    apart = [Said(1.0, rate=0.1), Said(1e9, rate=1.0)]
    assert judge(GUARD, KNOWN, apart) == Verdict((1.0, 1.0), fates=("", ""), outside=RATES_DIFFER)
    assert judge(GUARD, KNOWN, [Said(1.0, rate=0.1), Said(1e9, rate=100.0)]).fates == ("", "dropped")
    new = [Said(1.0, rate=0.1), Said(0.1, weight=0.3, rate=0.03)]
    assert not judge(GUARD, KNOWN, new).outside, "a region that has just come in made fewer steps"
    assert not judge(GUARD, KNOWN, [Said(1.0, rate=0.1), Said(1.0, weight=0.0, rate=9.0)]).outside


def test_a_region_that_stands_still_lets_nothing_pass() -> None:
    """Its norm is zero, and so may be the median of the regions now; the history judges all the same."""
    assert judge(GUARD, Ordinary(1.0), say([0.0, 1e9])).fates == ("", "dropped")
    assert judge(GUARD, Ordinary(1.0), say([0.0, 0.0, 6.0])).fates == ("", "", "clipped")


def test_nobody_judges() -> None:
    """Where there is no guard, and where nobody counts or moves."""
    for verdict in (
        judge(None, KNOWN, say([1.0, 1e9])),
        judge(GUARD, KNOWN, say([1.0, 1e9], [0.0, 0.0])),
        judge(GUARD, Ordinary(), say([0.0, 0.0])),
    ):
        assert not any(verdict.fates)
        assert verdict.divisor is None


def test_the_settings_allow_what_the_guard_can_remember() -> None:
    """Settings import no part, and name the bounds themselves."""
    for history in (WARM_UP, LONGEST_HISTORY):
        assert OuterConfig(guard={"history": history}).guard["history"] == history  # type: ignore[index]
    for history in (WARM_UP - 1, LONGEST_HISTORY + 1):
        with pytest.raises(InputError, match=rf"{WARM_UP} \.\. {LONGEST_HISTORY}"):
            OuterConfig(guard={"history": history})
    assert OuterConfig(guard={}).guard == Guard()._asdict()


def test_what_a_codec_adds_makes_no_mean_void() -> None:
    """Of regions that count; what it adds changes nothing else."""
    norms, weights = [1.0, 60.0, 2.0], [1.0, 1.0, 0.0]
    plain = judge(GUARD, Ordinary(1.5), say(norms, weights))
    fed = [
        each._replace(carried=carried)
        for each, carried in zip(say(norms, weights), [7.0, 4.0, 1e9], strict=True)
    ]
    verdict = judge(GUARD, Ordinary(1.5), fed)
    assert (plain.most, verdict.most) == (75.0, 145.0)
    assert verdict._replace(most=plain.most) == plain


def test_who_sends_too_much_does_not_raise_what_is_ordinary() -> None:
    """Two of three grow by 1.15 a round, from within the limits on: what is remembered of them is what was left of them."""
    norms, norm = [1.0] * 16, 1.0
    for _ in range(60):
        norm *= 1.15
        said = say([1.0, norm])
        verdict = judge(GUARD, ordinary(norms, []), said)
        found = agreed(said, verdict, GUARD)
        assert found is not None
        norms = [*norms, found[0]][-16:]
    assert max(norms) == 1.0
    assert verdict.fates == ("", "dropped")


def test_a_loss_is_far_above_the_others() -> None:
    """Twice and three nats more; a loss that is not positive is none whose multiples say anything."""
    assert is_far(math.inf, [1.0] * WARM_UP)
    assert is_far(5.1, [1.0] * WARM_UP)
    assert is_far(5.1, [9.0, 1.0]), "before, the smallest counts: it falls"
    for loss, losses in ((5.0, [1.0] * WARM_UP), (math.inf, []), (9.0, [0.0] * WARM_UP)):
        assert not is_far(loss, losses)


@settings(max_examples=200, derandomize=True)
@given(
    rows=st.lists(st.tuples(NORMS, st.sampled_from([0.0, 1e-9, 0.3, 1.0])), min_size=1, max_size=8),
    known=st.floats(0, 1e308),
    data=st.data(),
)
def test_whatever_is_sent(rows: list[tuple[float, float]], known: float, data: st.DataObject) -> None:
    """Every region comes to the same verdict in any order; never are all dropped; no mean has more than clip times a limit."""
    said = [Said(norm, weight) for norm, weight in rows]
    verdict = judge(GUARD, Ordinary(known), said)
    if any(weight for _, weight in rows):
        assert any(verdict.weights)
    largest = max(
        (norm for (norm, _), weight in zip(rows, verdict.weights, strict=True) if weight), default=0.0
    )
    assert verdict.is_void or believed(min(largest, 1e154) ** 2, verdict) < math.inf
    for (norm, weight), judged, fate in zip(rows, verdict.weights, verdict.fates, strict=True):
        assert 0 <= judged <= weight
        assert (judged == weight) == (fate in ("", "void") or not weight)
        if verdict.limit and judged and not verdict.is_void:
            assert norm * judged / weight <= GUARD.clip * verdict.limit * (1 + 1e-9)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = judge(GUARD, Ordinary(known), [said[i] for i in order])
    assert shuffled.fates == tuple(verdict.fates[i] for i in order)
    assert shuffled.weights == tuple(verdict.weights[i] for i in order)


@settings(max_examples=100, derandomize=True)
@given(sound=st.lists(st.floats(0.5, 2), min_size=2, max_size=5), wrong=st.lists(NORMS, max_size=4))
def test_fewer_than_half_cannot_move_what_is_ordinary(sound: list[float], wrong: list[float]) -> None:
    """Whatever they send, it stays within the norms of the others, with a history and without one."""
    wrong = wrong[: (len(sound) - 1) // 2 if len(sound) % 2 else len(sound) // 2 - 1]
    said = say([*wrong, *sound])
    for known in (Ordinary(), Ordinary(1.0)):
        verdict = judge(GUARD, known, said)
        found = agreed(said, verdict, GUARD)
        assert found is not None
        assert verdict.is_void or min(sound) <= found[0] <= max(sound)
