"""Outer state with the model on a device, or on the host while the model is on one: the numbers of a model on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.fragment import FragmentState
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.methods import METHODS
from hf_cocodc.parts.tensors import flat as tensors
from hf_cocodc.parts.tensors.memory import HOST, Home
from hf_cocodc.resolve import from_config
from hf_cocodc.run.supported import rests_on_host
from hf_cocodc.settings import OuterConfig
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot.checkpoint import Facts
from tests.far import FAR, Far
from tests.methods import small
from tests.processes.test_link import run_over_tcp
from tests.toys import Blocks

SETTINGS = small(
    {
        "diloco": {"codec": "int8", "error_feedback": True},
        "streaming": {"num_fragments": 3, "overlap_steps": 3},
        "eager": {"num_fragments": 3, "fragment_pattern": "strided"},
        "co2": {"outer_momentum": 0.3, "clip_momentum": 0.2},
        "dilocox": {"rank": 2},
        "cocodc": {"num_fragments": 3, "overlap_steps": 3, "sends_per_interval": 4},
    }
)
START = [torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0, 1, 12).view(3, 4), torch.linspace(-2, 0, 7)]
STEPS, SAVED_AT = 31, 14
FACTS = Facts(step=SAVED_AT, region=0, members=(0, 1), num_lanes=1, settings={}, finished=False)


def method_config(name: str) -> OuterConfig:
    return OuterConfig(method=name, sync_interval=6, **SETTINGS[name])


class _Region:
    """A region whose model and outer state are wherever they shall be."""

    def __init__(
        self,
        name: str,
        link: Link,
        model_on: torch.device,
        state_on: torch.device,
        dtype: torch.dtype = torch.float32,
        saved: tuple[dict[str, Any], list[Tensor]] | None = None,
    ) -> None:
        start = START if saved is None else saved[1]
        self.model = Blocks(vector.to(dtype) for vector in start).to(model_on)
        self.index = link.region
        self.synchronizer = Synchronizer(
            self.model,
            from_config(method_config(name)),
            link,
            digest_interval=2,
            state=None if saved is None else saved[0],
            home=Home(model_on, rests_on_host=state_on != model_on),
        )

    def train(self, step: int) -> None:
        for seed, param in enumerate(self.model.parameters()):
            noise = torch.Generator().manual_seed(1000 * self.index + 10 * step + seed)
            own = param.detach().cpu().float()
            param.detach().copy_(
                (own - 0.05 * (own + torch.randn(own.shape, generator=noise))).to(param.dtype)
            )
        self.synchronizer.step(0.05)

    def shown(self) -> list[Tensor]:
        flats = [each.global_params for each in self.synchronizer.fragments]
        return [tensor.detach().cpu().clone() for tensor in (*self.model.parameters(), *flats)]


def trajectory(
    name: str,
    *places: torch.device,
    dtype: torch.dtype = torch.float32,
    run: Callable[[int, Callable[[int, Any], Any]], list[Any]] = run_in_lockstep,
) -> list[list[list[Tensor]]]:
    """What each of two regions holds after every step and after finish(), and what it saves on the way; `run` gives the links."""

    def live(index: int, link: Link) -> list[list[Tensor]]:
        region = _Region(name, link, *places, dtype)
        found = []
        for step in range(1, STEPS + 1):
            region.train(step)
            found.append(region.shown())
            if step == SAVED_AT:
                with region.synchronizer.global_weights():
                    found.append(region.shown())
                saved = region.synchronizer.state_dict()["fragments"]
                found.append([flying["mean"].cpu().clone() for each in saved for flying in each["in_flight"]])
        region.synchronizer.finish()
        return [*found, region.shown()]

    return run(2, live)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_on", [HOST, FAR], ids=["host", "model"])
@pytest.mark.parametrize("name", METHODS)
def test_where_the_outer_state_is_kept_changes_no_number(
    name: str, state_on: torch.device, dtype: torch.dtype
) -> None:
    """At every step, to the bit; but for the last ones where norms are summed in another order."""
    found, expected = trajectory(name, FAR, state_on, dtype=dtype), trajectory(name, HOST, HOST, dtype=dtype)
    if name not in ("co2", "cocodc"):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    else:
        torch.testing.assert_close(found, expected, atol=1e-6 if dtype is torch.float32 else 1e-2, rtol=0)


@pytest.mark.parametrize("rests_on_host", [False, True])
@pytest.mark.parametrize("name", ["diloco", "cocodc"])
def test_a_model_may_be_spread_over_devices(name: str, rests_on_host: bool) -> None:
    """As `device_map` spreads it: everything is computed with on the first parameter's device."""

    def live(index: int, link: Link, spread: bool) -> list[Tensor]:
        model = Blocks(START)
        if spread:
            model.layers[0].to(FAR)
        home = Home(FAR, rests_on_host) if spread else Home()
        synchronizer = Synchronizer(model, from_config(method_config(name)), link, home=home)
        for step in range(1, STEPS + 1):
            for seed, param in enumerate(model.parameters()):
                noise = torch.Generator().manual_seed(1000 * index + 10 * step + seed)
                moved = param.detach().cpu() + 0.05 * torch.randn(param.shape, generator=noise)
                param.detach().copy_(moved)
            synchronizer.step(0.05)
        synchronizer.finish()
        return [param.detach().cpu() for param in model.parameters()]

    found, expected = (run_in_lockstep(2, partial(live, spread=spread)) for spread in (True, False))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["diloco", "streaming", "eager"])
