"""Where outer steps are taken, and that it changes no number: ahead of the landing by the link's thread, or at the landing."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.engine.compatibility import HISTORIES
from hf_cocodc.engine.stepping import Guarding, Stepping
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback, run_in_lockstep
from hf_cocodc.methods import METHODS, Method
from hf_cocodc.parts import schedules
from hf_cocodc.parts.guard import Guard
from hf_cocodc.parts.info import OuterInfo
from hf_cocodc.parts.outer import OuterState, OuterTransform, Step
from hf_cocodc.parts.tensors.memory import HOST
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.far import FAR
from tests.methods import small
from tests.processes.test_link import run_over_tcp
from tests.toys import Blocks, Region, global_of, params_of, run

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


def named(method: Method, seen: set[str]) -> Method:
    """The method, noting the threads that its outer optimizer begins a step in."""
    begin = method.outer.begin

    def noted(state: OuterState, info: OuterInfo) -> tuple[Step, OuterState]:
        seen.add(threading.current_thread().name)
        return begin(state, info)

    return dataclasses.replace(method, outer=method.outer._replace(begin=noted))


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


def trajectory(method: Method) -> list[list[Tensor]]:
    """Two regions over TCP: a link with a thread of its own."""

    def body(index: int, link: Link) -> list[Tensor]:
        model = Blocks(START)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        return live(Region(index, model, sgd, Synchronizer(model, method, link, digest_interval=2)))

    return run_over_tcp(2, body)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_taken_by_the_links_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every method but Eager, whose step reads local params; and with the numbers of steps at the landing, bit for bit."""
    seen: set[str] = set()
    ahead = trajectory(named(method_of(name), seen))
    assert ("hf_cocodc-link" in seen) == (name != "eager")
    original = Stepping.__init__

    def never(self: Stepping, *args: Any) -> None:
        original(self, *args)
        self.is_ahead = False

    monkeypatch.setattr(Stepping, "__init__", never)
    seen.clear()
    at_landing = trajectory(named(method_of(name), seen))
    assert "hf_cocodc-link" not in seen
    torch.testing.assert_close(ahead, at_landing, atol=0, rtol=0)


def test_what_needs_the_training_thread_is_left_to_it() -> None:
    """A step that asks the other lanes of its region, one on a device, and one with no time before its landing."""

    def is_ahead(name: str, num_lanes: int = 1, device: torch.device = HOST, **changes: Any) -> bool:
        link = loopback()
        link.num_lanes = num_lanes
        method = dataclasses.replace(method_of(name), **changes)
        return Stepping(
            *(method, link, device, lambda fragment: (torch.zeros(0), 0.0), Guarding(None, 0)),
            lambda fragment, norm, ordinary: None,
        ).is_ahead

    assert is_ahead("streaming", num_lanes=2) and is_ahead("co2")
    assert not is_ahead("co2", num_lanes=2), "its penalty and its learning rate are the whole region's"
    assert not is_ahead("eager")
    assert not is_ahead("streaming", device=FAR)
    assert not is_ahead("diloco", schedule=schedules.every(6))


def test_a_resume_does_not_end_the_chain() -> None:
    """Transfers that were in flight are stepped when they are loaded; later ones, which start from them, ahead again."""
    method, seen = method_of("co2"), set[str]()

    def body(index: int, link: Link) -> list[bool]:
        model = Blocks(START)
        synchronizer = Synchronizer(model, method, link)
        for step in range(1, 15):
            train(model, index, step)
            synchronizer.step(0.05)
        state = synchronizer.state_dict()
        assert sum(len(each["in_flight"]) for each in state["fragments"]) == 1
        resumed = Synchronizer(model, named(method, seen), link, state=state)
        taken = []
        for step in range(15, 38):
            train(model, index, step)
            landings = resumed.totals.landings
            flying = list(resumed.fragments[0].in_flight)
            resumed.step(0.05)
            if resumed.totals.landings > landings:
                taken.append(flying[0].step_s > 0)
        return taken

    for taken in run_over_tcp(2, body):
        assert taken[0] is False
        assert len(taken) > 2 and all(taken[1:])
    assert "hf_cocodc-link" in seen


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
    """The next transfer tells of it; then global params, outer state and norms are region 0's, also where the transfer after that
    one has been stepped ahead from the old values.

    If the next one itself was stepped ahead, its landing undoes the drift of the params, and nothing tells of that of the norms.
    """
    with caplog.at_level(logging.WARNING):
        (mine, my_norms), (theirs, their_norms) = drifted(name, at, run)
    assert "differ between regions: all regions take region 0's" in caplog.text
    assert "final global weights" not in caplog.text
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
    for index, (mine_of, theirs_of) in enumerate(zip(my_norms, their_norms, strict=True)):
        if f"of fragment {index} differ" in caplog.text:
            assert mine_of == theirs_of


@pytest.mark.parametrize("threads", [1, 4])
def test_the_number_of_threads_changes_no_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends, outer steps and landings of many pieces, some of them of several parameters."""
    from hf_cocodc.engine import fragment, landing, outer_step

    for module in (fragment, landing, outer_step):
        monkeypatch.setattr(module, "PIECE", 7)
    expected = run(2, method_of("cocodc"), build, live)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = run(2, method_of("cocodc"), build, live)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


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


def test_outer_transforms_say_what_they_ask_for() -> None:
    """`chain` hands on what any of its transforms asks of the region, or of local params."""
    assert METHODS and not method_of("streaming").outer.asks_region
    assert method_of("co2").outer.asks_region
    assert not method_of("eager").outer.regions_agree
    assert isinstance(method_of("co2").outer, OuterTransform)


@pytest.mark.parametrize("run", [run_over_tcp, run_in_lockstep])
def test_broadcasts_count_as_sent(run: Callable[..., list[Any]]) -> None:
    """Region 0's, at the start and where regions drift apart: its global params and its momentum travel to each other region;
    and what it knows of the fragment, in fp64: its change, the norm guard's counts, and how long its histories are."""

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
    known = 8 * (1 + 2 + len(HISTORIES))
    assert found[0] == (2 * model_bytes, 2 * (1 + 2) * model_bytes + 2 * known)
