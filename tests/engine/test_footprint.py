"""The estimate of memory, as the documentation tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_cocodc.engine.footprint import forecast, memory
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.lockstep import LockstepHub, LockstepLink, loopback
from hf_cocodc.newer import known
from hf_cocodc.parts.tensors.memory import HOST
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.toys import Blocks

ROOT = Path(__file__).parents[2]


def test_the_documented_bytes_are_the_engines() -> None:
    """Bytes kept for each parameter, and taken by a transfer for each parameter of its fragment, over all methods."""
    kept, each = {}, {}
    for name in known():
        model = Blocks([torch.randn(300, 300) for _ in range(4)])
        link = LockstepLink(LockstepHub(1), region=0, num_regions=1)
        synchronizer = Synchronizer(model, from_config(OuterConfig(method=name, sync_interval=20)), link)
        found = memory(synchronizer.fragments, synchronizer.method, 2, synchronizer._traffic.is_ahead)[HOST]
        largest = max(state.fragment.numel for state in synchronizer.fragments)
        kept[name], each[name] = found.kept / synchronizer.num_params, found.per_transfer / largest
    lowrank = round(kept.pop("dilocox")), round(each.pop("dilocox"))
    tiles = round(each.pop("sparseloco"))
    text = (ROOT / "docs" / "evidence" / "performance.md").read_text(encoding="utf-8")
    assert set(kept.values()) == {8}
    assert f"host: 8 (`dilocox` {lowrank[0]})" in text
    assert f"host: {min(each.values()):.0f} to {max(each.values()):.0f} (`dilocox` {lowrank[1]})" in text
    assert f"A transfer of `sparseloco` takes {tiles} bytes a parameter on the host" in text


@pytest.mark.parametrize("name", known())
def test_a_forecast_from_meta_is_the_estimate_of_a_run(name: str) -> None:
    """Without a value in memory it has the bytes of the real model, and the stage that an accelerator would need."""
    method = from_config(OuterConfig(method=name))
    real = Synchronizer(Blocks([torch.randn(90, 90) for _ in range(4)]), method, loopback()).memory()
    model = Blocks([torch.randn(90, 90) for _ in range(4)]).to("meta")
    found = forecast(model, method.fragments(model), method, 1, HOST)
    assert found.pop(torch.device("meta")).staged > 0
    assert found == real


def test_a_radial_mean_takes_a_copy_more() -> None:
    """Of the outer gradient, for its directions."""
    model = Blocks([torch.zeros(90, 90) for _ in range(4)]).to("meta")
    plain, radial = (from_config(OuterConfig(method="diloco", mean=mean)) for mean in ("average", "radial"))
    one, other = (forecast(model, each.fragments(model), each, 2, HOST)[HOST] for each in (plain, radial))
    norms = radial.codec.wire_bytes(radial.fragments(model)[0], 0, 2) - plain.codec.wire_bytes(
        plain.fragments(model)[0], 0, 2
    )
    assert other.per_transfer - one.per_transfer - norms == 4 * 4 * 90 * 90
