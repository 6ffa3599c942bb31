"""The engine while regions come and go: a newcomer holds what the members hold, and every inner step lands once."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import LeftBehind
from hf_cocodc.link.lockstep import VirtualLink
from hf_cocodc.methods import Method
from hf_cocodc.parts.codecs import without_residuals
from hf_cocodc.parts.guard import Guard
from hf_cocodc.parts.tensors.flat import digest, tensors_in
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.engine.changing import ChangingLink, Sets, run_changing
from tests.methods import small
from tests.toys import Blocks, params_of

START = [torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(0, 1, 24).view(4, 6), torch.linspace(-2, 0, 7)]
SETTINGS = small(
    {
        "diloco": {"codec": "int8", "error_feedback": True},
        "streaming": {"num_fragments": 3, "overlap_steps": 3, "codec": "fp32"},
        "eager": {},
        "co2": {"outer_momentum": 0.3},
        "dilocox": {"rank": 2},
        "cocodc": {"num_fragments": 3},
    }
)
INTERVAL, BASE, ADMITTED, END = 6, 14, 27, 50
SLOW = VirtualLink(step_time_s=1.0, latency_s=0.1, bandwidth=400.0)
"""CoCoDC derives its overlap and its sends from these times."""


def method_of(name: str, **more: Any) -> Method:
    return from_config(OuterConfig(method=name, sync_interval=INTERVAL, **SETTINGS[name], **more))


def move(model: Blocks, region: int, step: int) -> None:
    """An inner step: a vector of its own for each region and step, whatever the parameters are."""
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            waves = torch.arange(param.numel()).view_as(param)
            if not param.requires_grad:
                continue
            param.add_(torch.sin(waves * (region + 1) + step + index), alpha=0.01)


def base_of(synchronizer: Synchronizer, link: ChangingLink) -> tuple[dict[str, Any], int]:
    """What a newcomer begins from, and after how many calls."""
    return copy.deepcopy(synchronizer.state_dict()), link.calls


def come_in(
    link: ChangingLink,
    model: Blocks,
    method: Method,
    base: tuple[dict[str, Any], int],
    guard: Guard | None = None,
) -> Synchronizer:
    """Begin from a member's state, and follow the calls that came after it."""
    link.is_joining = True
    synchronizer = Synchronizer(model, method, link, state=base[0], guard=guard)
    synchronizer.take_over()
    link.follow_from(base[1])
    return synchronizer


def assert_all_end_alike(sets: Sets, live: Callable[[int, ChangingLink], Tensor]) -> None:
    zero, one, two = run_changing(3, sets, live)
    assert torch.equal(zero, one) and torch.equal(one, two)


def facts(synchronizer: Synchronizer) -> list[Any]:
    """Everything that must be equal in all members, and in one that follows them."""
    states = [each.codec for each in synchronizer.fragments]
    found: list[Any] = [synchronizer.global_digest(), synchronizer.state_dict()["schedule_state"]]
    found += [digest(*tensors_in(each.outer)) for each in synchronizer.fragments]
    found += [digest(*tensors_in(without_residuals(state))) for state in states]
    found += [[each.num_sends, each.settled_at, each.sent_at, *each.norms] for each in synchronizer.fragments]
    return [*found, synchronizer.measured.agreed]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_newcomer_follows_and_comes_in(name: str) -> None:
    """Region 2 begins from region 0's state in the middle of a round, with transfers in flight. It lands what the others land,
    without training, and is equal to them at every step, before it comes in and afterwards, also when a region is lost."""
    box: dict[str, Any] = {}
    seen: dict[int, dict[int, list[Any]]] = {0: {}, 1: {}, 2: {}}

    def sets(call: int) -> Sequence[int]:
        first = (0, 1) if call <= box.get("admitted", math.inf) else (0, 1, 2)
        return [region for region in first if region != 0 or call <= box.get("lost", math.inf)]

    def live(region: int, link: ChangingLink) -> tuple[Tensor, Tensor] | None:
        model = Blocks([vector + region for vector in START])
        first = 0
        if region == 2:
            link.wait_until(lambda: "base" in box)
            link.now = box["now"]
            synchronizer = come_in(link, model, method_of(name), box["base"], Guard())
            first = BASE
        else:
            synchronizer = Synchronizer(model, method_of(name), link, guard=Guard())
        for step in range(first + 1, END + 1):
            if region == 2 and step == ADMITTED + 1:
                assert torch.equal(params_of(model), global_of(synchronizer)), "it has nothing of its own yet"
                link.wait_until(lambda: "admitted" in box)
            is_in = region != 2 or step > ADMITTED
            if is_in:
                move(model, region, step)
            synchronizer.step(1.0 if is_in else 0.0, trained=is_in)
            seen[region][step] = facts(synchronizer)
            if region == 0 and step == BASE:
                box["now"], box["base"] = link.now, base_of(synchronizer, link)
            if region == 0 and step == ADMITTED:
                box["admitted"] = link.calls
            if region == 0 and step == END - 4:
                box["lost"] = link.calls
                link.lose()
                return None
        synchronizer.finish()
        return params_of(model), global_of(synchronizer)

    virtual = SLOW if name == "cocodc" else None
    _, one, two = run_changing(3, sets, live, virtual)
    assert one is not None and two is not None
    assert torch.equal(one[0], two[0]), "all end with one model"
    if name != "eager":  # its global params differ between regions
        for step, found in seen[2].items():
            assert found == seen[1][step], step


