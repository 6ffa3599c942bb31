"""Landings: regions that drift apart are brought back, a missing transfer is noticed, and broadcasts are counted."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.methods import Method
from hf_cocodc.newer import known
from hf_cocodc.parts.guard import Guard
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.methods import small
from tests.processes.test_link import run_over_tcp
from tests.toys import Blocks, Region, global_of, params_of

START = [torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0, 1, 12).view(3, 4), torch.linspace(-2, 0, 7)]
SETTINGS = small(
    {
        "diloco": {"merge": "additive", "overlap_steps": 2},
        "streaming": {"num_fragments": 3, "overlap_steps": 3, "codec": "fp32"},
        "eager": {},
        "co2": {"outer_momentum": 0.3},
        "dilocox": {"codec": "fp32", "error_feedback": False},
        "cocodc": {"num_fragments": 3, "overlap_steps": 3, "sends_per_interval": 4},
    }
)
STEPS = 31


def method_of(name: str, **settings: Any) -> Method:
    return from_config(OuterConfig(method=name, sync_interval=6, **SETTINGS[name] | settings))


def live(region: Region) -> list[Tensor]:
    states = []
    for step in range(1, STEPS + 1):
        train(region.model, region.index, step)
        region.synchronizer.step(0.05)
        states += [params_of(region.model), global_of(region)]
    region.synchronizer.finish()
    return [*states, params_of(region.model)]


def train(model: nn.Module, index: int, step: int) -> None:
    for seed, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * index + 10 * step + seed)
        param.detach().copy_(param - 0.05 * (param + torch.randn(param.shape, generator=generator)))


def drifted(
    name: str, at: int, run: Callable[..., list[Any]]
) -> list[tuple[list[Tensor], list[list[float]]]]:
    """What two regions hold at the end, if the global params of region 1, and the norms that it has heard, get other bits after
    step `at`; the norms of each fragment apart."""
    method = method_of(name)

    def body(index: int, link: Link) -> tuple[list[Tensor], list[list[float]]]:
        model = Blocks(START)
        synchronizer = Synchronizer(model, method, link, digest_interval=1, guard=Guard())
        for step in range(1, STEPS + 1):
            train(model, index, step)
            synchronizer.step(0.05)
            if step == at and index == 1:
                for fragment in synchronizer.fragments:
                    fragment.global_params.mul_(1 + 1e-6)
                    fragment.norms = [1e-3, *fragment.norms]
        norms = [list(fragment.norms) for fragment in synchronizer.fragments]
        measured = synchronizer.measured
        known = [torch.tensor(measured.change), torch.tensor(measured.agreed.change)]
        flats = [fragment.global_params.clone() for fragment in synchronizer.fragments]
        outer = [flat.clone() for each in synchronizer.fragments for flat in _values(each.outer)]
        synchronizer.finish()
        return [*flats, *outer, *known, params_of(model)], norms

    return run(2, body)


def _values(state: dict[str, Any]) -> list[Tensor]:
    """Everything in a state, numbers as tensors."""
    found: list[Tensor] = []
    for value in state.values():
        found += _values(value) if isinstance(value, dict) else [torch.as_tensor(value)]
    return found


@pytest.mark.parametrize("run", [run_over_tcp, run_in_lockstep])
@pytest.mark.parametrize(
    ("name", "at"), [("diloco", 9), ("streaming", 13), ("co2", 13), ("dilocox", 13), ("cocodc", 13)]
)
def test_regions_that_drift_apart_are_brought_back(
    name: str, at: int, run: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """The next transfer tells of it; then global params, outer state and norms are region 0's."""
    with caplog.at_level(logging.WARNING):
        (mine, my_norms), (theirs, their_norms) = drifted(name, at, run)
    assert "differ between regions: all regions take region 0's" in caplog.text
    assert "final global weights" not in caplog.text
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
    for index, (mine_of, theirs_of) in enumerate(zip(my_norms, their_norms, strict=True)):
        if f"of fragment {index} differ" in caplog.text:
            assert mine_of == theirs_of


