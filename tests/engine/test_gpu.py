"""What needs a CUDA device: run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_cocodc.methods import METHODS
from hf_cocodc.parts.tensors.memory import HOST, Departure, Pool, bring
from hf_cocodc.settings import OuterConfig
from tests.engine.test_device import START, trajectory
from tests.processes.test_link import run_over_tcp
from tests.toys import Region, llama, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outer_state", ["host", "model"])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_on_a_device(method: str, outer_state: str, dtype: torch.dtype) -> None:
    """Two regions on the GPU: equal global weights at the end, close to those of the same run on the CPU."""
    cuda = torch.device("cuda", 0)
    first, second = trajectory(method, cuda, cuda if outer_state == "model" else HOST, dtype=dtype)
    # eager keeps global params that differ between regions: only its models end equal
    compared = slice(len(START) if method == "eager" else None)
    assert all(torch.equal(*both) for both in zip(first[-1][compared], second[-1][compared], strict=True))
    close = {"atol": 1e-4, "rtol": 1e-3} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 5e-2}
    torch.testing.assert_close([first, second], trajectory(method, HOST, HOST, dtype=dtype), **close)


@pytest.mark.parametrize("method", ["diloco", "streaming", "eager"])
def test_over_a_link_with_a_thread_of_its_own(method: str) -> None:
    """Outer gradients leave and means come while training goes on: the bits of a link that does it in between."""
    cuda = torch.device("cuda", 0)
    found = trajectory(method, cuda, cuda, run=run_over_tcp)
    torch.testing.assert_close(found, trajectory(method, cuda, cuda), atol=0, rtol=0)


def test_training_goes_on_while_an_outer_gradient_leaves() -> None:
    """It travels on a stream of its own, into pinned memory, and is there before work that the training stream got later."""
    flat = torch.ones(1 << 24, device="cuda")
    host = Pool(HOST, [flat.numel()], pinned=True)
    leaving = Departure(flat, host)
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds
    trained = torch.cuda.current_stream().record_event()
    copy = leaving.fetch()
    assert not trained.query()
    assert copy.is_pinned()
    assert torch.equal(copy, torch.ones(1 << 24))


def test_training_goes_on_while_a_mean_comes() -> None:
    """It is there before work that the training stream got earlier; memory that this still reads is not written to."""
    home = Pool(device=torch.device("cuda", 0))
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds
    trained = torch.cuda.current_stream().record_event()
    first = bring(torch.ones(1 << 24), home)
    assert not trained.query()
    seen = first.clone()
    home.give(first)
    second = bring(torch.zeros(1 << 24), home)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(seen, torch.ones_like(seen))
    assert torch.equal(second, torch.zeros_like(second))


def test_a_send_leaves_the_device_once_a_fragment() -> None:
    """However many parameters a fragment has, its snapshot is one copy from the device."""

    def live(region: Region) -> int:
        [state] = region.synchronizer.fragments
        # acc_events: without it torch 2.11 warns that it forgets the events of earlier cycles, of which there are none
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            state.gather()
            torch.cuda.synchronize()
        return sum("Memcpy DtoH" in event.name for event in profile.events())

    def build(index: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = llama().to("cuda")
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    assert run(1, OuterConfig(method="diloco", sync_interval=4), build, live) == [1]
