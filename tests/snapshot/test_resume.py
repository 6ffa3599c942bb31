"""Which checkpoint all regions resume from, by what each of them holds."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cocodc.snapshot.resume import HeldCheckpoint, Holdings, choose

RUN = 7


ALL = (0, 1, 2)


@pytest.mark.parametrize(
    ("held", "step", "holders"),
    [
        ([{2: ALL, 4: ALL}, {2: ALL}, {2: ALL, 4: ALL}], 2, [0, 1, 2]),
        ([{2: ALL, 4: (0, 2)}, {2: ALL}, {2: ALL, 4: (0, 2)}], 4, [0, 2]),
        ([{2: ALL}, {2: ALL, 4: (1, 2)}, {2: ALL, 4: (1, 2)}], 4, [1, 2]),
        ([{2: ALL, 4: ALL}, {2: ALL}, {2: ALL, 4: (0, 2)}], 4, [0, 2]),
        ([{2: ALL, 4: (0, 2)}, {2: ALL}, {2: ALL}], 2, [0, 2]),
    ],
    ids=[
        "one has not saved",
        "one was lost before",
        "the first was lost before",
        "one was lost while the others saved",
        "one was lost before, another has not saved",
    ],
)
def test_a_lost_region_does_not_take_the_others_back(held: Any, step: int, holders: list[int]) -> None:
    offers = {
        region: Holdings(run=RUN, held=tuple(HeldCheckpoint(at, writers) for at, writers in each.items()))
        for region, each in enumerate(held)
    }
    choice = choose(offers)
    assert (choice.step, choice.holders, choice.run) == (step, holders, RUN)


def offers(**told: list[int]) -> dict[int, Holdings]:
    """Regions by the names of their runs ("a0", "b1"), with the steps that they hold."""
    return {
        int(name[1:]): Holdings(run=ord(name[0]), held=tuple(HeldCheckpoint(step, ALL) for step in steps))
        for name, steps in told.items()
    }


def test_the_run_of_most_regions_goes_on() -> None:
    """The others' checkpoints do not count; in a tie, the first region's run goes on."""
    assert choose(offers(a0=[8], b1=[2, 4], b2=[4]))[:3] == (4, [1, 2], ord("b"))
    assert choose(offers(a0=[8], b1=[2, 4]))[:3] == (8, [0], ord("a"))
    assert choose(offers(a0=[], b1=[]))[:3] == (0, (), 0)


def test_without_a_common_step_the_newest_counts() -> None:
    assert choose(offers(a0=[2], a1=[4, 6], a2=[6]))[:3] == (6, [1, 2], ord("a"))


def test_a_first_checkpoint_that_one_region_lacks() -> None:
    """The region takes the others' progress over."""
    told = {0: Holdings(run=RUN, held=(HeldCheckpoint(4, ALL),)), 1: Holdings(run=RUN)}
    assert choose(told)[:3] == (4, [0], RUN)


@given(
    st.dictionaries(
        st.integers(0, 4),
        st.builds(
            lambda run, steps, writers: Holdings(
                run=run, held=tuple(HeldCheckpoint(step, tuple(writers)) for step in steps)
            ),
            st.integers(1, 2),
            st.sets(st.integers(1, 5)),
            st.sets(st.integers(0, 4)),
        ),
        min_size=1,
    )
)
def test_whatever_regions_hold(told: dict[int, Holdings]) -> None:
    """The choice is a checkpoint of the chosen run that each holder has, and exists if any region has one."""
    choice = choose(told)
    assert bool(choice.step) == any(offer.held for offer in told.values())
    assert bool(choice.holders) == bool(choice.step)
    for region in choice.holders:
        assert told[region].run == choice.run
        assert choice.step in {each.step for each in told[region].held}
    one = told[min(told)]
    assert msgspec.json.decode(msgspec.json.encode(one), type=Holdings) == one
