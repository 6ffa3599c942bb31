"""Which checkpoint all regions resume from, by what each of them holds."""

from typing import Any

import pytest

from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.snapshot.checkpoint import Facts
from hf_cocodc.snapshot.choose import Good, newest_common

RUN = 7


class Shelf:
    """A region's checkpoints: step -> the regions that took part when it was written."""

    run, is_unsaved, num_damaged, skipped = RUN, False, 0, ()

    def __init__(self, held: dict[int, tuple[int, ...]]) -> None:
        self._held = held

    def newest(self, bound: int | None = None) -> Good:
        step = max((step for step in self._held if bound is None or step <= bound), default=0)
        return Good(step, self._held.get(step, ()), False)


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
    found = run_in_lockstep(3, lambda region, link: newest_common(link, Shelf(held[region])))  # type: ignore[arg-type]
    assert {choice.step for choice in found} == {step}
    assert all(list(choice.holders) == holders for choice in found)
    assert {choice.run for choice in found} == {RUN}


def test_of_older_checkpoints_all_regions_were_writers() -> None:
    old = Facts(step=4, region=0, num_regions=2, num_lanes=1, settings={}, finished=False, journal=0)
    content = old.to_json()
    del content["members"]
    assert list(Facts.from_json(content).writers) == [0, 1]