def global_of(synchronizer: Synchronizer) -> Tensor:
    """All global params, in the order of the model's parameters."""
    found = {}
    for each in synchronizer.fragments:
        found |= dict(zip(each.fragment.names, each.fragment.views(each.global_params), strict=True))
    return torch.cat([found[name].reshape(-1) for name, _ in synchronizer._model.named_parameters()])


LINEAR: dict[str, dict[str, Any]] = {
    "diloco": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "eager": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "co2": {"outer_lr": 1.0, "outer_momentum": 0.0, "staleness_penalty": "none", "clip_momentum": "none"},
}
"""With these settings global params are the start plus the mean of each round's steps."""


def linear(name: str) -> Method:
    name = name.removeprefix("linear ")
    return from_config(OuterConfig(method=name, sync_interval=INTERVAL, **LINEAR[name]))


@pytest.mark.parametrize("comes_back", [False, True], ids=["alone to the end", "with a newcomer"])
@pytest.mark.parametrize("name", LINEAR)
def test_every_step_lands_once_with_its_share(name: str, comes_back: bool) -> None:
    """Region 1 is lost in the middle of a round. A newcomer that has trained half of its first round counts half there. Each
    round's steps land with the shares of those that sent it, and none twice, though the number of regions changes between."""
    lost_at, base, admitted, end = 21, 25, 33, 52
    box: dict[str, Any] = {}

    def sets(call: int) -> Sequence[int]:
        there = {0: True, 1: call <= box.get("lost", math.inf), 2: call > box.get("admitted", math.inf)}
        return [region for region, is_there in there.items() if is_there]

    def live(region: int, link: ChangingLink) -> Tensor | None:
        model = Blocks(START)
        method, first = linear(name), 0
        if region == 2:
            if not comes_back:
                return None
            link.wait_until(lambda: "base" in box)
            synchronizer = come_in(link, model, method, box["base"])
            first = base
        else:
            synchronizer = Synchronizer(model, method, link)
        for step in range(first + 1, end + 1):
            if region == 2 and step == admitted + 1:
                link.wait_until(lambda: "admitted" in box)
            is_in = region != 2 or step > admitted
            if is_in:
                move(model, region, step)
            synchronizer.step(1.0 if is_in else 0.0, trained=is_in)
            if region == 1 and step == lost_at:
                return None
            if region == 0 and step == lost_at:
                box["lost"] = link.calls
                link.lose()
            if region == 0 and step == base:
                box["base"] = base_of(synchronizer, link)
            if region == 0 and step == admitted and comes_back:
                box["admitted"] = link.calls
        synchronizer.finish()
        return params_of(model)

    expected = torch.cat([vector.flatten() for vector in START])
    rounds = [*range(INTERVAL, end, INTERVAL), end]
    for begin, until in zip([0, *rounds], rounds, strict=False):
        steps = {0: range(begin + 1, until + 1)}
        if until <= lost_at:
            steps[1] = steps[0]
        if comes_back and until > admitted:
            steps[2] = range(max(begin, admitted) + 1, until + 1)
        shares = {region: len(made) / (until - begin) for region, made in steps.items()}
        for region, made in steps.items():
            model = Blocks([torch.zeros_like(vector) for vector in START])
            for step in made:
                move(model, region, step)
            expected = expected + params_of(model) * shares[region] / sum(shares.values())
    first, *others = run_changing(3, sets, live)
    assert first is not None
    torch.testing.assert_close(first, expected, atol=2e-6, rtol=0)
    if comes_back:
        assert others[1] is not None and torch.equal(first, others[1])


