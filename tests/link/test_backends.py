"""The process groups that this machine can make, found out before anybody waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.errors import InputError
from hf_cocodc.link.backends import refuse_backend, why_no_gloo


@pytest.mark.parametrize(
    ("devices", "has_nccl", "device", "regions", "why"),
    [
        (0, True, "cuda", 1, "finds none on this machine"),
        (8, True, "cpu", 1, "this model is on the device 'cpu'"),
        (8, False, "cuda", 1, "has no NCCL on this machine"),
        (1, True, "cuda", 2, "this machine has 1 for 2 regions, and each needs one of its own"),
        (2, True, "cuda", 2, None),
    ],
)
def test_nccl_needs_a_device_for_each_region(
    devices: int,
    has_nccl: bool,
    device: str,
    regions: int,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason is named, and the link to set."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    for link in ("auto", "tcp", "gloo"):
        refuse_backend(link, device, regions)
    if why is None:
        refuse_backend("nccl", device, regions)
        return
    with pytest.raises(
        InputError, match=f"regions.link=nccl .* {why}. Set regions.link=gloo, or regions.link=tcp"
    ):
        refuse_backend("nccl", device, regions)


def test_gloo_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an address of this machine."""
    assert why_no_gloo("127.0.0.1") is None
    assert "gloo cannot listen at 192.0.2.1 (" in str(why_no_gloo("192.0.2.1"))
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert "has no gloo on this machine" in str(why_no_gloo("127.0.0.1"))
    refuse_backend("auto")
    with pytest.raises(InputError, match="regions.link=gloo: torch .* Set regions.link=tcp in every region."):
        refuse_backend("gloo")


def test_a_script_hears_it_before_it_meets_anybody() -> None:
    """No coordinator is asked, and no region waits."""
    model = torch.nn.Linear(2, 2)
    regions = RegionConfig(region=0, count=2, coordinator="127.0.0.1:9", link="nccl")
    with pytest.raises(InputError, match="regions.link=nccl .* but this model is on the device 'cpu'"):
        OuterOptimizer(
            Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), 0.1), OuterConfig(), regions
        )
