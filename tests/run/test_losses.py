"""What the loss of a region does to a run that ends with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import InputError, RegionLostError, RunStopped
from hf_cocodc.link.records import Word
from hf_cocodc.run.endings import Endings, loss_in_words
from hf_cocodc.run.training import Training
from hf_cocodc.trainer.leaving import say_farewell
from tests.link.memory import Regions
from tests.toys import llama


def test_a_region_that_is_lost_before_training_ends_the_start() -> None:
    """Nothing is trained by fewer than were to begin."""
    regions = Regions(3, elastic=False)
    regions.links[0].session = SimpleNamespace(link=regions.links[0], is_other_lane=False)
    regions.links[1].close("its disk is full.")
    accelerator, model = Accelerator(cpu=True), llama(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    regions.links[2].close("it gives up")
    with pytest.raises(
        RegionLostError, match=r"region 1 is lost: its disk is full; region 2 .*: nothing was trained"
    ) as caught:
        OuterOptimizer(accelerator, model, optimizer, OuterConfig(sync_interval=2), link=regions.links[0])
    assert caught.value.region == 1
    regions.end()


def test_a_loop_that_does_not_look_hears_of_the_loss_at_its_next_step() -> None:
    """And not that it has called `step` too often."""
    outer: Any = SimpleNamespace(should_stop=True, raise_loss=lambda: None, inner_step=7)
    outer.training = SimpleNamespace(is_all_made=False)
    with pytest.raises(InputError, match="after the run has ended"):
        OuterOptimizer.step(outer)

    def loses() -> None:
        raise RegionLostError(1, "region 1 is lost")

    outer.raise_loss = loses
    with pytest.raises(RegionLostError):
        OuterOptimizer.step(outer)


@pytest.mark.parametrize("has_saved", [True, False])
def test_what_a_region_says_names_the_way_out_and_what_is_saved(has_saved: bool) -> None:
    said = loss_in_words(12, "region 1 is lost: its disk is full", has_saved)
    assert said.startswith("region 1 is lost: its disk is full. The other regions have ended at step 12")
    assert ("has saved checkpoint-12" in said) is has_saved and "--resume" in said


@pytest.mark.parametrize("is_all_made", [True, False])
def test_a_loss_after_the_last_step_stops_nobody(is_all_made: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of this step could not be resumed: nothing is left to train."""
    lost: list[int] = []
    link = SimpleNamespace(is_elastic=False, most_regions=3, parties=(0, 2), gather=lambda record, what: ())
    training: Any = SimpleNamespace(link=link, inner_step=8, is_all_made=is_all_made, has_stages=False)
    training._losses = lambda left: (1, "region 1 is lost: its disk is full")
    training.endings = SimpleNamespace(lose=lambda region, why: lost.append(region))
    assert Training.stop_if_lost(training, {0: Word(), 2: Word()}) is not is_all_made
    assert lost == ([] if is_all_made else [1])
    assert ("region 1 is lost: its disk is full: all steps are made" in caplog.text) is is_all_made


@pytest.mark.parametrize("savers", [(0, 1, 2), (0, 2)])
def test_who_stops_for_another_reason_counts_no_lost_region_among_those_that_have_saved(
    savers: tuple[int, ...],
) -> None:
    """A signal and a loss may come with one transfer; and a region that was away then may be back."""
    outer: Any = SimpleNamespace(finished=False, raise_loss=lambda: None, inner_step=7, verdict="stop")
    outer.why, outer.members = "region 0 was interrupted", (0, 1, 2)
    outer.link = SimpleNamespace(is_elastic=False, most_regions=3, region=0)
    endings = SimpleNamespace(word=Word(saved_at=7), saved_everywhere=7, savers=savers)
    outer.training = SimpleNamespace(endings=endings, journal=SimpleNamespace(write_error=print))
    with pytest.raises(RunStopped) as caught:
        say_farewell(outer)
    assert ("All regions have checkpoint-7" in str(caught.value)) is (len(savers) == 3)
    assert ("Regions 0 and 2 have checkpoint-7" in str(caught.value)) is (len(savers) == 2)


def test_a_region_that_was_away_when_others_saved_has_no_checkpoint_of_theirs() -> None:
    """It is back later, and is not counted until its own word has the step; nor is a base a checkpoint."""
    link: Any = SimpleNamespace(agreement=None, members=(0, 1), num_regions=2)
    endings = Endings(link, "auto", None)
    endings.note_saved_everywhere({0: Word(saved_at=4), 1: Word(saved_at=4)})
    endings.note_saved_everywhere({0: Word(saved_at=9)})
    endings.note_saved_everywhere({0: Word(saved_at=9), 1: Word(saved_at=4)})
    assert (endings.saved_everywhere, endings.savers) == (9, (0,))
    endings.note_saved_everywhere({0: Word(saved_at=12), 1: Word(saved_at=12)})
    endings.note_saved_everywhere({0: Word(saved_at=12)})
    assert (endings.saved_everywhere, endings.savers) == (12, (0, 1))
    endings.continue_from(15, is_base=True)
    assert (endings.word.saved_at, endings.saved_everywhere) == (0, 0)
