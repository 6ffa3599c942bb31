"""Where flat tensors rest, where they are computed with, and the way between the two."""

import bisect
import contextlib
import ctypes
import functools
import mmap
import resource
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import InputError
from .flat import mapped

HOST = torch.device("cpu")
_RELAXED = 2
"""CUDA's and HIP's stream capture mode of a thread that captures of other threads do not restrict."""


class Buffers:
    """Flat buffers for reuse: the host clears new memory page by page, and pinning it takes longer still.

    Any thread may take and give. On an accelerator torch itself reuses memory, and `give` does nothing.

    Args:
        device: of the buffers.
        user: the device that copies from and to them; if it is a GPU, buffers of the host are pinned.
        lengths_vary: whether a longer spare buffer may serve; one that is too short then makes room for a longer one. So there
            are never more buffers than were lent at once. If not, a buffer has exactly the length that was asked for, and
            nothing is freed: for tensors of a few fixed lengths.
    """

    def __init__(
        self, device: torch.device = HOST, user: torch.device = HOST, lengths_vary: bool = False
    ) -> None:
        self._device, self._user, self._lengths_vary = device, user, lengths_vary
        # by type, the shortest first
        self._spare: dict[torch.dtype, list[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self._users: set[torch.cuda.Stream] = set()
        self._lent = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A flat buffer of `numel` undefined values."""
        if self._device != HOST:
            return torch.empty(numel, dtype=dtype, device=self._device)
        buffer = given = too_short = None
        with self._lock:
            spare = self._spare.setdefault(dtype, [])
            place = bisect.bisect_left(spare, numel, key=_length)
            if place < len(spare) and (self._lengths_vary or _length(spare[place]) == numel):
                buffer, given = spare.pop(place)
            elif self._lengths_vary and spare:
                too_short = spare.pop()
        del too_short  # freed without the lock: the device may be waited for
        if buffer is None:
            is_pinned = self._is_for_gpu and numel
            buffer = (
                pinned(numel, dtype, self._user, self._users)
                if is_pinned
                else torch.empty(numel, dtype=dtype, device=HOST)
            )
        stream = self._note_stream()
        if given is not None and stream is not None:  # its last user was perhaps another stream
            stream.wait_event(given)
        if buffer.numel() == numel:
            self._lent[buffer] = None  # to name it would keep it for ever
            return buffer
        lent = buffer[:numel]
        self._lent[lent] = buffer
        return lent

    def give(self, *buffers: Tensor) -> None:
        """Return buffers; do not use them afterwards."""
        if self._device != HOST:
            return
        stream = self._note_stream()
        given = None if stream is None else stream.record_event()
        with self._lock:
            for each in buffers:
                if each not in self._lent:  # a codec makes means of its own: with them the memory would grow
                    continue
                whole = self._lent.pop(each)
                buffer = each if whole is None else whole
                bisect.insort_left(self._spare[buffer.dtype], (buffer, given), key=_length)

    @property
    def spare_bytes(self) -> int:
        """Bytes that are kept for reuse now."""
        return sum(buffer.nbytes for spare in self._spare.values() for buffer, _ in spare)

    @property
    def _is_for_gpu(self) -> bool:
        return self._device == HOST and has_streams(self._user)

    def _note_stream(self) -> torch.cuda.Stream | None:
        """The current stream, of which pinned buffers remember that it may copy from and to them; None if none is pinned."""
        if not self._is_for_gpu:
            return None
        stream = torch.cuda.current_stream(self._user)
        self._users.add(stream)
        return stream


def _length(spare: tuple[Tensor, Any]) -> int:
    return spare[0].numel()


class Home(Buffers):
    """Where flat tensors rest, and the device on which they are computed with: that of the model's parameters.

    It lends flat tensors at rest (`Buffers`). Code that computes brings a slice in (`visit`), computes, and brings the result
    back (`store`). Where both are one device, a slice is its own visitor.

    Args:
        device: of the model's parameters.
        rests_on_host: whether flat tensors rest in memory of the host although the model is elsewhere; from pinned memory a GPU
            copies beside its work.
    """

    def __init__(self, device: torch.device = HOST, rests_on_host: bool = False) -> None:
        self.device = device
        self.rest = HOST if rests_on_host else device
        super().__init__(self.rest, device)

    @property
    def is_apart(self) -> bool:
        """Whether flat tensors rest elsewhere than where they are computed with."""
        return self.rest != self.device

    def fill(self, flat: Tensor, values: Tensor | float) -> Tensor:
        """Write to a flat tensor from where it rests; returns it. Its last user may be a copy of the device, under way still."""
        self.settle()
        return flat.copy_(values) if isinstance(values, Tensor) else flat.fill_(values)

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A nested state at rest: flat fp32 tensors in memory that the device copies fast, others in any."""
        return mapped(state, self.keep)

    def keep(self, value: Tensor) -> Tensor:
        """See `kept`."""
        if self.is_apart and value.dim() == 1 and value.dtype == torch.float32:
            return self.fill(self.take(len(value)), value)
        return value.to(self.rest)

    def visit(self, part: Tensor) -> Tensor:
        """A slice of a flat tensor, on the device."""
        if part.device == self.device:
            return part
        self._note_stream()
        return part.to(self.device, non_blocking=True)

    def store(self, part: Tensor, values: Tensor) -> None:
        """Write values of the device to a slice of a flat tensor. The host may read them after `settle`."""
        if values is not part:
            self._note_stream()
            part.copy_(values, non_blocking=True)

    def settle(self) -> None:
        """Wait until what was stored is there, before the host reads flat tensors. For the training thread: while it captures a
        graph, CUDA forbids every thread to wait for the whole device.
        """
        if self.is_apart and has_streams(self.device):
            torch.cuda.synchronize(self.device)

    def try_to_pin(self, num_bytes: int) -> None:
        """Find out whether a GPU can have so much pinned memory beside what it has. Raises InputError if not."""
        if num_bytes and has_streams(self.device):
            pinned(num_bytes, torch.uint8, self.device, set())  # nothing names it: it is free again at once

    def finish_copies(self) -> None:
        """Wait for what this thread has given the device: copies from and to memory of the host have then ended."""
        if has_streams(self.device):
            torch.cuda.current_stream(self.device).synchronize()


def has_streams(device: torch.device) -> bool:
    """Whether work for this device is queued on streams, beside the thread that gives it."""
    return device.type == "cuda" and torch.cuda.is_initialized()


def is_capturing() -> bool:
    """Whether this thread's work for a GPU is recorded in a graph now (`torch.cuda.graph`), and not done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def pinned(numel: int, dtype: torch.dtype, device: torch.device, users: set[torch.cuda.Stream]) -> Tensor:
    """A flat tensor of the host whose memory stays in place until it is freed: a GPU copies it at the full speed of its bus.

    It has pages of its own, because memory can be locked by pages only. torch's own pinned memory comes in powers of two: up to
    twice as much. `users`: the streams that may copy from and to it, also those that are added later; they are waited for before
    it is freed. Raises InputError if the system refuses.
    """
    buffer = own_pages(numel, dtype)
    address = buffer.data_ptr()
    refused = int(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, 0))
    if refused:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limited = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e6:.4g} MB"
        raise InputError(
            f"{buffer.nbytes / 1e6:.4g} MB of the host cannot be pinned for the GPU (CUDA error {refused}), which copies to and "
            f"from pinned memory only. The limit of this process for locked memory is {limited}. Raise it (ulimit -l unlimited; "
            "in a container --ulimit memlock=-1), free memory of the host, or set outer.device=model, if it is not: then "
            "only what travels is pinned."
        )
    weakref.finalize(buffer, _unpin, address, device, users).atexit = False
    return buffer


def own_pages(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of the host, of one value or more, that shares no page of memory with another one."""
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def _unpin(address: int, device: torch.device, users: set[torch.cuda.Stream]) -> None:
    with torch.cuda.device(device), beside_captures():  # perhaps in a thread that has not used the device yet
        streams = {torch.cuda.default_stream(), _side_stream(device)}
        for stream in (users | {torch.cuda.current_stream()}) - streams:
            with torch.cuda.stream(stream):
                if not is_capturing():  # a captured stream must not be waited for
                    streams.add(stream)
        try:
            for stream in streams:  # a copy may be under way; a capture forbids to wait for the whole device
                stream.synchronize()
        finally:  # the pages are about to go
            torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Inside the block, this thread's work for a GPU goes to a stream beside training; at its end it is done. Training may
    capture graphs meanwhile.

    On other devices nothing changes.
    """
    if not has_streams(device):
        yield
        return
    stream = _side_stream(device)
    # the device first: leaving a stream of another GPU than the thread's would open a context on the thread's GPU
    with torch.cuda.device(device), torch.cuda.stream(stream), beside_captures():
        try:
            yield
        finally:  # after an error, too, memory is freed that copies may still use
            stream.synchronize()


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Inside the block, this thread and the graphs that other threads capture do not disturb each other.

    A capture as `torch.cuda.graph` makes it fails if any thread of the process takes, pins or frees memory, or asks whether an
    event has come. Only a thread itself can be exempted. To wait for the captured stream, or for the whole device, stays
    forbidden.
    """
    exchange, mode = _capture_mode(), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)):
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _capture_mode() -> Callable[[Any], int] | None:
    """Exchanges this thread's stream capture mode with the given one; torch has no call for it. None if CUDA has none."""
    places = [(f"{'hip' if torch.version.hip else 'cuda'}ThreadExchangeStreamCaptureMode", torch._C.__file__)]
    if torch.version.hip is None:  # if torch has its runtime inside, the driver's call does the same
        places.append(("cuThreadExchangeStreamCaptureMode", "libcuda.so.1"))
    for name, library in places:
        with contextlib.suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)
    return None


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all work of links on that device."""
    return torch.cuda.Stream(device)


class Departure:
    """The moment at which the training stream has written what a link's thread will read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written = torch.cuda.current_stream(device).record_event() if has_streams(device) else None

    def wait(self, *used: Tensor) -> None:
        """Let the current stream wait for it. `used`: tensors that this stream will read; they must not be freed under it."""
        if self._written is None:
            return
        torch.cuda.current_stream(self._device).wait_event(self._written)
        used_here(*used)


def used_here(*tensors: Tensor) -> None:
    """Say that the current stream uses tensors that another stream has made: their memory is not used again under it."""
    for each in tensors:
        if has_streams(each.device):
            each.record_stream(torch.cuda.current_stream(each.device))
