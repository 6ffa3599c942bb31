"""The check at the end of a run: buffers are made equal, and nothing else may differ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import HandshakeError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.spreading import spread, spread_all
from hf_cocodc.resolve import from_config
from hf_cocodc.run.about import scales_of
from hf_cocodc.settings import OuterConfig
from tests.processes.test_link import run_over_tcp


class Normalized(nn.Module):
    """A layer, batch normalization with its running statistics, a frozen layer, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.base = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        for param in self.base.requires_grad_(False).parameters():
            nn.init.ones_(param)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(values))


def finish(
    change: Callable[[Normalized, int], None],
    run: Callable[..., list[Any]] = run_in_lockstep,
    events: list[dict[str, Any]] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """The model of each of three regions at the end of a run in which `change` has changed it."""

    def live(index: int, link: Link) -> dict[str, torch.Tensor]:
        model = Normalized()

        def record(kind: str, **facts: Any) -> None:
            if events is not None and index == 0:
                events.append({"kind": kind, **facts})

        method = from_config(OuterConfig(method="diloco", sync_interval=2))
        synchronizer = Synchronizer(model, method, link, record=record)
        for _ in range(3):
            model(torch.randn(5, 4, generator=torch.Generator().manual_seed(index)))
            synchronizer.step()
        with torch.no_grad():
            change(model, index)
        synchronizer.finish()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    return run(3, live)


@pytest.mark.parametrize("run", [run_in_lockstep, run_over_tcp])
def test_buffers_are_made_equal(run: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture) -> None:
    """Running statistics take the mean over the regions, counters region 0's values; the log and the journal say so."""
    kept: dict[int, torch.Tensor] = {}
    events: list[dict[str, Any]] = []

    def change(model: Normalized, index: int) -> None:
        kept[index] = model.norm.running_mean.clone()
        model.norm.num_batches_tracked += index
        model.cache += index

    with caplog.at_level(logging.WARNING):
        first, *others = finish(change, run, events)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    expected = torch.stack([kept[index].double() for index in range(3)]).mean(dim=0).float()
    assert torch.equal(first["norm.running_mean"], expected)
    assert not torch.equal(kept[0], kept[1])
    names = "norm.running_mean, norm.running_var, norm.num_batches_tracked"
    assert f"floating-point ones are averaged, others are region 0's now: {names}." in caplog.text
    assert sum(event["kind"] == "note" for event in events) == 1
    assert events[-1]["kind"] == "finish"


@pytest.mark.parametrize("run", [run_in_lockstep, run_over_tcp])
def test_a_frozen_parameter_that_differs_ends_the_run(run: Callable[..., list[Any]]) -> None:
    """By its name, and with the regions that differ; one that is trained behind the engine's back, too."""

    def change(model: Normalized, index: int) -> None:
        if index == 2:
            model.base.weight += 1

    with pytest.raises(
        HandshakeError, match=r"differ at the end of the run in base\.weight \(region 2 and region 0\)\."
    ):
        finish(change, run)


def test_a_tensor_that_only_one_region_has_ends_the_run() -> None:
    def change(model: Normalized, index: int) -> None:
        if index == 1:
            model.register_buffer("own", torch.zeros(2))

    with pytest.raises(HandshakeError, match=r"in own \(region 1 and region 0\)\."):
        finish(change)


def test_weights_without_values_are_not_compared() -> None:
    """A frozen parameter that is kept elsewhere (on the meta device) has no bytes here."""

    def change(model: Normalized, index: int) -> None:
        model.base.to("meta")
        model.norm.load_state_dict(nn.BatchNorm1d(4).state_dict())

    first, *others = finish(change)
    assert all(torch.equal(first["first.weight"], other["first.weight"]) for other in others)


def drift_apart(model: nn.Module, index: int, link: Link) -> None:
    """A run of one round, at whose end the last bits of the global params differ between regions."""
    synchronizer = Synchronizer(model, from_config(OuterConfig(method="diloco", sync_interval=2)), link)
    synchronizer.step()
    synchronizer.step()
    synchronizer.fragments[0].global_params.mul_(1 + 1e-6 * index)
    synchronizer.finish()


def test_global_params_that_drifted_apart_become_region_0s(caplog: pytest.LogCaptureFixture) -> None:
    """Processors that round differently leave no two models."""

    def live(index: int, link: Link) -> torch.Tensor:
        model = nn.Linear(3, 2)
        drift_apart(model, index, link)
        return model.weight.detach().clone()

    with caplog.at_level(logging.WARNING):
        mine, theirs = run_in_lockstep(2, live)
    assert torch.equal(mine, theirs)
    assert "the final global weights differed between regions" in caplog.text
    assert "are region 0's now: weight, bias." in caplog.text


def test_tensors_above_the_limit_of_other_messages_are_made_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large embedding, and a large buffer that is averaged: their size is known, so no limit for what others send counts."""
    monkeypatch.setattr(spread, "__defaults__", (1024,))
    monkeypatch.setattr(spread_all, "__defaults__", (1024,))

    def live(index: int, link: Link) -> dict[str, torch.Tensor]:
        model = nn.Embedding(100, 8)
        model.register_buffer("averaged", torch.full((1000,), float(index)))
        model.register_buffer("counter", torch.full((1000,), index))
        drift_apart(model, index, link)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    mine, theirs = run_in_lockstep(2, live)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert set(mine["averaged"].tolist()) == {0.5}
    assert set(mine["counter"].tolist()) == {0}


class Counting(nn.Linear):
    """Saves more than its tensors, as modules of FP8 do: what grows with what it has seen."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = len(state)


def test_what_modules_save_beside_their_tensors_stays_each_regions_own() -> None:
    """It changes in training, and is not compared: neither at the end, nor when regions meet."""

    def live(index: int, link: Link) -> int:
        model = nn.Sequential(Counting())
        method = from_config(OuterConfig(method="diloco", sync_interval=2))
        synchronizer = Synchronizer(model, method, link)
        model[0].seen = 5 + index
        assert scales_of(model) == {}
        synchronizer.step()
        synchronizer.finish()
        return model[0].seen

    assert run_in_lockstep(2, live) == [5, 6]


def test_buffers_of_different_shapes_stay_each_regions_own(caplog: pytest.LogCaptureFixture) -> None:
    """A table that grows with the longest sequence that a region has seen: the run ends well, and the log names it."""

    def change(model: Normalized, index: int) -> None:
        model.mask = torch.ones(2 + index, dtype=torch.bool)

    with caplog.at_level(logging.WARNING):
        assert [len(each["mask"]) for each in finish(change)] == [2, 3, 4]
    assert "stay each region's own: mask." in caplog.text
