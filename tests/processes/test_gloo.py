"""The gloo link itself: three regions as threads over loopback sockets, against lockstep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_cocodc import codecs
from hf_cocodc.codecs.base import Codec
from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.fragments import Fragment
from hf_cocodc.links import heartbeat
from hf_cocodc.links.base import Link, Trailer
from hf_cocodc.links.gloo import GlooLink
from hf_cocodc.links.lockstep import run_in_lockstep

SHAPES = ((300, 70), (33,))
FRAGMENT = Fragment(0, ("matrix", "vector"), SHAPES, 300 * 70 + 33)


def run_over_gloo(num_regions: int, body: Callable[[int, Link], Any], timeout_s: float = 30.0) -> list[Any]:
    """body(region, link) for every region at once, each on a thread of its own."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))

    def live(region: int) -> Any:
        link = GlooLink(store, "run", region, num_regions, connections=2, timeout_s=timeout_s)
        try:
            return body(region, link)
        finally:
            link.close()

    with ThreadPoolExecutor(num_regions) as pool:
        return list(pool.map(live, range(num_regions)))


@pytest.mark.parametrize("num_regions", [2, 3])
@pytest.mark.parametrize(
    "codec",
    [
        codecs.fp32(),
        codecs.int8(),
        codecs.fp4(),
        codecs.feedback(codecs.topk()),
        codecs.feedback(codecs.lowrank(4)),
    ],
    ids=["fp32", "int8", "fp4", "topk", "lowrank"],
)
def test_gloo_is_lockstep(codec: Codec, num_regions: int) -> None:
    """Means, own parts, bytes and trailers of two rounds are the same bits over sockets and in one process."""

    def body(region: int, link: Link) -> list[Any]:
        state, found = codec.init(FRAGMENT), []
        for step in (1, 2):
            outer_grad = torch.randn(
                FRAGMENT.numel, generator=torch.Generator().manual_seed(10 * region + step)
            )
            trailer = Trailer(weight=float(region != 1 or step == 1), inner_step=step, loss=region)
            conversation = codec.converse(outer_grad, FRAGMENT, state)
            arrival = link.mean(conversation, FRAGMENT.numel, trailer, f"step {step}").wait()
            state = arrival.result.state
            found += [arrival.result.mean, arrival.result.own(), arrival.bytes_sent, arrival.trailers]
        return found

    for ours, theirs in zip(
        run_over_gloo(num_regions, body), run_in_lockstep(num_regions, body), strict=True
    ):
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def test_a_region_that_leaves_says_why() -> None:
    """The others' error names the region that left, what they waited for, and the reason it gave."""

    def body(region: int, link: Link) -> str:
        if region == 1:
            link.close("KeyboardInterrupt at step 7")
            return ""
        with pytest.raises(RegionLostError) as caught:
            link.gather(Trailer(), "the end of the run")
        assert caught.value.region == 1
        return str(caught.value)

    said = run_over_gloo(2, body, timeout_s=3.0)[0]
    assert "region 1 left while region 0 waited for the end of the run: KeyboardInterrupt at step 7" in said


def test_a_closed_link_refuses_at_once() -> None:
    """Nobody waits on a link that was closed."""

    def body(region: int, link: Link) -> None:
        link.close()
        with pytest.raises(LinkError, match="the link is closed"):
            link.gather(Trailer(), "too late")

    run_over_gloo(2, body)


def meet(link: Link) -> None:
    """One small mean."""
    codec = codecs.fp32()
    conversation = codec.converse(torch.zeros(FRAGMENT.numel), FRAGMENT, codec.init(FRAGMENT))
    link.mean(conversation, FRAGMENT.numel, Trailer(), "step 1").wait()


def test_a_region_that_is_late_but_lives_is_waited_for() -> None:
    """Three time-outs of lateness cost nothing: the region shows signs of life, and gets on."""

    def body(region: int, link: Link) -> str:
        for _ in range(30 * region):
            time.sleep(0.1)
            link.tick()
        meet(link)
        return "met"

    assert run_over_gloo(2, body, timeout_s=1.0) == ["met", "met"]


def test_a_region_that_lives_but_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life without inner steps do not keep the others for ever; what they call for afterwards fails at once."""
    monkeypatch.setattr(heartbeat, "STUCK", 2)
    given_up = threading.Event()

    def body(region: int, link: Link) -> str:
        if region:
            given_up.wait(20)
            return ""
        try:
            meet(link)
        except RegionLostError as error:
            with pytest.raises(RegionLostError):
                meet(link)
            return str(error)
        finally:
            given_up.set()
        return "met"

    assert "it lives, but is stuck at step 0" in run_over_gloo(2, body, timeout_s=1.0)[0]
