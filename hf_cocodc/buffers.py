"""Memory for flat fp32 tensors, which is used again, and their way from a GPU to the link."""

import functools

import torch
from torch import Tensor

HOST = torch.device("cpu")


class Buffers:
    """Flat buffers that were used before: new memory costs more than what is done with it.

    All are as long as the longest fragment, so that what one fragment's transfer has left serves the next one's. Only
    one thread takes at a time.

    Args:
        numel: length of the longest fragment.
        device: where they lie.
        pinned: locked in the host's memory, which a GPU copies to and from at the full speed of its bus.
    """

    def __init__(self, numel: int, device: torch.device = HOST, pinned: bool = False) -> None:
        self._numel = numel
        self._spare: list[Tensor] = []
        self.device, self.pinned = device, pinned

    def take(self, numel: int) -> Tensor:
        """A flat fp32 buffer with anything in it."""
        whole = self._spare.pop() if self._spare else self._new()
        return whole.as_strided((numel,), (1,))

    def give(self, *buffers: Tensor) -> None:
        """Hand back buffers that nobody will look at any more; those that came from elsewhere may be too short."""
        self._spare += [each for each in buffers if each.untyped_storage().nbytes() >= 4 * self._numel]

    def _new(self) -> Tensor:
        return torch.empty(self._numel, device=self.device, pin_memory=self.pinned)


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
        stream = _side_stream(self._flat.device)
        stream.wait_event(self._written)
        with torch.cuda.stream(stream):
            self._copy.copy_(self._flat, non_blocking=True)
        stream.synchronize()
        return self._copy

    def end(self) -> None:
        """Hand back the copy's memory: the transfer has ended, and its result been used."""
        if self._copy is not None:
            self._host.give(self._copy)
            self._copy = None


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream by which everything leaves that device."""
    return torch.cuda.Stream(device)