def test_means_that_come_to_the_device_change_no_number(name: str) -> None:
    """Over a link that brings them there, with outer gradients on their way as it is asked for them."""
    found, expected = trajectory(name, FAR, FAR, run=run_over_tcp), trajectory(name, HOST, HOST)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_outer_state_on_a_device_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    """With transfers in flight; everything that was there is there again, and goes on to the same bits."""

    def whole(index: int, link: Link) -> list[list[Tensor]]:
        region = _Region(name, link, FAR, FAR)
        found = []
        for step in range(1, STEPS + 1):
            region.train(step)
            found.append(region.shown())
            if step == SAVED_AT:
                folder = tmp_path / str(index)
                state.begin(folder)
                state.write(folder, state.Saved(region.synchronizer.state_dict(), FACTS))
                state.seal(folder)
        return found[SAVED_AT:]

    def resumed(index: int, link: Link) -> list[list[Tensor]]:
        local = expected_local[index]
        region = _Region(name, link, FAR, FAR, saved=(state.read(tmp_path / str(index)).state, local))
        found = []
        for step in range(SAVED_AT + 1, STEPS + 1):
            region.train(step)
            found.append(region.shown())
        return found

    def local_at_save(index: int, link: Link) -> list[Tensor]:
        region = _Region(name, link, FAR, FAR)
        for step in range(1, SAVED_AT + 1):
            region.train(step)
        return [param.detach().cpu() for param in region.model.parameters()]

    expected_local = run_in_lockstep(2, local_at_save)
    expected = run_in_lockstep(2, whole)
    torch.testing.assert_close(run_in_lockstep(2, resumed), expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_all_that_is_kept_is_where_it_was_asked_for(name: str) -> None:
    """Global params, outer state, residuals and transfers lie with the model, and their bytes are told."""

    def live(index: int, link: Link) -> None:
        region = _Region(name, link, FAR, FAR)
        for step in range(1, 9):
            region.train(step)
        fragments = region.synchronizer.fragments
        for each in fragments:
            flying = [(t.snapshot, t.outer_grad, t.global_params) for t in each.in_flight]
            assert all(isinstance(t, Far) for t in (*_kept(each), *sum(flying, ())))
        told = region.synchronizer.memory()
        assert told[FAR].kept == sum(t.nbytes for each in fragments for t in _kept(each))
        assert told[HOST].kept == 0
        assert told[FAR].per_transfer >= 3 * 4 * max(each.fragment.numel for each in fragments)

    run_in_lockstep(2, live)


def _kept(each: FragmentState) -> list[Tensor]:
    return [each.global_params, *tensors.tensors_in(each.outer), *tensors.tensors_in(each.codec)]


@pytest.mark.parametrize(
    ("device", "room", "expected"),
    [
        ("auto", None, False),
        ("auto", 81 * 100, False),
        ("auto", 79 * 100, True),
        ("host", None, True),
        ("model", 1, False),
    ],
)
def test_where_outer_state_rests(device: str, room: int | None, expected: bool) -> None:
    """By default with the model, unless it would take more than a tenth of its device's memory."""
    assert rests_on_host(OuterConfig(device=device), 100, room) == expected


def test_a_place_that_is_none_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(InputError, match=r"outer\.device='gpu' must be one of auto, model, host"):
        OuterConfig(device="gpu")
