"""A parameter without values, beside others in its fragment."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc import OuterConfig
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.resolve import from_config


def trained(region: int, link: Link, sizes: tuple[int, ...], method: str) -> list[Tensor]:
    model = nn.ParameterList([torch.linspace(-1, 1, size) for size in sizes])
    config = OuterConfig(method=method, sync_interval=2, overlap_steps=1, merge="compensate")
    synchronizer = Synchronizer(nn.ModuleList([nn.ModuleList([model])]), from_config(config), link)
    noise = torch.Generator().manual_seed(region)
    for _ in range(7):
        for param in model:
            param.data -= 0.1 * torch.randn(len(param), generator=noise)
        synchronizer.step(0.1)
    return [param.data for param in model if len(param)]


@pytest.mark.parametrize("sizes", [(5, 0, 3), (0, 5, 3), (5, 3, 0), (5, 0, 0, 3)])
def test_it_changes_no_number(sizes: tuple[int, ...]) -> None:
    """The norms of compensation belong to the parameters that have values."""
    found, expected = (
        run_in_lockstep(2, partial(trained, sizes=each, method="diloco")) for each in (sizes, (5, 3))
    )
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
