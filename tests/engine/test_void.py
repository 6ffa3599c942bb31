"""A mean that is not finite changes nothing, in any region, and training goes on."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.parts.codecs.base import Codec, Conversation
from hf_cocodc.parts.guard import Guard
from hf_cocodc.parts.tensors.flat import tensors_in
from tests.engine.test_landings import SETTINGS, START, STEPS, method_of, train
from tests.processes.test_link import run_over_tcp
from tests.toys import Blocks, params_of


class Overflows:
    """A codec whose mean overflows in one transfer, in all regions: finite outer gradients have no finite sum.

    With a `factor` all its values are so many times too large.
    """

    def __init__(self, codec: Codec, transfer: int, factor: float | None = None) -> None:
        self._codec, self._transfer, self._factor = codec, transfer, factor
        self._count: dict[int, int] = {}
        self.init, self.wire_bytes = codec.init, codec.wire_bytes

    def converse(self, outer_grad: Tensor, fragment: Any, state: Any) -> Conversation:
        count = self._count[fragment.index] = self._count.get(fragment.index, 0) + 1
        result = yield from self._codec.converse(outer_grad, fragment, state)
        if count == self._transfer and fragment.index == 0:
            if self._factor is None:
                result.mean[-1] = math.inf
            else:
                result.mean.mul_(self._factor)
        return result


def body(name: str, lost: int, end: Callable[[Synchronizer], Any]) -> Callable[[int, Link], Any]:
    def live(region: int, link: Link) -> Any:
        method = method_of(name)
        method = dataclasses.replace(method, codec=Overflows(method.codec, lost))
        events: list[tuple[str, dict[str, Any]]] = []
        model = Blocks(START)
        sync = Synchronizer(
            model, method, link, digest_interval=1, record=lambda kind, **facts: events.append((kind, facts))
        )
        kept: list[tuple[bool, ...]] = []
        for step in range(1, STEPS + 1):
            train(model, region, step)
            state = sync.fragments[0]
            before = [state.global_params.clone(), *(each.clone() for each in tensors_in(state.outer))]
            seen = len(events)
            sync.step(0.05)
            voids = [facts for kind, facts in events[seen:] if kind == "void"]
            lands = [facts for kind, facts in events[seen:] if kind == "land" and facts["fragment"] == 0]
            if voids and not lands:
                state = sync.fragments[0]
                now = [state.global_params, *tensors_in(state.outer)]
                kept.append(tuple(torch.equal(one, two) for one, two in zip(before, now, strict=True)))
        sync.finish()
        return events, kept, params_of(model), end(sync)

    return live


@pytest.mark.parametrize("run", [run_over_tcp, run_in_lockstep])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_mean_that_overflows_changes_nothing(
    name: str, run: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither global params nor outer state, also where steps are taken ahead; all regions end finite and equal."""
    with caplog.at_level(logging.WARNING):
        ours, theirs = run(2, body(name, 2, lambda sync: sync.fragments[0].nonfinite_rounds))
    for events, kept, model, rounds in (ours, theirs):
        [void] = [facts for kind, facts in events if kind == "void"]
        assert (void["fragment"], void["outer_grad_norm"], void["regions"]) == (0, None, 2)
        assert kept
        assert all(map(all, kept))
        assert torch.isfinite(model).all()
        assert rounds == 0, "later rounds counted"
        assert all(math.isfinite(f["outer_grad_norm"]) for kind, f in events if kind == "land")
    assert torch.equal(ours[2], theirs[2])
    assert "is not finite, or far larger than what the regions sent: it changes nothing, in" in caplog.text
    assert "differ between regions" not in caplog.text


