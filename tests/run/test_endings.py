"""What regions say of an early end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from hf_cocodc.link.group import RegionGroup
from hf_cocodc.link.ranks import SharedLink
from hf_cocodc.link.records import Ending, Word
from hf_cocodc.run.endings import Endings


def test_why_a_region_was_interrupted_is_waited_for() -> None:
    """Its note travels on another connection than the transfer that tells of the end. One that has completed leaves none."""
    waited: dict[int, float] = {}

    def note_of(region: int, wait_s: float = 0.0) -> str | None:
        waited[region] = wait_s
        return "the disk is full" if wait_s else None

    link: Any = SimpleNamespace(region=0, members=(0, 1, 2), num_regions=3, agreement=None, note_of=note_of)
    endings = Endings(link, "auto", max_steps=30)
    endings.after_step(9, {0: Word(), 1: Word(ending=Ending.INTERRUPTED), 2: Word(ending=Ending.DONE)})
    assert endings.verdict == "stop"
    assert endings.why == "region 1 was interrupted (the disk is full); region 2 has completed its training"
    assert waited[2] == 0.0 < waited[1]


def test_ranks_of_the_last_region_of_an_elastic_run_end_together() -> None:
    """A signal comes to each at another step. They end when the leader's word has come with a transfer, not one by one."""
    ranks = [
        SharedLink(None, 2, 1, torch.device("cpu"), cast(RegionGroup, None), is_elastic=True)
        for _ in range(2)
    ]
    both = [Endings(link, "auto", max_steps=30) for link in ranks]
    both[0].tell(ending=Ending.INTERRUPTED)
    for endings in both:
        endings.after_step(8, None)
        assert endings.verdict is None
        endings.after_step(9, {2: Word(ending=Ending.INTERRUPTED)})
        assert endings.verdict == "stop"
