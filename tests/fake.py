"""An accelerator that is none: torch's fake tensors have a device, a type and a shape, and no values.

Two devices that meet raise, and so does a training thread that waits for the device: it reads a value there, or copies
something between host and device without `non_blocking`. Kernels, streams and numbers are not its business: `tests/far.py`
has numbers. The device is the one of `tests/far.py`: a torch without CUDA cannot slice fake tensors of "cuda".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_cocodc.link.base import Arrival, Awaited, Link, MeanRequest
from hf_cocodc.link.calls import MeanCall
from hf_cocodc.link.process_group import Payloads
from hf_cocodc.net.members import Member
from hf_cocodc.parts.tensors.memory import HOST, Buffers
from tests.far import FAR

_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
}
_ASKING = ("prim", "profiler")
"""Namespaces of operations that ask for a device, or mark a block. `detach` is a part of `view(dtype)`."""
_COPIES = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten._foreach_copy_.default,
}
_OVERWRITES = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
"""Operations that read nothing of what they write to."""


class Waited(AssertionError):
    """The training thread has waited for the device."""


class Fake:
    """Where `is_training` is true, nobody may wait for the device; elsewhere every value that is read there is `answer`.

    Attributes:
        calls: number of torch's operations so far, views included.
        kernels: number of those that touch memory of the device.
        moved: bytes that these read and write there.
    """

    def __init__(self) -> None:
        self.is_training = True
        self.answer = 1.0
        self.calls = self.kernels = self.moved = 0

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In the block is what runs in another thread than training, or before it."""
        was, self.is_training = self.is_training, False
        try:
            yield
        finally:
            self.is_training = was

    def count(self, call: Callable[[], Any]) -> int:
        """The number of operations in a call."""
        before = self.calls
        call()
        return self.calls - before


class _Reads(TorchFunctionMode):
    """Answers the host that reads. Its own numbers, made with `torch.tensor`, keep their values."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.data_ptr:
            return args[0].untyped_storage()._cdata << 24  # as far apart as memory of these sizes would be
        if func not in _READS:
            found = func(*args, **(kwargs or {}))
            if func is torch.tensor and found.device == HOST:
                found.own_numbers = args[0]
            return found
        [tensor] = args
        if tensor.device != HOST and self._fake.is_training:
            raise Waited(f"{func.__name__} reads a value of {tensor.device}")
        values = np.array(getattr(tensor, "own_numbers", self._fake.answer))
        values = np.broadcast_to(values, tuple(tensor.shape)).astype(str(tensor.dtype).removeprefix("torch."))
        return values if func is Tensor.numpy else getattr(values, func.__name__)()


class _Calls(TorchDispatchMode):
    """Counts operations, and refuses copies between devices for which the training thread waits."""

    def __init__(self, fake: Fake) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._fake.calls += not (func.namespace in _ASKING or func is torch.ops.aten.detach.default)
        if func in _COPIES and self._fake.is_training:
            given = [each.device for each in tree_flatten(args)[0] if isinstance(each, Tensor)]
            devices = {each.type for each in (*given, kwargs.get("device") or given[0])}
            waits = not (kwargs.get("non_blocking") or True in args[2:])
            if len(devices) > 1 and waits:
                raise Waited(f"{func} copies between {sorted(devices)} and waits for it")
        found = func(*args, **kwargs)
        moved = _moved(func, args, kwargs, found)
        self._fake.moved += moved
        self._fake.kernels += moved > 0
        return found


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> int:
    """Bytes that an operation reads and writes on the device. A view, and memory that nobody has written yet, cost nothing."""
    returns, takes = func._schema.returns, func._schema.arguments
    name = func._schema.name.rpartition("::")[2]
    if name.startswith(("empty", "new_empty", "detach")) or func.namespace in _ASKING:
        return 0
    if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
        return 0
    given = {each.name: value for each, value in zip(takes, args, strict=False)} | kwargs
    written = [each.name for each in takes if each.alias_info is not None and each.alias_info.is_write]
    only_written = written if name in _OVERWRITES or "out" in written else []
    reads = [value for each, value in given.items() if each not in only_written]
    writes = [given[each] for each in written] if written else [found]
    return sum(map(_bytes_of, (reads, writes)))


def _bytes_of(values: Any) -> int:
    """Of the tensors on the device; an expanded one has those of its memory."""
    tensors = [each for each in tree_flatten(values)[0] if isinstance(each, Tensor) and each.device == FAR]
    return sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in tensors)


@contextmanager
def fake_tensors() -> Iterator[Fake]:
    """Inside the block all new tensors are fake, on the host and on `FAR`."""
    fake = Fake()
    # its own `tolist` reads the values one by one
    with (
        patch.object(FakeTensor, "tolist", lambda self: Tensor.tolist(self)),
        FakeTensorMode(),
        _Calls(fake),
        _Reads(fake),
    ):
        yield fake


class NoWire:
    """What a transfer uses of the connections: nothing travels, and every region says what this one says."""

    region, connections, rtt_s = 0, 2, 0.0

    def __init__(self, num_regions: int) -> None:
        self.num_regions = num_regions
        self.regions, self.others = range(num_regions), range(1, num_regions)
        self._tags = itertools.count()

    def tag(self) -> int:
        return next(self._tags)

    def begin_swap(self, own: Tensor, what: str) -> Any:
        return SimpleNamespace(pending=(), values=[own] * self.num_regions)

    def send(self, *message: Any) -> None:
        assert message[1].device == HOST

    receive = send

    def wait(self, pending: Any, what: str, may_be_late: bool = False) -> None:
        pass


class FakeLink(Link):
    """A link whose other regions send what this one sends; its thread does its work in `mean`.

    Attributes:
        calls: torch's operations in that thread, for each transfer.
        kernels, moved: see `Fake`, of that thread alone, for all transfers.
    """

    region, timing = 0, "none"
    members: tuple[int, ...] = ()

    def __init__(self, fake: Fake, num_regions: int = 2) -> None:
        self._fake, self.members = fake, tuple(range(num_regions))
        self.calls: list[int] = []
        self.kernels = self.moved = 0

    def mean(self, request: MeanRequest) -> Awaited:
        parties = tuple(Member(region, region) for region in self.members)
        buffers = Buffers(HOST, request.home.device)
        call = MeanCall(NoWire(self.num_regions), parties, request, buffers, Payloads())
        arrivals: list[Arrival] = []
        kernels, moved = self._fake.kernels, self._fake.moved
        with self._fake.elsewhere():
            self.calls.append(self._fake.count(lambda: arrivals.append(call.run())))
        self.kernels += self._fake.kernels - kernels
        self.moved += self._fake.moved - moved
        return Awaited(lambda: arrivals[0])

    def clock(self) -> float:
        return 0.0

    def broadcast(self, flat: Tensor, what: str, source: int | None = None) -> None:
        assert flat.device == HOST
