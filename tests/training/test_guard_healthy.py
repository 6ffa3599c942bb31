"""The norm guard beside training that is well: it never fires, in any method. This decides that it is on by default.

A small Llama learns text, in regions with texts of different kinds: code and prose. The learning rate warms up, and is ten times
higher in all regions for a few steps; in some runs regions leave and join, or only LoRA adapters are trained. The other methods
and faults are in the program `tests.benchmarks.guard`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.parts.guard import Guard
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.benchmarks.guard import FAULTS, HEALTHY, OLD, SETTINGS, STEPS, YOUNG, batch, outcome, rate, run
from tests.engine.changing import ChangingLink, run_changing
from tests.toys import llama

NEAR = 2.5
"""No norm of a run that is well comes as near as this to the 3 at which the guard begins to clip."""


METHOD = "eager"
"""A region takes in its own part before others judge it."""
FAULT = {fault.words: fault for fault in FAULTS}


class Training:
    """A region's training, an inner step at a time."""

    def __init__(self, method: str, region: int, link: ChangingLink, seed: int, state: Any = None) -> None:
        self.region, self.seed, self.step = region, seed, 0
        self.events: list[dict[str, Any]] = []
        self.model = model = llama(seed, layers=2)
        self.inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = OuterConfig(**{"method": method, "sync_interval": 10} | SETTINGS[method])
        self.sync = Synchronizer(
            model, from_config(config), link, guard=Guard(), state=state, record=self._record
        )

    def _record(self, kind: str, **facts: Any) -> None:
        if kind in ("guard", "void"):
            self.events.append(facts)

    def make(self, trains: bool = True) -> None:
        self.step += 1
        self.inner.param_groups[0]["lr"] = rate(self.step)
        if trains:
            tokens = batch(self.region, self.step, self.seed)
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.inner.step()
            self.inner.zero_grad()
        self.sync.step(rate(self.step), trained=trains)


def changing(method: str) -> list[dict[str, Any]]:
    """What the guard did in a run in which a third region comes in, in the middle of a round, and is lost later."""
    base, admitted, lost, box = 90, 117, 200, dict[str, Any]()

    def sets(call: int) -> Sequence[int]:
        is_in = box.get("admitted", math.inf) < call <= box.get("lost", math.inf)
        return [0, 1, 2] if is_in else [0, 1]

    def body(region: int, link: ChangingLink) -> list[dict[str, Any]]:
        if region == 2:
            link.wait_until(lambda: "state" in box)
            link.is_joining = True
        training = Training(method, region, link, seed=3, state=box.get("state"))
        if region == 2:
            training.sync.take_over()
            link.follow_from(box["calls"])
            training.step = base
        while training.step < STEPS:
            step = training.step
            if region == 2 and step == admitted:
                link.wait_until(lambda: "admitted" in box)
            if region == 2 and step == lost:
                break
            training.make(trains=region != 2 or step >= admitted)
            if region == 0 and step + 1 == base:
                box["state"], box["calls"] = copy.deepcopy(training.sync.state_dict()), link.calls
            if region == 0 and step + 1 == admitted:
                box["admitted"] = link.calls
            if region == 0 and step + 1 == lost:
                box["lost"] = link.calls
                link.lose()
        return training.events

    return run_changing(3, sets, body)[0]


ONCE, ALWAYS = "outer gradient x 1e6, once", "learning rate x 1000, always"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["spike x 20", "adapters"])
def test_never_fires(kind: str) -> None:
    """Two and three regions, a spike, the whole model and adapters; nor does it come near."""
    count, changes = HEALTHY[kind]
    found = run("cocodc", count, 1, **changes)
    assert found.alarms == 0
    assert found.known
    assert max(found.young + found.known + found.now) < NEAR


@pytest.mark.slow
def test_never_fires_when_a_region_comes_and_goes() -> None:
    assert changing("cocodc") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "faults"),
    [
        (2, [(ONCE, [1], YOUNG), (ALWAYS, [1], OLD)]),
        (3, [(ONCE, [1, 2], YOUNG), (ALWAYS, [1], YOUNG)]),
    ],
)
def test_a_fault_costs_little(count: int, faults: list[tuple[str, list[int], int]]) -> None:
    """One of three far out of the ordinary, or one of two with a history: 10 %."""
    sound = run(METHOD, count, 1)
    for words, wrong, at in faults:
        found = run(METHOD, count, 1, FAULT[words], at, wrong)
        assert found.stopped is None, (words, at)
        assert found.loss < 1.1 * sound.loss, (words, at, outcome(found, sound))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "wrong", "at"), [(2, [1], YOUNG), (3, [1, 2], OLD)])
def test_a_fault_that_costs_more_stops_the_run(count: int, wrong: list[int], at: int) -> None:
    """It never leaves a ruined model."""
    assert run(METHOD, count, 1, FAULT[ALWAYS], at, wrong).stopped is not None
