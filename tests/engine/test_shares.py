"""How much a region counts in a mean: alike, by its inner steps or by its tokens."""

from __future__ import annotations

import pytest
import torch

from hf_cocodc.engine.fragment import Trained
from hf_cocodc.engine.shares import TOKENS, Shares
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback, run_in_lockstep
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.toys import Blocks

INTERVAL = 4
METHOD = from_config(OuterConfig(sync_interval=INTERVAL, outer_lr=1.0, outer_momentum=0.0))


def trained(rule: str, steps: int, is_elastic: bool = False, tokens: int | None = None) -> Shares:
    shares = Shares(rule, is_elastic)
    for _ in range(steps):
        shares.count(tokens)
    return shares


@pytest.mark.parametrize(
    ("rule", "is_elastic", "share"),
    [("equal", False, 1.0), ("equal", True, 0.75), ("steps", False, 0.75), ("tokens", True, 300 / TOKENS)],
)
def test_a_share_follows_its_rule(rule: str, is_elastic: bool, share: float) -> None:
    """3 of 4 steps were trained, 100 tokens in each. Who has trained nothing since the send has no share."""
    shares = trained(rule, 3, is_elastic, tokens=100)
    assert shares.share(Trained(), due=4) == share
    assert shares.share(shares.trained, due=4) == 0
    assert 0 <= shares.share(Trained(-9, -(10**13)), due=4) <= 1, "also with steps that were kept from before"


def place(region: int, step: int) -> float:
    """Where the only parameter of a region is after a step."""
    return float(step if region == 0 else -2 * step)


def global_after(weights: str, works: dict[int, list[int]], resumed_at: int = 0) -> list[float]:
    """The global params of each region after one round; `works`: tokens of each inner step, 0 for one that trains nothing."""

    def live(region: int, link: Link) -> float:
        model = Blocks([torch.zeros(1)])
        [param] = model.parameters()
        synchronizer = Synchronizer(model, METHOD, link, weights=weights)
        for step, tokens in enumerate(works[region], 1):
            with torch.no_grad():
                param.fill_(place(region, step))
            synchronizer.step(trained=tokens > 0, tokens=tokens)
            if step == resumed_at:
                state = synchronizer.state_dict()
                synchronizer = Synchronizer(model, METHOD, link, weights=weights, state=state)
        return float(synchronizer.fragments[0].global_params)

    return run_in_lockstep(len(works), live)


@pytest.mark.parametrize("resumed_at", [0, 2])
@pytest.mark.parametrize(
    ("weights", "shares"), [("equal", (1, 1)), ("steps", (1, 0.5)), ("tokens", (40, 90))]
)
def test_regions_count_by_what_they_have_trained(
    weights: str, shares: tuple[float, float], resumed_at: int
) -> None:
    """Region 1 trains two of four steps, on more tokens. A checkpoint in between changes nothing."""
    works = {0: [10, 10, 10, 10], 1: [60, 0, 0, 30]}
    ends = [place(region, INTERVAL) for region in (0, 1)]
    expected = sum(share * end for share, end in zip(shares, ends, strict=True)) / sum(shares)
    assert global_after(weights, works, resumed_at) == pytest.approx([expected] * 2)


def test_tokens_that_nobody_counts_are_an_error() -> None:
    """Not a share of zero for everybody."""
    synchronizer = Synchronizer(Blocks([torch.zeros(1)]), METHOD, loopback(), weights="tokens")
    synchronizer.step(trained=False)
    with pytest.raises(InputError, match=r"outer.weights=tokens .*outer.step\(loss, tokens="):
        synchronizer.step()


def test_weights_have_three_rules() -> None:
    """Another word is refused by name."""
    with pytest.raises(InputError, match="outer.weights.*equal, steps, tokens"):
        OuterConfig(weights="loss")
