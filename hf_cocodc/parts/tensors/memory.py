"""Memory for flat tensors: buffers for reuse, and the way from a device to the link and back."""

import bisect
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

HOST = torch.device("cpu")
_NEAR = 1.125
"""Lengths that differ by no more than this factor share buffers of the larger length."""


class Pool:
    """Flat buffers for reuse. Any thread may take and give.

    Args:
        lengths: numbers of values of the buffers. A buffer serves requests that fit into it but not into the next shorter one.
            By default a buffer has the length of its first request, and serves every request that fits.
        pinned: whether buffers are locked in the host's memory, where a GPU copies at the full speed of its bus.
    """

    def __init__(
        self, device: torch.device = HOST, lengths: Sequence[int] = (), pinned: bool = False
    ) -> None:
        self.device, self.lengths, self.pinned = device, sorted(lengths), pinned
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._lock = threading.Lock()
        self.given: torch.cuda.Event | None = None
        """On a GPU: the moment when the training stream no longer uses the buffers that were given last."""

    def length(self, numel: int) -> int:
        """Values of the buffer that serves `numel` values."""
        place = bisect.bisect_left(self.lengths, numel)
        return self.lengths[place] if place < len(self.lengths) else numel

    def take(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A flat buffer of `numel` undefined values: the shortest spare one that serves."""
        length = self.length(numel)
        with self._lock:
            spare = self._spare.get(dtype, [])
            place = bisect.bisect_left(spare, length, key=_room)
            fits = place < len(spare) and (not self.lengths or _room(spare[place]) == length)
            whole = spare.pop(place) if fits else None
        if whole is None:
            whole = torch.empty(length, dtype=dtype, device=self.device, pin_memory=self.pinned)
        return whole.as_strided((numel,), (1,))

    def give(self, *buffers: Tensor) -> None:
        """Return buffers to the pool; do not use them afterwards. Buffers that the pool would not make are freed."""
        with self._lock:
            if self.device.type == "cuda":
                self.given = torch.cuda.current_stream(self.device).record_event()
            for each in buffers:
                ours = not self.lengths or _room(each) in self.lengths
                if ours and (not self.pinned or each.is_pinned()):
                    bisect.insort(self._spare.setdefault(each.dtype, []), each, key=_room)


def shared_lengths(numels: Iterable[int]) -> list[int]:
    """Lengths of buffers for tensors of these lengths, none much longer than its tensors.

    >>> shared_lengths([100, 95, 40, 38])
    [100, 40]
    """
    lengths: list[int] = []
    for numel in sorted(numels, reverse=True):
        if not lengths or lengths[-1] > _NEAR * numel:
            lengths.append(numel)
    return lengths


def _room(buffer: Tensor) -> int:
    """Values that fit into a buffer's memory."""
    return buffer.untyped_storage().nbytes() // buffer.element_size()


class Departure:
    """A flat tensor that the link's thread reads on the host: the tensor itself, or a copy if it is on a device.

    A GPU makes the copy on a stream of its own, after the work that the training stream has when the departure is made. Neither
    the training stream nor the training thread waits for it. Do not write to the tensor before the transfer has ended.
    """

    def __init__(self, flat: Tensor, host: Pool) -> None:
        self.flat, self._host = flat, host
        self._copy: Tensor | None = None
        self._lock = threading.Lock()
        self._written = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

    def fetch(self) -> Tensor:
        """The tensor on the host, for the link's thread, which waits for the copy. A further attempt gets the same copy."""
        if self.flat.device == self._host.device:
            return self.flat
        with self._lock:
            if self._copy is None:
                self._copy = self._fetch(self._host.take(self.flat.numel()))
            return self._copy

    def _fetch(self, copy: Tensor) -> Tensor:
        if self._written is None:
            return copy.copy_(self.flat)
        with _aside(self.flat.device) as stream:
            stream.wait_event(self._written)
            copy.copy_(self.flat, non_blocking=True)
        return copy

    def end(self) -> None:
        """Return the copy's memory: the transfer has ended, and its result was used."""
        if self._copy is not None:
            self._host.give(self._copy)
            self._copy = None


def bring(flat: Tensor, home: Pool) -> Tensor:
    """A copy of a flat tensor of the host in memory of `home`; called by the link's thread, which waits for it.

    A GPU receives it on the stream by which outer gradients leave: training goes on meanwhile.
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
    """Inside the block, this thread's work for a GPU goes to a stream of its own; at the end of the block it is done."""
    stream = _side_stream(device)
    # the device first: leaving a stream of another GPU than the thread's would open a context on the thread's GPU
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream
        stream.synchronize()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all copies from and to that device."""
    return torch.cuda.Stream(device)
