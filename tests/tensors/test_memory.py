"""Memory of the host that a GPU copies from and to."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import resource
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.engine.fragment import hold
from hf_cocodc.errors import InputError
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.parts.fragments import Fragment
from hf_cocodc.parts.tensors import memory
from hf_cocodc.parts.tensors.flat import digest
from hf_cocodc.parts.tensors.memory import HOST, Buffers, Home, aside, beside_captures, own_pages
from tests.toys import llama

GLOBAL, RELAXED = 0, 2
"""CUDA's modes: of a thread whose calls end another thread's capture, and of one whose calls do not."""


@pytest.mark.parametrize(("numel", "dtype"), [(1, torch.uint8), (70_001, torch.float32)])
def test_pages_of_its_own(numel: int, dtype: torch.dtype) -> None:
    """It begins at a page, and the next one at another; it lives as long as a view of it."""
    first, second = own_pages(numel, dtype), own_pages(numel, dtype)
    assert first.shape == (numel,) and first.dtype == dtype
    assert first.data_ptr() % mmap.PAGESIZE == 0 == second.data_ptr() % mmap.PAGESIZE
    view = first.fill_(3)[:1]
    del first
    assert view.item() == 3 and not second.any()


def test_what_is_kept_away_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat tensors of a loaded state come into buffers, so that landings copy them beside training."""
    taken: list[int] = []
    take = Buffers.take

    def counted(self: Buffers, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        taken.append(numel)
        return take(self, numel, dtype)

    monkeypatch.setattr(Buffers, "take", counted)
    momentum, matrix = torch.arange(5.0), torch.ones(2, 2)
    kept = Home(torch.device("meta"), rests_on_host=True).kept(
        {"momentum": momentum, "steps": 3, "more": {"q": matrix}}
    )
    assert taken == [5]
    assert torch.equal(kept["momentum"], momentum) and kept["momentum"] is not momentum
    assert torch.equal(kept["more"]["q"], matrix) and kept["steps"] == 3


def test_payloads_of_any_length_use_the_same_memory() -> None:
    """A codec's payload may get shorter and longer for ever (a rank that follows the spectrum): no more is kept than was lent at
    once."""
    buffers, most = Buffers(lengths_vary=True), 5000
    for length in [*range(most, 4000, -7), *range(1, most, 13)]:
        lent = [buffers.take(each, torch.uint8) for each in (length, length, max(length // 2, 1))]
        assert [len(each) for each in lent] == [length, length, max(length // 2, 1)]
        for value, each in enumerate(lent):
            each.fill_(value)
        assert [int(each.unique()) for each in lent] == [0, 1, 2]
        buffers.give(*lent)
        assert buffers.spare_bytes <= 3 * most
    again = buffers.take(17, torch.uint8)
    buffers.give(again)
    kept = buffers.take(most - 1, torch.uint8)
    assert buffers.spare_bytes + len(kept) <= 3 * most


def test_flat_tensors_have_memory_of_their_length() -> None:
    """A small fragment never holds the memory of a large one."""
    buffers = Buffers()
    large = buffers.take(1000)
    buffers.give(large)
    small = buffers.take(10)
    assert small.untyped_storage().nbytes() == 40 and buffers.spare_bytes == 4000


class Cuda:
    """A GPU that is none, whose calls are kept: what was called, on which stream, and in which mode of the calling thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.captured: set[str] = set()
        self._streams: dict[str, Any] = {}
        self.room = math.inf
        self._pinned: dict[int, int] = {}
        self._thread = threading.local()

    @property
    def mode(self) -> int:
        """Of this thread."""
        return getattr(self._thread, "mode", GLOBAL)

    def exchange(self, mode: Any) -> int:
        self._thread.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def call(self, what: str) -> int:
        self.calls.append((what, self.mode))
        return 0

    def pin(self, address: int, num_bytes: int, flags: int) -> int:
        """Refuses if more than `room` bytes would be pinned."""
        self.call("pin")
        if self.pinned_bytes + num_bytes > self.room:
            return 2
        self._pinned[address] = num_bytes
        return 0

    def unpin(self, address: int) -> int:
        del self._pinned[address]
        return self.call("unpin")

    @property
    def pinned_bytes(self) -> int:
        return sum(self._pinned.values())

    def stream(self, name: str) -> Any:
        """The stream of that name."""
        if name not in self._streams:
            self._streams[name] = Stream(self, name)
        return self._streams[name]

    @property
    def current(self) -> Any:
        """The stream of this thread."""
        return getattr(self._thread, "stream", self.stream("current"))

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._thread.stream = self.current, stream
        try:
            yield
        finally:
            self._thread.stream = before


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def synchronize(self) -> None:
        self._cuda.call(f"synchronize {self.name}")

    def wait_event(self, event: Any) -> None:
        self._cuda.call(f"{self.name} waits")

    def record_event(self) -> int:
        return self._cuda.call(f"record {self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake = Cuda()
    runtime = SimpleNamespace(cudaHostRegister=fake.pin, cudaHostUnregister=fake.unpin)
    monkeypatch.setattr(memory, "has_streams", lambda device: True)
    monkeypatch.setattr(memory, "_side_stream", lambda device: fake.stream("side"))
    monkeypatch.setattr(memory, "_capture_mode", lambda: fake.exchange)
    monkeypatch.setattr(memory, "used_here", lambda *_: None)
    monkeypatch.setattr(memory, "is_capturing", lambda: fake.current.name in fake.captured)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: fake.call("synchronize the device"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: fake.stream("default"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake.current)
    yield fake
    gc.collect()  # pinned memory goes while the fake is here


def test_work_aside_disturbs_no_capture_of_another_thread(cuda: Cuda) -> None:
    """Its calls are made in a thread that CUDA lets do so, which is then as it was before; other threads stay as they are."""
    modes = []
    with aside(HOST):
        Buffers(HOST, HOST).take(5)
        thread = threading.Thread(target=lambda: modes.append(cuda.mode))
        thread.start()
        thread.join()
        with aside(HOST):
            pass
        assert cuda.mode == RELAXED
    assert modes == [GLOBAL] and cuda.mode == GLOBAL
    assert ("pin", RELAXED) in cuda.calls
    assert {mode for what, mode in cuda.calls if what != "unpin"} == {RELAXED}
    with pytest.raises(ValueError, match="wrong"), aside(HOST):
        raise ValueError("wrong")
    assert cuda.mode == GLOBAL


@pytest.mark.parametrize("captured", [None, "current", "user"])
@pytest.mark.parametrize("use", ["take", "give", "visit", "store"])
def test_memory_that_is_freed_under_copies(use: str, captured: str | None, cuda: Cuda) -> None:
    """They have ended on all streams that may have made them, but not by a wait that a capture forbids."""
    home = Home(torch.device("meta"), rests_on_host=True)
    flats = {"other": home.take(5)}
    with cuda.on(cuda.stream("user")):
        if use == "take":
            flats["more"] = home.take(3)
        elif use == "give":
            home.give(flats.pop("other"))
            flats["other"] = home.take(5)
        elif use == "visit":
            home.visit(flats["other"])
        else:
            home.store(flats["other"], torch.ones(5))
    cuda.captured = {captured} if captured else set()
    cuda.calls.clear()
    del flats["other"]
    *waits, last = cuda.calls
    streams = {"default", "side", "current", "user"} - cuda.captured
    assert sorted(waits) == sorted((f"synchronize {name}", RELAXED) for name in streams)
    assert last == ("unpin", RELAXED)


def test_what_is_pinned_to_try_is_free_at_once(cuda: Cuda) -> None:
    """A run that is over, and only shows its weights, must not keep it."""
    Home().try_to_pin(5000)
    assert [what for what, _ in cuda.calls if "pin" in what] == ["pin", "unpin"] and not cuda.pinned_bytes


def test_the_thread_of_a_link_waits_for_its_own_stream_only(cuda: Cuda) -> None:
    """To wait for the whole device ends a capture; the training thread may, as it captures nothing then."""
    home = Home(torch.device("meta"), rests_on_host=True)
    with aside(HOST):
        home.finish_copies()
    assert cuda.calls == [("synchronize side", RELAXED)] * 2
    home.settle()
    assert cuda.calls[-1] == ("synchronize the device", GLOBAL)


class Apart(Home):
    """Rests elsewhere than on its device, which is the host."""

    is_apart = True


def test_the_digest_of_a_send_does_not_wait_for_the_device(cuda: Cuda) -> None:
    """The link's thread computes it, after what the training stream had written at the send."""
    state = hold(Fragment(0, ("w",), (torch.Size((3,)),), 3), {"w": torch.arange(3.0)}, Apart(HOST))
    compute = state.checksum()
    cuda.calls.clear()
    assert compute() == digest(torch.arange(3.0))
    waits = ["side waits", "synchronize side", "synchronize side"]
    assert cuda.calls == [(each, RELAXED) for each in waits]


def test_a_runtime_that_has_no_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none of CUDA's, or it refuses: nothing is changed, and nothing is said."""
    assert memory._capture_mode() is None
    with beside_captures():
        pass
    refused = []

    def refuses(mode: Any) -> int:
        refused.append(mode._obj.value)
        return 201

    monkeypatch.setattr(memory, "_capture_mode", lambda: refuses)
    with beside_captures():
        assert refused == [RELAXED]
    assert refused == [RELAXED]
    assert isinstance(ctypes.CDLL(torch._C.__file__).omp_get_max_threads(), int)  # its libraries are found


def test_memory_that_cannot_be_pinned_is_known_before_training(cuda: Cuda) -> None:
    """Not at the first landing, which would take it: what is kept has room, and a transfer has not."""
    model = llama(layers=1)
    values = sum(param.numel() for param in model.parameters())

    def make() -> OuterOptimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return OuterOptimizer(Accelerator(cpu=True), model, optimizer, OuterConfig(), link=loopback())

    outer = make()
    kept = cuda.pinned_bytes
    assert kept >= 4 * values
    outer.close()
    del outer
    gc.collect()
    assert not cuda.pinned_bytes
    cuda.room = kept + 2 * 4 * values
    with pytest.raises(
        InputError, match=r"MB of the host cannot be pinned for the GPU \(CUDA error 2\)"
    ) as caught:
        make()
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e6:.4g} MB"
    assert f"The limit of this process for locked memory is {said}. Raise it (ulimit -l unlimited" in str(
        caught.value
    )
    assert "or set outer.device=model, if it is not" in str(caught.value)