@pytest.mark.parametrize("name", ["co2", "dilocox"])
def test_a_verdict_outlives_a_reunion_and_a_resume(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """What has gone into a mean is not judged anew by what the lowest region knows: each region lands it as if never stopped."""

    def body(index: int, link: Link) -> list[list[Any]]:
        model = Blocks(START)
        synchronizer = Synchronizer(model, method_of(name), link, digest_interval=1, guard=Guard())
        held = []
        for step in range(1, 25):
            train(model, index, step)
            synchronizer.step(0.05)
            if step == 13 and index == 1:
                for fragment in synchronizer.fragments:
                    fragment.global_params.mul_(1 + 1e-6)
                    fragment.norms = [50.0] * 8
        for _ in range(2):
            flying = [each for fragment in synchronizer.fragments for each in fragment.in_flight]
            held.append([each.handle.wait().verdict for each in flying])
            synchronizer.load_state_dict(copy.deepcopy(synchronizer.state_dict()))
        return held

    for before, after in run_over_tcp(2, body):
        assert before == after != []
    assert "differ between regions: all regions take region 0's" in caplog.text


def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks(START)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def test_a_missing_transfer_is_noticed() -> None:
    """Only step 0, where regions are equal, stands for a mean of zero."""

    def body(index: int, link: Link) -> None:
        synchronizer = Synchronizer(Blocks(START), method_of("streaming"), link)
        with pytest.raises(AssertionError, match="the transfer of step 4 is to land"):
            synchronizer.fragments[0].transfer_of(4)
        nothing = synchronizer.fragments[0].transfer_of(0)
        assert not nothing.handle.wait().result.mean.any()

    run_in_lockstep(2, body)


@pytest.mark.parametrize("run", [run_over_tcp, run_in_lockstep])
def test_broadcasts_count_as_sent(run: Callable[..., list[Any]]) -> None:
    """Region 0's, at the start and where regions drift apart: its global params and its momentum travel to each other region;
    and what it knows of the fragment, as JSON."""

    def body(index: int, link: Link) -> tuple[int, int]:
        model, landed = Blocks(START), [0]

        def record(kind: str, **facts: Any) -> None:
            landed[0] += facts["bytes_sent"] if kind == "land" else 0

        synchronizer = Synchronizer(model, method_of("diloco"), link, digest_interval=1, record=record)
        begun = synchronizer.totals.bytes_sent
        for step in range(1, STEPS + 1):
            train(model, index, step)
            synchronizer.step(0.05)
            if step == 9 and index == 1:
                for fragment in synchronizer.fragments:
                    fragment.global_params.mul_(1 + 1e-6)
        synchronizer.finish()
        return begun, synchronizer.totals.bytes_sent - landed[0]

    model_bytes = 4 * sum(vector.numel() for vector in START)
    found = run(3, body)
    assert found[1:] == [(0, 0)] * 2
    assert found[0][0] == 2 * model_bytes
    known = found[0][1] - 2 * (1 + 2) * model_bytes
    assert 0 < known < 2 * 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", known())
def test_local_params_stay_where_they_are(name: str, dtype: torch.dtype) -> None:
    """A CUDA graph, the user's or inductor's (mode=reduce-overhead), reads them at the addresses of its capture."""

    def body(index: int, link: Link) -> list[Tensor]:
        model = Blocks(START).to(dtype)
        places = [(param, param.data_ptr(), param.detach()) for param in model.parameters()]

        def stay() -> None:
            for (param, address, captured), now in zip(places, model.parameters(), strict=True):
                assert now is param and now.data_ptr() == address == captured.data_ptr()
                assert torch.equal(captured, now)

        config = OuterConfig(method=name, sync_interval=6, **SETTINGS.get(name, {}))
        synchronizer = Synchronizer(model, from_config(config), link)
        stay()
        for step in range(1, STEPS + 1):
            train(model, index, step)
            synchronizer.step(0.05)
            stay()
        with synchronizer.global_weights():
            stay()
        assert synchronizer.totals.landings >= 4
        synchronizer.begin_anew()
        stay()
        synchronizer.finish()
        stay()
        return [captured for _, _, captured in places]

    first, second = run_in_lockstep(2, body)
    torch.testing.assert_close(first, second, atol=0, rtol=0)
