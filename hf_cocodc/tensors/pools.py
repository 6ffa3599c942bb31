"""Pools of flat buffers: new memory costs more than the work that is done in it."""

import bisect
import threading

import torch
from torch import Tensor

HOST = torch.device("cpu")


class Pool:
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
