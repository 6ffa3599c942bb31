"""Pools of flat buffers: allocating memory costs more than the work that is done in it."""

import bisect
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")
_NEAR = 1.125
"""Lengths that differ by no more than this factor share buffers of the larger length."""


class Pool:
    """Flat buffers for reuse. Any thread may take and give.

    Args:
        device: the device of the buffers.
        lengths: numbers of values of the buffers. A buffer serves requests that fit into it but not into the next shorter
            one. By default a buffer has the length of its first request, and serves every request that fits.
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
    """Lengths of buffers that serve tensors of these lengths. No buffer is much longer than its tensors.

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
