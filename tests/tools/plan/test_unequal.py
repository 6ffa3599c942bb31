"""The forecast of regions of different speed, against the same regions in simulated time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_cocodc.engine.balance import Batch
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.lockstep import LockstepLink, VirtualLink, run_in_lockstep
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.tools.plan.unequal import Paces, paces_of
from tests.toys import Blocks

STEP_S, ACCUMULATE, INTERVAL, STEPS = 2.0, 8, 4, 12


def planned(speeds: tuple[float, ...], regions: int, *overrides: str, gpus: int = 1) -> Paces:
    given = ["training.per_device_train_batch_size=2", f"training.gradient_accumulation_steps={ACCUMULATE}"]
    recipe = Recipe.load("quickstart/diloco", [*given, "data.block_size=32", *overrides])
    return paces_of(recipe, regions, speeds, STEP_S, gpus)


def simulated(speeds: tuple[float, ...], regions: int, balance: str | None) -> tuple[dict[str, int], float]:
    """The last deal, and the seconds of the run's last inner steps, which have no landing between them."""
    deals: list[dict[str, Any]] = []

    def body(region: int, link: LockstepLink) -> float:
        method = from_config(OuterConfig(sync_interval=INTERVAL))
        outer = Synchronizer(
            Blocks([torch.zeros(1)]),
            method,
            link,
            record=lambda kind, **facts: deals.append(facts) if kind == "deal" else None,
            balance=balance,
            batch=Batch(ACCUMULATE, 1),
        )
        began = 0.0
        for step in range(1, STEPS + 1):
            outer.step()
            began = link.now if step == STEPS - INTERVAL else began
        return link.now - began

    link = VirtualLink(step_time_s=STEP_S, latency_s=0.0, bandwidth=1e12, speeds=speeds)
    took_s = max(run_in_lockstep(regions, body, link))
    return deals[-1]["samples"] if deals else {}, took_s / INTERVAL


@pytest.mark.parametrize(("speeds", "regions"), [((3.0, 1.0), 2), ((4.0, 2.0), 4), ((1.0, 1.6, 0.3), 3)])
def test_a_forecast_is_what_regions_do(speeds: tuple[float, ...], regions: int) -> None:
    """Micro-batches and the time of an inner step, dealt and not; regions that are not named have speed 1."""
    for balance in ("auto", "equal"):
        found = planned(speeds, regions, f"regions.balance={balance}")
        deal, step_s = simulated(speeds, regions, "fixed" if balance == "auto" else None)
        assert found.step_s == pytest.approx(step_s, rel=1e-3)
        if balance == "auto":
            assert {str(region): count for region, count in found.dealt.items()} == deal
    assert sum(found.dealt.values()) == regions * ACCUMULATE


def test_the_words_are_tokens_by_hand() -> None:
    """Two regions, 3 : 1: 16 micro-batches of 2 x 32 tokens in 2 s with equal batches, in 1 s with dealt ones."""
    (words,) = planned((3.0, 1.0), 2).in_words()
    assert "the sum of the regions' speeds is 1,024 tokens a second" in words
    assert "equal batches they make 512 tokens a second (50% of the sum)" in words
    assert "regions.balance=auto 1,024 tokens a second (100% of the sum), 2.00 times as many" in words
    assert "of 16 micro-batches of an inner step, region 0: 12, region 1: 4." in words
    assert "with equal batches: an inner step takes 2 s" in words
    (words,) = planned((3.0, 1.0), 2, "regions.balance=auto", gpus=4).in_words()
    assert "speeds is 4,096 tokens" in words and "with dealt batches: an inner step takes 1 s" in words


def test_what_cannot_be_dealt_is_said() -> None:
    """One micro-batch a region: nothing changes, and the advice is that of a run."""
    words, advice = planned((3.0, 1.0), 2, "training.gradient_accumulation_steps=1").in_words()
    assert "1.00 times as many" in words
    assert (
        advice.startswith("regions.balance: the speeds") and "takes 2.00 times as long as it could" in advice
    )
    with pytest.raises(InputError, match=r"training\.gradient_accumulation_steps=0 must be at least 1"):
        planned((), 2, "training.gradient_accumulation_steps=0")


def test_regions_of_one_speed_have_nothing_to_deal() -> None:
    """Nothing is said, but to who has asked for a deal."""
    assert planned((), 2).in_words() == planned((2.0, 2.0), 2).in_words() == []
    (hint,) = planned((), 2, "regions.balance=auto").in_words()
    assert "for example --speeds 3,1" in hint