@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", [*SETTINGS, "linear diloco", "linear eager", "linear co2"])
def test_a_region_that_was_left_behind_comes_back(name: str, keep: bool, has_ended: bool) -> None:
    """Region 1 is left behind before or after its transfer of step 12 has ended, and trains alone up to step 17. It takes the
    others' state, jumps to their step and follows. Meanwhile it keeps the steps that they do not have, or gives them up."""
    last_call, alone, base, admitted, end = (12 if has_ended else 11), 17, 25, 33, 50
    box: dict[str, Any] = {}
    method = method_of(name) if name in SETTINGS else linear(name)

    def sets(call: int) -> Sequence[int]:
        is_lost = box.get("lost", math.inf) < call <= box.get("admitted", math.inf)
        return [0, 2] if is_lost else [0, 1, 2]

    def come_back(synchronizer: Synchronizer, link: ChangingLink, model: Blocks) -> Tensor:
        """What it must keep: in linear methods the steps after the last round that has ended."""
        for step in range(13, alone + 1):
            move(model, 1, step)
            synchronizer._traffic.shares.count(None)
        link.wait_until(lambda: "base" in box)
        state, calls = box["base"]
        link.is_out = True
        synchronizer.catch_up(state, keep)
        link.is_out = False
        link.follow_from(calls)
        assert synchronizer.inner_step == base
        steps = Blocks([torch.zeros_like(vector) for vector in START])
        for step in range(13 if has_ended else 7, alone + 1):
            move(steps, 1, step)
        own = params_of(model) - global_of(synchronizer)
        if not keep:
            assert not own.any()
        elif name not in SETTINGS:
            torch.testing.assert_close(own, params_of(steps), atol=2e-6, rtol=0)
            since = synchronizer._traffic.shares.trained.steps - synchronizer.fragments[0].trained.steps
            assert since == alone - (12 if has_ended else 6)
        return own

    def live(region: int, link: ChangingLink) -> Tensor:
        model = Blocks([vector + region for vector in START])
        synchronizer = Synchronizer(model, method, link)
        step, kept = 0, torch.zeros(0)
        while step < end:
            step += 1
            if region == 1 and step == 12 and not has_ended:
                link.wait_until(lambda: "lost" in box)
                link.is_out = True
            if region == 1 and step == 13:
                step, kept = base + 1, come_back(synchronizer, link, model)
            if region == 1 and step == admitted + 1:
                link.wait_until(lambda: "admitted" in box)
                own = params_of(model) - global_of(synchronizer)
                torch.testing.assert_close(own, kept, atol=2e-6, rtol=0)
            is_in = region != 1 or not 12 < step <= admitted
            if is_in:
                move(model, region, step)
            with contextlib.suppress(LeftBehind):
                synchronizer.step(1.0 if is_in else 0.0, trained=is_in)
            if region == 0 and step == last_call:
                box["lost"] = link.calls
                link.lose()
            if region == 0 and step == base:
                box["base"] = base_of(synchronizer, link)
            if region == 0 and step == admitted:
                box["admitted"] = link.calls
        synchronizer.finish()
        return params_of(model)

    assert_all_end_alike(sets, live)
