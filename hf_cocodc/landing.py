"""What a landing does to every value, piece by piece, so that each is read from memory once and written once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .merges import Merge
from .outer import Step
from .sync_info import Piece, SyncInfo
from .tensors import PIECE, Cut, copy_all_, is_finite, norms, spread, square_of


class Landing:
    """One landing of one fragment: the global params move, and the local params take them in.

    Args:
        cuts: how the fragment is cut into pieces.
        local: the local params, piece by piece.
        before: global params; `after` is where they go, which may be the same.
        grad: averaged outer gradient, overwritten.
        step: what the outer optimizer does to it.
        snapshot: local params at the send.
        num_params: parameters of the fragment, those without a value on this rank counted.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        local: Sequence[Sequence[Tensor]],
        *,
        before: Tensor,
        after: Tensor,
        grad: Tensor,
        step: Step,
        merge: Merge,
        snapshot: Tensor,
        info: SyncInfo,
        num_params: int,
    ) -> None:
        self._cuts, self._local = cuts, local
        self._before, self._after, self._grad, self._snapshot = map(info.cut, (before, after, grad, snapshot))
        self._step, self._merge, self._info = step, merge, info
        self._num_params = num_params
        self._finite = [True] * len(cuts)
        self._squares: list[list[tuple[float, float]]] = [[] for _ in cuts]
        self._measured: dict[int, Piece] = {}
        self._norms: list[tuple[float, float]] = []

    def run(self) -> bool:
        """Do it; whether the local params were finite, as far as the merge reads them.

        A merge that asks for norms has to see all of the new global params before it changes a local one, and goes over
        the fragment a second time.
        """
        pieces = range(len(self._cuts))
        if self._merge.measure is None:
            spread(self._move_and_merge, pieces)
        else:
            spread(self._move_and_measure, pieces)
            self._norms = self._find_norms()
            spread(self._merge_measured, pieces)
        return all(self._finite)

    def _move_and_merge(self, queue: Iterator[int]) -> None:
        copies = torch.empty(PIECE)
        for index in queue:
            self._move(index)
            self._write(index, self._merge.apply(self._piece(index, copies), self._info))

    def _move_and_measure(self, queue: Iterator[int]) -> None:
        assert self._merge.measure is not None
        copies, wide = torch.empty(PIECE), torch.empty(PIECE, dtype=torch.float64)
        for index in queue:
            self._move(index)
            piece = self._measured[index] = self._piece(index, copies)
            tensors = self._merge.measure(piece, self._info)
            pairs = zip(*map(self._cuts[index].views, tensors), strict=True)
            self._squares[index] = [(square_of(one, wide), square_of(other, wide)) for one, other in pairs]

    def _merge_measured(self, queue: Iterator[int]) -> None:
        copies = torch.empty(PIECE)
        for index in queue:
            found = [self._norms[param] for param in self._cuts[index].params]
            piece = self._measured[index]._replace(local=self._place(index, copies), norms=found)
            self._write(index, self._merge.apply(piece, self._info))

    def _move(self, index: int) -> None:
        """Move the global params."""
        update = self._step(self._grad[index], index)
        torch.sub(self._before[index], update, out=self._after[index])

    def _piece(self, index: int, copies: Tensor) -> Piece:
        """What the merge works on; the outer gradient has been used up and leaves room."""
        cut, local = self._cuts[index], self._place(index, copies)
        if self._merge.reads_local:
            if local is not self._local[index][0]:
                copy_all_(cut.views(local), self._local[index])
            self._finite[index] = is_finite(local)
        return Piece(local, self._after[index], self._snapshot[index], self._grad[index], cut.sizes)

    def _place(self, index: int, copies: Tensor) -> Tensor:
        """Where the merge may work on local params: where they lie, if that is one fp32 tensor."""
        local = self._local[index]
        alone = len(local) == 1 and local[0].dtype == torch.float32
        return local[0] if alone else copies[: self._after[index].numel()]

    def _write(self, index: int, merged: Tensor) -> None:
        if merged is not self._local[index][0]:  # else it has been changed where it is
            copy_all_(self._local[index], self._cuts[index].views(merged))

    def _find_norms(self) -> list[tuple[float, float]]:
        """Of what was measured, for each parameter, over all pieces and all ranks that hold shards of it."""
        parts: list[list[tuple[float, float]]] = [[] for _ in range(self._num_params)]
        for cut, squares in zip(self._cuts, self._squares, strict=True):
            for param, pair in zip(cut.params, squares, strict=True):
                parts[param].append(pair)
        sums = [sum(pair[which] for pair in pairs) for which in (0, 1) for pairs in parts]
        found = norms(sums, self._info.total)
        return list(zip(found[: self._num_params], found[self._num_params :], strict=True))
