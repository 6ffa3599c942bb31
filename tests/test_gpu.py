"""What needs a CUDA device: run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.config import OuterConfig
from tests.toys import Region, batch, llama, params_of, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
STEPS = 14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["diloco", "streaming", "cocodc", "dilocox"])
def test_parameters_on_a_device(method: str, dtype: torch.dtype) -> None:
    """Two regions on the GPU: equal global weights, close to those of the same run on the CPU."""

    def train(device: str) -> list[Tensor]:
        def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = llama(index, dtype=dtype).to(device)
            return model, torch.optim.SGD(model.parameters(), lr=0.05)

        def live(region: Region) -> Tensor:
            for step in range(STEPS):
                tokens = batch(region.index, step).to(device)
                region.model(input_ids=tokens, labels=tokens).loss.backward()
                region.step()
            region.synchronizer.finish()
            return params_of(region.model).float().cpu()

        return run(2, OuterConfig(method=method, sync_interval=4), build, live)

    first, second = train("cuda")
    assert torch.equal(first, second)
    close = {"atol": 1e-4, "rtol": 1e-3} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 5e-2}
    torch.testing.assert_close(first, train("cpu")[0], **close)


def test_a_send_leaves_the_device_once_a_fragment() -> None:
    """However many parameters a fragment has, its snapshot is one copy from the device."""

    def live(region: Region) -> int:
        [state] = region.synchronizer.fragments
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            state.gather()
            torch.cuda.synchronize()
        return sum("Memcpy DtoH" in event.name for event in profile.events())

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = llama().to("cuda")
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    assert run(1, OuterConfig(method="diloco", sync_interval=4), build, live) == [1]
