"""A landing: the local params of a fragment take in the new global ones, piece by piece."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..parts.info import MergeInfo, Piece
from ..parts.merges import Merge
from ..parts.tensors.flat import copy_all_, is_finite
from ..parts.tensors.pieces import PIECE, Cut, divide, norms, squares_of


class Flats(NamedTuple):
    """The tensors of a landing, cut. `local`: None if the caller writes it. `snapshot` and `room` are overwritten."""

    local: Sequence[Sequence[Tensor]] | None
    snapshot: Sequence[Tensor]
    room: Sequence[Tensor]


class Landing:
    """One landing of one fragment; `num_params` counts parameters without a value on this rank, too."""

    def __init__(
        self,
        cuts: Sequence[Cut],
        flats: Flats,
        new_global: Callable[[int], Tensor],
        merge: Merge,
        info: MergeInfo,
        num_params: int,
        threads: int,
    ) -> None:
        self._cuts, self._flats, self._new_global = cuts, flats, new_global
        self._merge, self._info = merge, info
        self._num_params, self._threads = num_params, threads

    def run(self) -> bool:
        """Land; returns whether the local params were finite, as far as the merge reads them."""
        # its norms need all new global params before a local one changes: this makes a second pass
        if self._merge.measure is not None:
            return self._run_measured()

        def work(part: range) -> bool:
            finite, scratch = True, _scratch()
            for index in part:
                piece, is_fine = self._piece(index, scratch)
                finite = finite and is_fine
                self._take_in(index, piece)
            return finite

        return all(divide(work, len(self._cuts), self._threads))

    def _run_measured(self) -> bool:
        """`run` for a merge that asks for norms."""
        measured = [each for part in divide(self._measure, len(self._cuts), self._threads) for each in part]
        totals = self._norms([pairs for _, pairs, _ in measured])

        def work(part: range) -> None:
            scratch = _scratch()
            for index in part:
                piece, params = measured[index][0], self._cuts[index].params
                per_param = [totals[param] for param in params]
                own = self._own(index)
                local = own[0] if _is_plain(own) else scratch[: piece.new_global.numel()]
                norms, numels = [each[:2] for each in per_param], [each[2] for each in per_param]
                self._take_in(index, piece._replace(local=local, norms=norms, numels=numels))

        divide(work, len(self._cuts), self._threads)
        return all(is_fine for _, _, is_fine in measured)

    def _piece(self, index: int, scratch: Tensor) -> tuple[Piece, bool]:
        """Move a piece of the global params; returns the merge's piece, and whether its local params are finite."""
        new_global, cut = self._new_global(index), self._cuts[index]
        local, is_fine = new_global, True
        if self._merge.reads_local:
            own = self._own(index)
            local = own[0] if _is_plain(own) else scratch[: new_global.numel()]
            if local is not own[0]:
                copy_all_(cut.views(local), own)
            is_fine = is_finite(local)
        snapshot, room = self._flats.snapshot[index], self._flats.room[index]
        return Piece(local, new_global, snapshot, room, cut.sizes), is_fine

    def _own(self, index: int) -> Sequence[Tensor]:
        assert self._flats.local is not None, "a merge that reads local params is given them"
        return self._flats.local[index]

    def _take_in(self, index: int, piece: Piece) -> None:
        """Let the local params of a piece take in the new global ones."""
        if self._flats.local is None:
            return
        merged, own = self._merge.apply(piece, self._info), self._flats.local[index]
        if merged is not own[0]:  # else it was changed in place
            copy_all_(own, self._cuts[index].views(merged) if len(own) > 1 else (merged,))

    def _measure(self, part: range) -> list[tuple[Piece, list[tuple[float, float]], bool]]:
        """For each piece: the piece, the squares that the merge asks for, whether its local params are finite."""
        assert self._merge.measure is not None
        results, scratch = [], _scratch()
        for index in part:
            piece, is_fine = self._piece(index, scratch)
            measured = self._merge.measure(piece, self._info)
            squares = (squares_of(self._cuts[index].views(each)) for each in measured)
            results.append((piece, list(zip(*squares, strict=True)), is_fine))
        return results

    def _norms(self, squares: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float]]:
        """For each parameter both norms and its number of values, over all pieces and all ranks that hold shards."""
        sums = [[0.0, 0.0, 0.0] for _ in range(self._num_params)]
        for cut, pairs in zip(self._cuts, squares, strict=True):
            for param, size, pair in zip(cut.params, cut.sizes, pairs, strict=True):
                for place, value in enumerate((*pair, size)):
                    sums[param][place] += value
        flat = [row[place] for place in range(3) for row in sums]
        remaining = iter(norms(flat, self._info.total))
        first, second, roots = (list(islice(remaining, self._num_params)) for _ in range(3))
        return [(one, other, root**2) for one, other, root in zip(first, second, roots, strict=True)]


def _is_plain(own: Sequence[Tensor]) -> bool:
    """Whether a piece is a stretch of one fp32 parameter, which the merge can work on in place."""
    return len(own) == 1 and own[0].dtype == torch.float32


def _scratch() -> Tensor:
    return torch.empty(PIECE, dtype=torch.float32)
