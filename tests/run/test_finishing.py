"""A region at its end without which the others have gone on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_cocodc.errors import LeftBehind, LinkError
from hf_cocodc.link.records import Words
from hf_cocodc.run.about import About
from hf_cocodc.run.outer_optimizer import OuterOptimizer
from hf_cocodc.run.training import Training
from hf_cocodc.settings import OuterConfig


class Coasting(Training):
    """A run of 8 inner steps, whose engine is a stand-in."""

    def step(self, inner_lr: float = 0.0, trained: bool = True) -> Words | None:
        assert not trained
        self.engine.inner_step += 1
        return None


class Region(OuterOptimizer):
    """A region of which only the end is real."""

    def __init__(self, come_back: Any) -> None:
        self.calls: list[str] = []
        nothing: Any = SimpleNamespace(verdict=None, lost=None, word=None, note_saved_everywhere=print)
        checks = SimpleNamespace(refuse=lambda: None)
        inner: Any = SimpleNamespace(refuse_uncounted=lambda inner_step: None, copies=checks)
        link: Any = SimpleNamespace(region=2, num_regions=3, is_elastic=True)
        loop: Any = SimpleNamespace(keeps_link=True, stand_in=lambda: None)
        self.training = Coasting(
            link=link,
            accelerator=nothing,
            model=nothing,
            inner=inner,
            tokens=nothing,
            about=About(),
            loop=loop,
            config=OuterConfig(),
            allowed=(),
            max_steps=8,
            rule_of_batch=None,
            has_stages=False,
            is_dealt=False,
        )
        self.training.config, self.training.endings = OuterConfig(), nothing
        engine: Any = SimpleNamespace(inner_step=8, finish=self._end, facts=())
        self.training.engine = engine
        guard = SimpleNamespace(come_back=lambda error: come_back(self), guard=lambda step: step())
        self.elastic: Any = guard

    def _end(self, word: Any) -> None:
        self.calls.append(f"finish at {self.inner_step}")
        if len(self.calls) == 1:
            raise LeftBehind("the others have gone on")

    def close(self, reason: str | None = None) -> None:
        raise AssertionError


def test_a_region_comes_back_and_ends_with_the_others() -> None:
    """It makes the inner steps up to their end without training, and the end once more."""

    def come_back(region: Region) -> None:
        region.training.engine.inner_step = 5

    region = Region(come_back)
    region.finish()
    assert region.finished
    assert region.calls == ["finish at 8", "finish at 8"]
    assert region.inner_step == 8


def test_a_region_whose_run_is_over_says_where_the_model_is() -> None:
    def come_back(region: Region) -> None:
        raise LinkError("the run has ended.")

    region = Region(come_back)
    with pytest.raises(
        LinkError, match=r"cannot come back \(the run has ended\.\).* folder of another region"
    ):
        region.finish()
    assert not region.finished


def test_a_region_that_cannot_go_on_brings_its_transfers_to_their_end() -> None:
    """The others save them."""
    region = Region(lambda region: None)
    calls: list[str] = []
    region.training.engine.inner_step = 5
    region.training.engine.give_up_unsent = lambda: calls.append("give up")
    region.training.engine.wait_for_transfers = lambda: calls.append("wait")
    region.training.endings.ask_to_stop = lambda reason: calls.append("ask")

    def fails(*given: Any) -> None:
        raise ValueError("out of memory")

    region.training.step = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="out of memory"):
        region.leave("an error")
    assert calls == ["give up", "ask", "wait"]
