"""How a flat tensor leaves a device for the link, and how a mean comes back to the device."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .pools import Pool


class Departure:
    """A flat tensor that the link's thread reads on the host: the tensor itself, or a copy if it is on a device.

    A GPU makes the copy on a stream of its own, after the work that the training stream has when the departure is made.
    Neither the training stream nor the training thread waits for the copy. Nobody may write to the tensor before the
    transfer has ended.

    Args:
        flat: the tensor.
        host: memory for the copy.

    Attributes:
        flat: as given.
    """

    def __init__(self, flat: Tensor, host: Pool) -> None:
        self.flat, self._host = flat, host
        self._copy: Tensor | None = None
        self._lock = threading.Lock()
        self._written = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

    def fetch(self) -> Tensor:
        """The tensor on the host; called by the link's thread, which waits for the copy. A further attempt gets the same copy."""
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
