"""What a landing does to every value, piece by piece, so that each is read from memory once and written once."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from ..parts.info import Piece, SyncInfo
from ..parts.merges import Merge
from ..parts.outer import Step
from ..tensors.flat import copy_all_, is_finite
from ..tensors.norms import norms, squares_of
from ..tensors.pieces import PIECE, Cut, in_this_thread


class Landing:
    """One landing of one fragment: the global params move, and the local params take them in.

    Args:
        cuts: how the fragment is cut into pieces.
        local: the local params, piece by piece; None where the merge does not read them, and the caller writes them.
        before: global params; `after` is where they go, which may be the same.
        grad: averaged outer gradient, overwritten.
        step: what the outer optimizer does to it.
        snapshot: local params at the send, overwritten.
        num_params: parameters of the fragment, those without a value on this rank counted.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        local: Sequence[Sequence[Tensor]] | None,
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
        self._finite = True
        self._copies = torch.empty(PIECE, dtype=torch.float32)

    def run(self) -> bool:
        """Do it; whether the local params were finite, as far as the merge reads them.

        A merge that asks for norms has to see all of the new global params before it changes a local one, and goes over
        the fragment a second time.
        """
        with in_this_thread():
            if self._merge.measure is None:
                for index in range(len(self._cuts)):
                    self._take_in(index, self._move(index))
            else:
                for index, piece in enumerate(self._measured()):
                    self._take_in(index, piece)
        return self._finite

    def _move(self, index: int) -> Piece:
        """Move the global params of a piece; what the merge works on then, the used up outer gradient giving room."""
        grad, new_global, cut = self._grad[index], self._after[index], self._cuts[index]
        torch.sub(self._before[index], self._step(grad, index), out=new_global)
        local = new_global
        if self._merge.reads_local:
            assert self._local is not None
            own = self._local[index]
            if len(own) == 1 and own[0].dtype == torch.float32:
                local = own[0]
            else:
                local = self._copies[: new_global.numel()]
                copy_all_(cut.views(local), own)
            self._finite = self._finite and is_finite(local)
        return Piece(local, new_global, self._snapshot[index], grad, cut.sizes)

    def _take_in(self, index: int, piece: Piece) -> None:
        """Let the local params of a piece take in the new global ones."""
        if self._local is None:
            return
        merged, own = self._merge.apply(piece, self._info), self._local[index]
        if merged is own[0]:  # changed where it is
            return
        copy_all_(own, self._cuts[index].views(merged) if len(own) > 1 else (merged,))

    def _measured(self) -> list[Piece]:
        """Move all of the global params, measuring for the merge; the pieces with the norms that it asked for."""
        assert self._merge.measure is not None
        pieces = []
        squares: list[list[tuple[float, float]]] = [[] for _ in range(self._num_params)]
        numels = [0.0] * self._num_params
        for index, cut in enumerate(self._cuts):
            piece = self._move(index)
            pieces.append(piece)
            measured = self._merge.measure(piece, self._info)
            pairs = zip(*(squares_of(cut.views(each)) for each in measured), strict=True)
            for param, pair, size in zip(cut.params, pairs, cut.sizes, strict=True):
                squares[param].append(pair)
                numels[param] += size
        sums = [sum(pair[which] for pair in pairs) for which in (0, 1) for pairs in squares]
        # over all pieces, and all ranks that hold shards
        found = iter(norms([*sums, *numels], self._info.total))
        first, second, roots = (list(islice(found, self._num_params)) for _ in range(3))
        return [
            piece._replace(
                norms=[(first[param], second[param]) for param in cut.params],
                numels=[roots[param] ** 2 for param in cut.params],
            )
            for piece, cut in zip(pieces, self._cuts, strict=True)
        ]
