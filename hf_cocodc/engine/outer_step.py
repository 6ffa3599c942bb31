"""The outer step of one transfer: from the mean and the old global params to the new ones, piece by piece."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..parts.info import OuterInfo
from ..parts.outer import OuterTransform
from ..parts.tensors.flat import tensors_in
from ..parts.tensors.memory import Pool
from ..parts.tensors.pieces import PIECE, divide

_CHUNK = 64
"""Pieces after which the number of threads is chosen again: about 10 ms of work for one thread."""


class OuterStep:
    """Moves global params and outer state: into new memory, or in place.

    In new memory (from `pool`), the old values and the mean stay as they are until the landing: a send, an evaluation or a
    checkpoint in between sees nothing of the step. In place, the mean is overwritten. `after` becomes the new global params,
    and may be the old ones; `info` has the old ones. `global_params` and `state` are new once every piece has moved.
    """

    def __init__(
        self,
        transform: OuterTransform,
        mean: Tensor,
        state: dict[str, Any],
        info: OuterInfo,
        after: Tensor,
        pool: Pool | None = None,
    ) -> None:
        own = state if pool is None else _alike(state, pool)
        self.global_params = after
        self._step, self.state = transform.begin(own, info)
        self.mean = mean
        self._mean, self._before, self._after = map(info.cut, (mean, info.global_params, after))
        pairs = zip(tensors_in(state), tensors_in(own), strict=True)
        self._copied = [(info.cut(old), info.cut(new)) for old, new in pairs if old is not new]
        self._keeps_mean = pool is not None

    def move(self, index: int, room: Tensor | None = None) -> Tensor:
        """Move one piece; returns its new global params. `room`: scratch memory where the mean is to be kept."""
        grad = self._mean[index]
        if room is not None:
            grad = room[: grad.numel()].copy_(grad)
        for old, new in self._copied:
            new[index].copy_(old[index])
        return torch.sub(self._before[index], self._step(grad, index), out=self._after[index])

    def run(self, threads: Callable[[], int]) -> None:
        """Move every piece. `threads` returns the number of threads to use, and is asked every `_CHUNK` pieces."""

        def work(part: range) -> None:
            room = (
                torch.empty(PIECE, dtype=torch.float32, device=self.mean.device) if self._keeps_mean else None
            )
            for index in part:
                self.move(start + index, room)

        count = len(self._mean)
        for start in range(0, count, _CHUNK):
            divide(work, min(_CHUNK, count - start), threads())


def _alike(state: dict[str, Any], pool: Pool) -> dict[str, Any]:
    """A copy of a state with new tensors, their values undefined."""
    made: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            made[name] = pool.take(value.numel(), value.dtype)
        else:
            made[name] = _alike(value, pool) if isinstance(value, dict) else value
    return made
