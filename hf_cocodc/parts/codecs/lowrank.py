"""Matrices as the product of two thin factors, found together by all regions (PowerSGD), the factors quantised."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ...tensors.flat import split_views
from ..fragments import Fragment
from .base import Coder, Conversation, Message, Result, State, message_bytes
from .block import Integers

Sides = Mapping[int, tuple[int, int]]
"""Rows and columns of each parameter that is sent at low rank, by its position in the fragment."""


class LowRank:
    """See `lowrank`; factors are kept and sent transposed, (rank, side), so that a block holds values of one direction.

    The norms of the directions differ by orders of magnitude: side by side in a block the weak ones would round to 0.
    """

    def __init__(self, rank: int, coder: Coder, rank_min: int, energy: float, window: int) -> None:
        if not 1 <= rank_min <= rank:
            raise InputError(f"rank={rank} and rank_min={rank_min}: 1 <= rank_min <= rank must hold.")
        self.rank = rank
        self.coder = coder
        self.rank_min = rank_min
        self.energy = energy
        self.window = window

    def init(self, fragment: Fragment) -> State:
        # Uniform numbers are whole numbers scaled by a power of two, hence the same on every machine; normal ones pass
        # through a logarithm and a cosine, which may be rounded differently.
        first = [
            torch.rand(
                self.rank * cols,
                generator=torch.Generator().manual_seed((fragment.index << 20) + i),
                dtype=torch.float32,
            )
            for i, (_, cols) in self._sides(fragment).items()
        ]
        q = torch.cat([torch.zeros(0, dtype=torch.float32), *first]).mul_(2).sub_(1)
        return {"rank": self.rank, "rank_1": self.rank, "effective_ranks": [], "q": q}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: State) -> Conversation:
        rank, sides = state["rank"], self._sides(fragment)
        views = fragment.views(outer_grad)
        matrices = [views[i].reshape(shape) for i, shape in sides.items()]
        rest = [view for i, view in enumerate(views) if i not in sides]
        warm = split_views(state["q"], [(self.rank, cols) for _, cols in sides.values()])
        p_shapes = [(rank, rows) for rows, _ in sides.values()]
        q_shapes = [(rank, cols) for _, cols in sides.values()]

        sketches = [q[:rank] @ matrix.T for q, matrix in zip(warm, matrices, strict=True)]
        first = yield Message(_flat([*sketches, *rest]), self.coder)
        p_numel = sum(map(math.prod, p_shapes))
        if not sides:
            return Result(first.mean, first.own, state)
        p = [_orthonormal(mean) for mean in split_views(first.mean[:p_numel], p_shapes)]
        projected = [basis @ matrix for basis, matrix in zip(p, matrices, strict=True)]
        second = yield Message(_flat(projected), self.coder)
        q = split_views(second.mean, q_shapes)

        def own() -> Tensor:
            return _assemble(fragment, sides, p, split_views(second.own(), q_shapes), first.own()[p_numel:])

        mean = _assemble(fragment, sides, p, q, first.mean[p_numel:])
        return Result(mean, own, self._next(state, warm, q))

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int, rank: int | None = None) -> int:
        """Payload bytes of one transfer at `rank` (a state's "rank"); by default at the first rank: never more."""
        rank = self.rank if rank is None else rank
        sides = self._sides(fragment)
        rest = fragment.numel - sum(map(math.prod, sides.values()))
        first = rank * sum(rows for rows, _ in sides.values()) + rest
        second = rank * sum(cols for _, cols in sides.values())
        return sum(message_bytes(self.coder, numel, region, num_regions) for numel in (first, second))

    def _sides(self, fragment: Fragment) -> dict[int, tuple[int, int]]:
        """Parameters whose factors at the first rank are smaller than they are; the same ones at every rank."""
        shapes = {i: (s[0], math.prod(s[1:])) for i, s in enumerate(fragment.shapes) if len(s) > 1}
        return {i: (a, b) for i, (a, b) in shapes.items() if self.rank * (a + b) < a * b}

    def _next(self, state: State, warm: Sequence[Tensor], q: Sequence[Tensor]) -> State:
        """The state after a transfer whose common mean factors are `q`.

        All of it comes from means that regions hold alike: regions that disagreed on the rank would wait for ever, and
        projections on different Q have no meaningful mean. So Q is only changed element by element.
        """
        pairs = zip(q, warm, strict=True)
        kept = [torch.cat([_unit(new, old[: len(new)]), old[len(new) :]]) for new, old in pairs]
        ranks = state["effective_ranks"]
        if self.rank_min < self.rank:
            found = effective_rank(q, self.energy)
            ranks = [*ranks, *([found] if found else [])][-self.window :]
        rank = self.rank
        if len(ranks) == self.window:
            rank = min(max(math.ceil(sum(ranks) / self.window), self.rank_min), self.rank)
        return {**state, "rank": rank, "effective_ranks": ranks, "q": _flat(kept)}


def lowrank(
    rank: int = 64,
    coder: Coder | None = None,
    *,
    rank_min: int | None = None,
    energy: float = 0.95,
    window: int = 5,
) -> LowRank:
    """Adaptive gradient compression: one step of a power iteration a transfer (DiLoCoX, 2506.21263; PowerSGD, 1905.13727).

    For each matrix Delta_m (a, b) of region m, from the Q (b, r) that the last transfer left::

        P = orthonormalise(mean_m Delta_m Q) ;  Q_m = Delta_m^T P ;  Q = mean_m Q_m
        mean = P Q^T ;  own part = P Q_m^T

    Both means travel through `coder`, in two messages; what is no matrix, or not larger than its factors at the first
    rank, r_1 (a + b) >= a b, rides on the first one and is only quantised. Convolutions are (out, everything else).

    The rank follows the spectrum: the effective rank of a transfer is the smallest r whose directions hold `energy` of
    the squared singular values of Q, all matrices of the fragment together; the next rank is the mean of the last
    `window` ones, rounded up, in rank_min .. r_1. It stays r_1 until there are so many. Q keeps r_1 columns: a falling
    rank leaves the later ones out, which is what a lower rank from the start would have given. An effective rank is never
    above the rank in force, so a rank that has fallen rises only while the window still holds higher ones.

    Q's columns are kept scaled to a largest magnitude of 1, so that those of weak directions do not round to zero; a
    column that came out zero stays as it was.

    Loses most of a full-rank outer gradient: meant to be used inside `feedback(lowrank())`.

    Differs from the paper: it does not say how the effective rank is measured, nor the first Q (here uniform numbers
    from a seed that is the fragment's and the matrix's position). P is orthonormalised in double precision, and where the
    mean has fewer directions than columns the others are zero: a QR would fill them with noise of each processor's own.

    Args:
        rank: r_1.
        coder: of both factors; None: 4-bit integers in blocks of 256.
        rank_min: lowest rank; None: the rank is fixed.
        energy: share of the squared singular values, 0 to 1.
        window: transfers (outer steps) that a rank is the mean of.
    """
    return LowRank(rank, coder or Integers(4, 256), rank if rank_min is None else rank_min, energy, window)


def compression(state: State) -> float:
    """Rank in force over first rank, in (0, 1], of a codec state that `feedback` may have wrapped; 1 without low rank.

    A schedule shortens its interval by it: H_t = H_1 r_t / r_1 (DiLoCoX, 2506.21263).
    """
    while "codec" in state:
        state = state["codec"]
    return state["rank"] / state["rank_1"] if "rank" in state else 1.0


def effective_rank(factors: Sequence[Tensor], energy: float) -> int:
    """The smallest r whose directions hold `energy` of all squared singular values; 0 where the factors say nothing.

    Args:
        factors: (rank, side) each, of one rank. All zero, or not finite, they say nothing.
        energy: share, 0 to 1.
    """
    squares = torch.zeros(len(factors[0]), dtype=torch.float64)
    for factor in factors:
        exact = factor.double()
        if not bool(exact.isfinite().all()):
            return 0
        # In double precision the rounding of one processor or another (1e-16) does not decide on an integer.
        squares += torch.linalg.eigvalsh(exact @ exact.T).flip(0).clamp_(min=0)
    total = squares.sum()
    if total == 0:
        return 0
    return min(int((squares.cumsum(0) < energy * total).sum()) + 1, len(squares))


def _orthonormal(factor: Tensor) -> Tensor:
    """Orthonormal rows with the span of the rows of `factor`: the Q of a QR whose R has no negative diagonal entry.

    A row that lies in the span of those before it (4-bit factors often give two of one direction) becomes zero: what a
    QR would put there is rounding noise, which is another on another processor.
    """
    q, r = torch.linalg.qr(factor.T.double())
    diagonal = r.diagonal()
    sign = torch.where(diagonal < 0, -1.0, 1.0).double()
    independent = diagonal.abs() > 1e-5 * diagonal.abs().max()
    return (q * sign * independent).T.to(torch.float32).contiguous()


def _unit(new: Tensor, old: Tensor) -> Tensor:
    """Rows of `new` with 1 as their largest magnitude, which leaves P as it is; rows that have none stay `old`."""
    top = new.abs().amax(dim=1, keepdim=True)
    return torch.where((top > 0) & top.isfinite(), new / top, old)


def _assemble(
    fragment: Fragment, sides: Sides, p: Sequence[Tensor], q: Sequence[Tensor], rest: Tensor
) -> Tensor:
    """The flat fragment from factors and what was sent as it is."""
    flat = torch.empty(fragment.numel, dtype=torch.float32)
    views = dict(enumerate(fragment.views(flat)))
    for (i, shape), p_i, q_i in zip(sides.items(), p, q, strict=True):
        torch.mm(p_i.T, q_i, out=views.pop(i).view(shape))
    shapes = [tuple(view.shape) for view in views.values()]
    for view, values in zip(views.values(), split_views(rest, shapes), strict=True):
        view.copy_(values)
    return flat


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
