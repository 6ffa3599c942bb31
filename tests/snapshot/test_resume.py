"""Which checkpoint all regions resume from, by what each of them holds."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_cocodc.errors import CheckpointError, LinkError
from hf_cocodc.link.lockstep import LockstepHub, LockstepLink
from hf_cocodc.snapshot.resume import (
    HeldCheckpoint,
    Holdings,
    checkpoint_to_resume,
    choose,
    refuse_lost,
    refuse_rivals,
)

RUN = 7
ALL = (0, 1, 2)
CASES = {  # what each region holds: the regions that took part, by step; then the choice, and who has it
    "one has not saved": ([{2: ALL, 4: ALL}, {2: ALL}, {2: ALL, 4: ALL}], 2, [0, 1, 2]),
    "one was lost before": ([{2: ALL, 4: (0, 2)}, {2: ALL}, {2: ALL, 4: (0, 2)}], 4, [0, 2]),
    "the first was lost before": ([{2: ALL}, {2: ALL, 4: (1, 2)}, {2: ALL, 4: (1, 2)}], 4, [1, 2]),
    "one was lost while the others saved": ([{2: ALL, 4: ALL}, {2: ALL}, {2: ALL, 4: (0, 2)}], 4, [0, 2]),
    "one was lost before, another has not saved": ([{2: ALL, 4: (0, 2)}, {2: ALL}, {2: ALL}], 2, [0, 2]),
    "one was lost before its first checkpoint": (
        [{2: (0, 2), 4: (0, 2)}, {}, {2: (0, 2), 4: (0, 2)}],
        4,
        [0, 2],
    ),
    "one of two was lost before its first checkpoint": ([{2: (0,), 4: (0,)}, {}], 4, [0]),
    "the first of two was lost before its first checkpoint": ([{}, {2: (1,), 4: (1,)}], 4, [1]),
    "one was lost while all saved the first": ([{2: ALL}, {}, {2: ALL}], 2, [0, 2]),
    "one was lost before the first, and another later": ([{2: (0, 2), 4: (0,)}, {}, {2: (0, 2)}], 4, [0]),
    "one came back, and has not saved": ([{2: (0, 2), 4: ALL}, {}, {2: (0, 2), 4: ALL}], 4, [0, 2]),
    "one came back, and has saved": ([{2: (0, 2), 4: ALL}, {4: ALL}, {2: (0, 2), 4: ALL}], 4, [0, 1, 2]),
    "one came back, and the others have not saved": ([{2: (0, 2)}, {4: ALL}, {2: (0, 2)}], 4, [1]),
    "nobody has saved": ([{}, {}, {}], 0, []),
}


def holds(steps: dict[int, tuple[int, ...]]) -> Holdings:
    return Holdings(run=RUN, held=tuple(HeldCheckpoint(at, writers) for at, writers in steps.items()))


@pytest.mark.parametrize(("held", "step", "holders"), CASES.values(), ids=CASES.keys())
def test_a_lost_region_does_not_take_the_others_back(held: Any, step: int, holders: list[int]) -> None:
    choice = choose(dict(enumerate(map(holds, held))))
    assert (choice.step, list(choice.holders), choice.run) == (step, holders, RUN if step else 0)


@pytest.mark.parametrize(
    ("held", "left", "begins"),
    [
        ([{4: (0,)}, {}], [1], "step 0"),
        ([{2: ALL, 4: (0, 2)}, {2: ALL}, {2: ALL}], [1, 2], None),
        ([{2: ALL, 6: (0,)}, {2: ALL}, {2: ALL, 4: (0, 2)}], [1, 2], "checkpoint-4"),
        ([{2: ALL, 4: (0, 2)}, {2: ALL}, {2: ALL, 4: (0, 2)}], [1, 2], None),
        ([{4: ALL}, {}, {}], [0, 2], None),
        ([{}, {}, {}], [0], None),
    ],
    ids=[
        "the only one that holds any",
        "one of two that hold it",
        "the only one with the newest",
        "one of two with the newest",
        "one that holds none",
        "none holds any",
    ],
)
def test_regions_begin_no_earlier_because_one_is_lost_while_they_choose(
    held: Any, left: list[int], begins: str | None
) -> None:
    """Else they would train where the lost one has trained, and overwrite a model that may be finished."""
    holdings = dict(enumerate(map(holds, held)))
    if begins is None:
        refuse_lost(holdings, left)
        return
    with pytest.raises(
        LinkError, match=rf"region 0, which holds .* was lost .* begin from {begins}: nothing "
    ):
        refuse_lost(holdings, left)


class Losing(LockstepLink):
    """A link whose region 0 is lost after so many collective calls of region 1."""

    def __init__(self, calls: int) -> None:
        super().__init__(LockstepHub(1), 0, 1)
        self.region, self.calls = 1, calls

    @property
    def members(self) -> tuple[int, ...]:
        return (0, 1) if self.calls > 0 else (1,)

    parties = members

    def gather(self, record: Any, what: str) -> tuple[Any, ...]:
        parties, self.calls = len(self.members), self.calls - 1
        return (record,) * min(parties, len(self.members))

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        """What is this region's own stays."""


@pytest.mark.parametrize("calls", [1, 2])
def test_a_region_that_is_lost_before_it_says_what_it_holds_ends_the_choice(
    calls: int, tmp_path: Path
) -> None:
    with pytest.raises(LinkError, match="region 0 was lost before it said which checkpoints it holds"):
        checkpoint_to_resume(Losing(calls), Accelerator(), tmp_path / "region-1", True)


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


def test_two_runs_of_as_many_regions_are_refused() -> None:
    """Which one is the newer cannot be known: a region may have been lost before the second one had its folder."""
    told = offers(a0=[8], b1=[2, 4])
    with pytest.raises(
        CheckpointError, match=r"region 0 \(newest: checkpoint-8\) and region 1 .*-4\) are of two runs"
    ):
        refuse_rivals(told)
    refuse_rivals(told | offers(b2=[2]))
    refuse_rivals(told | offers(b1=[]))
    refuse_rivals({})


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
