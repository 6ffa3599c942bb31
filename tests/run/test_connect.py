"""How regions compare what they are, before any parameter travels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.errors import HandshakeError, InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback, run_in_lockstep
from hf_cocodc.run import connect as hellos
from hf_cocodc.run.about import About
from hf_cocodc.run.journal import read


def outer(
    link: Link,
    *,
    config: OuterConfig = OuterConfig(sync_interval=4),  # noqa: B008  it is frozen
    sizes: tuple[int, int] = (2, 2),
    frozen: float = 0.0,
    lr: float = 0.1,
    max_steps: int | None = 8,
    may_differ: str = "",
    when_one_ends: str = "auto",
    function: Mapping[str, Any] = MappingProxyType({}),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> OuterOptimizer:
    """An outer optimizer over a link that is given."""
    model = nn.Sequential(nn.Linear(*sizes), nn.Linear(2, 2))
    for param in model[1].parameters():
        param.data.fill_(frozen)
        param.requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=lr)
    about = None
    if function or facts:
        about = About(model=dict(function), facts=dict(facts))
    regions = RegionConfig(may_differ=may_differ, when_one_ends=when_one_ends)
    return OuterOptimizer(
        Accelerator(cpu=True), model, optimizer, config, regions, max_steps=max_steps, link=link, about=about
    )


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"config": OuterConfig(sync_interval=5)}, "outer.sync_interval: region 0 has 4, region 1 has 5"),
        (
            {},
            {"sizes": (3, 2)},
            "trainable parameters: region 0 has '0.weight .2, 2.* region 1 has '0.weight .2, 3",
        ),
        ({}, {"frozen": 1.0}, "frozen parameters and buffers"),
        ({}, {"lr": 0.2}, "training.learning_rate: region 0 has 0.1, region 1 has 0.2"),
        ({}, {"max_steps": 9}, "max_steps: region 0 has 8, region 1 has 9"),
        ({}, {"max_steps": None}, "max_steps: region 0 has 8, region 1 has None"),
        ({}, {"when_one_ends": "stop"}, "regions.when_one_ends"),
        ({"function": {"model.config.x": 1}}, {"function": {"model.config.x": 2}}, "model.config.x"),
        ({"facts": {"data.path": "a"}}, {"facts": {"data.path": "b"}}, "data.path: region 0 has 'a'"),
    ],
)
def test_over_a_given_link_regions_compare_what_they_compare_at_a_coordinator(
    first: dict[str, Any], second: dict[str, Any], said: str
) -> None:
    """`simulate` refuses what a real run refuses, before any parameter travels."""
    with pytest.raises(HandshakeError, match=f"region 0 and region 1 disagree on {said}"):
        run_in_lockstep(2, lambda region, link: outer(link, **(second if region else first)))


def test_over_a_given_link_regions_compare_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the package and of the protocol."""
    tell = hellos.hello

    def told(*args: Any, **kwargs: Any) -> dict[str, Any]:
        other = threading.current_thread().name == "region 1"
        return tell(*args, **kwargs) | ({"hf_cocodc": "9.9"} if other else {})

    monkeypatch.setattr(hellos, "hello", told)
    with pytest.raises(HandshakeError, match="disagree on hf_cocodc: .* region 1 has '9.9'"):
        run_in_lockstep(2, lambda region, link: outer(link))


def test_a_given_link_is_compared_again_for_the_next_training(caplog: pytest.LogCaptureFixture) -> None:
    """And what may differ is shown."""

    def live(region: int, link: Link) -> None:
        outer(link, may_differ="learning_rate", lr=0.1 + region).close()
        outer(link, max_steps=8 + region)

    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(HandshakeError, match="max_steps: region 0 has 8, region 1 has 9"),
    ):
        run_in_lockstep(2, live)
    assert "training.learning_rate, which may differ: 0.1 in region 0, 1.1 in region 1." in caplog.text


def test_the_first_parameters_count_as_sent(tmp_path: Path) -> None:
    """By region 0, to each other region; what regions compare does not. The journal's first line has them."""

    def live(region: int, link: Link) -> int:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        journal = tmp_path / f"{region}.jsonl"
        with OuterOptimizer(
            Accelerator(cpu=True), model, optimizer, OuterConfig(sync_interval=2), link=link, journal=journal
        ) as outer:
            for _ in range(4):
                outer.step()
        return outer.synchronizer.totals.bytes_sent

    sent = run_in_lockstep(3, live)
    for region, events in enumerate(read(tmp_path / f"{region}.jsonl") for region in range(3)):
        [begun] = [event["bytes_sent"] for event in events if event["kind"] == "start"]
        landed = sum(event["bytes_sent"] for event in events if event["kind"] == "land")
        assert begun == (2 * 4 * 8 if region == 0 else 0)
        assert sent[region] == begun + landed == events[-1]["bytes_sent"]


def test_complex_parameters_are_refused() -> None:
    """By name: their imaginary parts would not travel. Frozen ones stay where they are."""
    model = nn.Linear(2, 2)
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(
        InputError, match=r"the parameter phase is complex \(torch.complex64\).*torch.view_as_real"
    ):
        OuterOptimizer(accelerator, model, optimizer, OuterConfig(), RegionConfig(region=0, count=1))
    model.phase.requires_grad_(False)
    OuterOptimizer(accelerator, model, optimizer, OuterConfig(), link=loopback()).close()
