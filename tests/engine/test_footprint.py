"""The estimate of memory, as the documentation tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_cocodc.engine.footprint import memory
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.newer import known
from hf_cocodc.parts.tensors.memory import HOST, Home
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.toys import Blocks

ROOT = Path(__file__).parents[2]


def test_the_documented_bytes_are_the_engines() -> None:
    """Bytes kept for each parameter, and taken by a transfer for each parameter of its fragment, over all methods."""
    kept, each = {}, {}
    for name in known():
        model = Blocks([torch.randn(300, 300) for _ in range(4)])
        method = from_config(OuterConfig(method=name, sync_interval=20))
        fragments = method.fragments(model)
        found = memory(fragments, method, 2, Home())[HOST]
        kept[name] = found.kept / (4 * 300 * 300)
        each[name] = found.per_transfer / max(fragment.numel for fragment in fragments)
    lowrank = round(kept.pop("dilocox")), round(each.pop("dilocox"))
    tiles, residual = round(each.pop("sparseloco")), round(kept.pop("muloco"))
    text = (ROOT / "docs" / "evidence" / "performance.md").read_text(encoding="utf-8")
    assert {round(each, 3) for each in kept.values()} == {8}
    assert f"| global params, outer state | 8 (`dilocox` {lowrank[0]}, `muloco` {residual}) |" in text
    low, high = (f"{end(each.values()):.0f}" for end in (min, max))
    transfer = f"{low} to {high} (`dilocox` {lowrank[1]}, `sparseloco` {tiles})"
    assert f"| each transfer in flight | {transfer} |" in text


@pytest.mark.parametrize("name", known())
def test_a_forecast_from_meta_is_the_estimate_of_a_run(name: str) -> None:
    """Without a value in memory it has the bytes of the real model."""
    method = from_config(OuterConfig(method=name))
    real = Synchronizer(Blocks([torch.randn(90, 90) for _ in range(4)]), method, loopback()).memory()
    model = Blocks([torch.randn(90, 90) for _ in range(4)]).to("meta")
    assert memory(method.fragments(model), method, 1, Home()) == real


@pytest.mark.parametrize("name", known())
def test_what_rests_on_the_host_is_not_on_the_device(name: str) -> None:
    """But for payloads and slices, and where a codec computes with a whole fragment."""
    method = from_config(OuterConfig(method=name))
    model, device = Blocks([torch.randn(90, 90) for _ in range(4)]).to("meta"), torch.device("meta")
    fragments = method.fragments(model)
    here, there = (memory(fragments, method, 2, Home(device, rests)) for rests in (False, True))
    assert there[HOST].kept == here[device].kept and there[device].kept == here[HOST].kept == 0
    assert there[device].per_transfer < here[device].per_transfer


def test_a_radial_mean_takes_a_copy_more() -> None:
    """Of the outer gradient, for its directions."""
    model = Blocks([torch.zeros(90, 90) for _ in range(4)]).to("meta")
    plain, radial = (from_config(OuterConfig(method="diloco", mean=mean)) for mean in ("average", "radial"))
    one, other = (memory(each.fragments(model), each, 2, Home())[HOST] for each in (plain, radial))
    norms = radial.codec.wire_bytes(radial.fragments(model)[0], 0, 2) - plain.codec.wire_bytes(
        plain.fragments(model)[0], 0, 2
    )
    assert other.per_transfer - one.per_transfer - norms == 4 * 4 * 90 * 90
