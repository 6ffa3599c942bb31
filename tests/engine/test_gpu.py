"""What needs a CUDA device: run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import threading

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_cocodc import OuterOptimizer
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.methods import METHODS
from hf_cocodc.parts import codecs
from hf_cocodc.parts.codecs.base import Plain
from hf_cocodc.parts.tensors.memory import HOST, Buffers, Departure, Home, aside
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from hf_cocodc.settings.outer import CODECS
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_memory_of_the_host_is_pinned_in_place(dtype: torch.dtype) -> None:
    """It takes as many bytes as were asked for, and copies beside the training stream."""
    buffers = Buffers(HOST, torch.device("cuda", 0))
    buffer = buffers.take((1 << 20) + 3, dtype)
    assert buffer.is_pinned() and buffer.untyped_storage().nbytes() == buffer.nbytes
    buffers.give(buffer)
    assert buffers.take((1 << 20) + 3, dtype).data_ptr() == buffer.data_ptr()


def test_training_goes_on_while_a_payload_leaves() -> None:
    """Work of a link waits for what the training stream had when the transfer was made, not for what it got later."""
    device, flat = torch.device("cuda", 0), torch.ones(1 << 24, device="cuda")
    departure = Departure(device)
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds
    trained = torch.cuda.current_stream().record_event()
    with aside(device):
        departure.wait(flat)
        copy = flat.to(HOST)
    assert not trained.query()
    assert torch.equal(copy, torch.ones(1 << 24))


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_gives_the_bytes_of_the_host(name: str) -> None:
    """Equal payloads for equal values, also where they are not finite; and equal values from equal bytes."""
    codec = getattr(codecs, name)()
    if not isinstance(codec, Plain):
        pytest.skip("it is no coder")
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    values[::1000] = 0
    if name not in ("bf16", "fp16"):  # whose NaN has other bits, as they say
        values[7::50_000], values[9::60_000] = torch.nan, torch.inf
    there = codec.coder.encode(values.cuda())
    assert torch.equal(there.cpu(), codec.coder.encode(values))
    decoded = codec.coder.decode(there, len(values)).cpu()
    assert torch.equal(decoded.nan_to_num(), codec.coder.decode(there.cpu(), len(values)).nan_to_num())


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_graph_is_captured_while_the_link_works(is_freed: bool) -> None:
    """Its thread takes, pins, copies and frees memory, and waits for it; the capture is of torch's default kind."""
    device = torch.device("cuda", 0)
    values, failed = torch.ones(1000, device=device), []
    captures, worked = threading.Event(), threading.Event()
    buffers = Buffers(HOST, device)
    old = buffers.take(1 << 20) if is_freed else None

    def work() -> None:
        nonlocal old
        captures.wait()
        try:
            with aside(device):
                taken = torch.empty(1 << 26, device=device).fill_(3)  # more than torch has kept: cudaMalloc
                pinned = buffers.take(1 << 22).copy_(taken[: 1 << 22], non_blocking=True)
                torch.cuda.current_stream().record_event().query()
                Home(device).finish_copies()
                assert pinned.eq(3).all()
                buffers.give(pinned)
            old = None
        except BaseException as error:
            failed.append(error)
        finally:
            worked.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    values.mul(2)
    with torch.cuda.graph(graph):
        doubled = values.mul(2)
        captures.set()
        worked.wait()
    thread.join()
    graph.replay()
    assert not failed and doubled.eq(2).all()


def test_a_captured_step_of_the_optimizer_is_not_counted() -> None:
    """Replays are steps of which `outer.step()` is told, and lands what other regions sent."""
    model = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    config, data = OuterConfig(sync_interval=2), torch.ones(4, 8, device="cuda")
    with OuterOptimizer(Accelerator(), model, optimizer, config, link=loopback()) as outer:

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(data).square().sum().backward()
            optimizer.step()

        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            step()
        torch.cuda.current_stream().wait_stream(warm)
        outer.step()
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        for graph in graphs:
            with torch.cuda.graph(graph):
                step()
        before = model.weight.detach().clone()
        for graph in graphs * 3:
            graph.replay()
            outer.step()
        assert outer.inner_step == 7 and not torch.equal(before, model.weight)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_graph_of_inductor_computes_with_what_has_landed() -> None:
    """As `torch_compile=True` with mode reduce-overhead captures it: parameters are read where they were at the capture."""
    model = nn.Linear(64, 64, device="cuda")
    compiled, data = torch.compile(model, mode="reduce-overhead"), torch.ones(4, 64, device="cuda")
    synchronizer = Synchronizer(model, from_config(OuterConfig(sync_interval=1, outer_lr=0.5)), loopback())
    for _ in range(6):
        with torch.no_grad():
            model.weight.add_(0.1)  # as an inner step
            synchronizer.step(1e-3)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(data).clone(), model(data))


def test_the_training_thread_does_not_wait_for_the_device() -> None:
    """A send, and a landing whose mean is there, return while the device is busy with what it got before."""
    model = llama().to("cuda")
    method = from_config(OuterConfig(method="streaming", sync_interval=4, num_fragments=2))
    synchronizer = Synchronizer(model, method, loopback())
    synchronizer.step(1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fragment = synchronizer.fragments[0]
        snapshot, outer_grad, square = fragment.prepare(fragment.base(), keep=True)
        fragment.clear_(outer_grad, ~square.isfinite())
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