@pytest.mark.parametrize("name", ["diloco", "streaming", "eager"])
@pytest.mark.parametrize(("factor", "voids"), [(1e3, 1), (4.0, 0)])
def test_a_mean_that_is_larger_than_what_regions_sent(
    name: str, factor: float, voids: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Finite, but altered on its way: it is void like one that is not finite. What a codec adds is not."""

    def live(region: int, link: Link) -> tuple[list[dict[str, Any]], Tensor]:
        method = method_of(name)
        method = dataclasses.replace(method, codec=Overflows(method.codec, 15, factor))
        events: list[dict[str, Any]] = []
        record = lambda kind, **facts: events.append({"kind": kind, **facts})  # noqa: E731
        model = Blocks(START)
        wide = Guard(clip=5, drop=50)  # momentum makes these steps overshoot, and norms rise and fall
        sync = Synchronizer(model, method, link, digest_interval=1, guard=wide, record=record)
        for _ in range(120):
            for param in model.parameters():
                param.detach().add_(0.05 * (1 + region))
            sync.step(0.05)
        sync.finish()
        return events, params_of(model)

    with caplog.at_level(logging.WARNING):
        (ours, one), (theirs, two) = run_in_lockstep(2, live)
    for events in (ours, theirs):
        found = [event for event in events if event["kind"] == "void"]
        assert [event["fragment"] for event in found] == [0] * voids
    assert ("far larger than what the regions sent" in caplog.text) == bool(voids)
    assert torch.equal(one, two)
    assert one.abs().max() < 100


@pytest.mark.parametrize(("factor", "voids"), [(1.0, 0), (1e4, 1)])
def test_what_error_feedback_carries_is_ordinary(factor: float, voids: int) -> None:
    """Regions go the same way, ever slower: top-k then sends what was left of faster rounds, many times the ordinary norm.

    A mean that is altered is void all the same.
    """

    def live(region: int, link: Link) -> tuple[list[dict[str, Any]], float]:
        method = method_of("diloco", codec="topk", error_feedback=True)
        method = dataclasses.replace(method, codec=Overflows(method.codec, 18, factor))
        events: list[dict[str, Any]] = []
        record = lambda kind, **facts: events.append({"kind": kind, **facts})  # noqa: E731
        way = torch.randn(2 * 4096, generator=torch.Generator().manual_seed(1))
        model = Blocks(torch.zeros(2 * 4096).split(4096))
        sync = Synchronizer(model, method, link, guard=Guard(), record=record)
        for step in range(30 * 6):
            for param, part in zip(model.parameters(), way.split(4096), strict=True):
                param.detach().add_(part * 0.5 ** (step // 6))
            sync.step(0.05)
        limit = max(each["outer_grad_norm"] / each["norms"][0] for each in events if each["kind"] == "land")
        return events, limit

    (ours, largest), _ = run_in_lockstep(2, live)
    assert [event["kind"] for event in ours if event["kind"] in ("void", "guard")] == ["void"] * voids
    assert largest > 50


def test_the_steps_come_with_the_next_transfer() -> None:
    """With an outer learning rate of 1 and no momentum, two regions end where they would without the void landing."""

    def end(lost: int) -> Tensor:
        def live(region: int, link: Link) -> Tensor:
            method = method_of("diloco", outer_lr=1.0, outer_momentum=0.0, merge="replace", overlap_steps=0)
            method = dataclasses.replace(method, codec=Overflows(method.codec, lost))
            model = Blocks(START)
            sync = Synchronizer(model, method, link)
            for _ in range(18):
                for param in model.parameters():
                    param.detach().add_(0.5 + region)
                sync.step(0.05)
            sync.finish()
            return params_of(model)

        return run_in_lockstep(2, live)[0]

    torch.testing.assert_close(end(2), end(0))


def test_an_evaluation_has_no_mean_that_overflows() -> None:
    """Regions whose global params differ (eager updates) show their mean; here every region's are finite, their sum is not."""

    def live(region: int, link: Link) -> None:
        sync = Synchronizer(Blocks([torch.zeros(3)]), method_of("eager"), link)
        sync.fragments[0].global_params[1] = 3e38
        with pytest.raises(InputError, match="not all values are finite"), sync.global_weights():
            pass

    run_in_lockstep(2, live)
