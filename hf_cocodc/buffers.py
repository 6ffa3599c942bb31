"""Memory for flat tensors, which is used again, and the way of what lies in it from a GPU to the link and back."""

import bisect
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HOST = torch.device("cpu")


class Buffers:
    """Flat buffers that were used before: new memory costs more than what is done with it.

    Any thread may take and give.

    Args:
        at_least: values that a new buffer has room for, however few are asked for: where this is the largest number ever
            asked for, what served one serves all.
        device: where they lie.
        pinned: locked in the host's memory, which a GPU copies to and from at the full speed of its bus.
    """

    def __init__(self, at_least: int = 0, device: torch.device = HOST, pinned: bool = False) -> None:
        self._at_least = at_least
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._lock = threading.Lock()
        self.device, self.pinned = device, pinned
        self.given: torch.cuda.Event | None = None
        """When a GPU will have done what the training stream, which hands back, had asked of it by then."""

    def take(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A flat buffer with anything in it: of the spare ones with room enough the smallest."""
        with self._lock:
            spare = self._spare.get(dtype, [])
            found = bisect.bisect_left(spare, numel, key=_room)
            whole = spare.pop(found) if found < len(spare) else None
        if whole is None:
            length = max(numel, self._at_least)
            whole = torch.empty(length, dtype=dtype, device=self.device, pin_memory=self.pinned)
        return whole.as_strided((numel,), (1,))

    def give(self, *buffers: Tensor) -> None:
        """Hand back buffers that nobody will look at any more; those that came from elsewhere may be too short."""
        with self._lock:
            if self.device.type == "cuda":
                self.given = torch.cuda.current_stream(self.device).record_event()
            for each in buffers:
                if _room(each) >= self._at_least:
                    bisect.insort(self._spare.setdefault(each.dtype, []), each, key=_room)


def _room(buffer: Tensor) -> int:
    """Values that its memory has room for."""
    return buffer.untyped_storage().nbytes() // buffer.element_size()


class Departure:
    """A flat tensor that the link's thread will read on the host: itself, or its copy where it lies on a device.

    A GPU copies on a stream of its own, once the training stream has come to where this was made; neither that stream nor
    the training thread waits for it. Until the transfer has ended nobody may write to the tensor.

    Args:
        flat: what leaves.
        host: where memory for the copy comes from.
    """

    def __init__(self, flat: Tensor, host: Buffers) -> None:
        self._flat, self._host = flat, host
        self._copy: Tensor | None = None
        self._written = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

    def fetch(self) -> Tensor:
        """The tensor on the host; called by the link's thread, which waits for the copy."""
        if self._flat.device == self._host.device:
            return self._flat
        self._copy = self._host.take(self._flat.numel())
        if self._written is None:
            return self._copy.copy_(self._flat)
        with _aside(self._flat.device) as stream:
            stream.wait_event(self._written)
            self._copy.copy_(self._flat, non_blocking=True)
        return self._copy

    def end(self) -> None:
        """Hand back the copy's memory: the transfer has ended, and its result been used."""
        if self._copy is not None:
            self._host.give(self._copy)
            self._copy = None


def bring(flat: Tensor, home: Buffers) -> Tensor:
    """A copy of a flat tensor of the host on the device of `home`, in its memory; called by the link's thread, which waits.

    To a GPU over the stream that outer gradients leave by, so that training goes on meanwhile.
    """
    if home.device.type != "cuda":
        return home.take(flat.numel()).copy_(flat)
    with _aside(home.device) as stream:
        copy = home.take(flat.numel())
        if home.given is not None:
            stream.wait_event(home.given)
        copy.copy_(flat, non_blocking=True)
    return copy


@contextmanager
def _aside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Inside the block this thread's work for a GPU goes to a stream of its own; behind it that is done."""
    stream = _side_stream(device)
    # the device first: leaving a stream of another GPU than the thread's would open a context on the thread's
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream
        stream.synchronize()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream by which everything leaves that device and comes to it."""
    return torch.cuda.Stream(device)
