"""Low rank: all regions together approximate each matrix by the product of two thin, quantized factors (PowerSGD)."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ..fragments import Fragment
from ..tensors.flat import flat_zeros, split_views
from ..tensors.memory import HOST
from ..tensors.slices import longest
from .base import SLICE, CodecState, Coder, Conversation, Message, Result, message_bytes
from .block import Integers

_IN_CACHES = 4
"""Slices that a product on the host is computed with: larger ones leave the caches, smaller ones take more calls."""

Sides = Mapping[int, tuple[int, int]]
"""(rows, columns) of each parameter that is sent at low rank, keyed by its position in the fragment."""


class LowRank:
    """See `lowrank`. Factors are transposed, (rank, side): in a block with strong directions, weak ones would round to 0."""

    def __init__(self, rank: int, coder: Coder, rank_min: int, energy: float, window: int) -> None:
        if not 1 <= rank_min <= rank:
            raise InputError(f"rank={rank} and rank_min={rank_min}: 1 <= rank_min <= rank must hold.")
        self.rank = rank
        self.coder = coder
        self.rank_min = rank_min
        self.energy = energy
        self.window = window

    def init(self, fragment: Fragment) -> CodecState:
        # Uniform random numbers are integers times a power of two, and thus equal on every machine. Normal random numbers
        # use a logarithm and a cosine, and machines may round these differently.
        first = [
            torch.rand(
                self.rank * cols,
                generator=torch.Generator(HOST).manual_seed((fragment.index << 20) + i),
                dtype=torch.float32,
                device=HOST,
            )
            for i, (_, cols) in self._sides(fragment).items()
        ]
        q = torch.cat([flat_zeros(0), *first]).mul_(2).sub_(1)
        return {"rank": self.rank, "rank_1": self.rank, "effective_ranks": [], "q": q}

    def converse(self, outer_grad: Tensor, fragment: Fragment, state: CodecState) -> Conversation:
        rank, sides = state["rank"], self._sides(fragment)
        views = fragment.views(outer_grad)
        matrices = [views[i].reshape(shape) for i, shape in sides.items()]
        rest = [view for i, view in enumerate(views) if i not in sides]
        warm = split_views(state["q"], [(self.rank, cols) for _, cols in sides.values()])
        p_shapes = [(rank, rows) for rows, _ in sides.values()]
        q_shapes = [(rank, cols) for _, cols in sides.values()]

        sketches = [product(matrix, q[:rank].T).T for q, matrix in zip(warm, matrices, strict=True)]
        first = yield Message(_flat([*sketches, *rest]), self.coder)
        p_numel = sum(map(math.prod, p_shapes))
        if not sides:
            return Result(first.mean, first.own, state)
        p = [_orthonormal(mean) for mean in split_views(first.mean[:p_numel], p_shapes)]
        projected = [projection(basis, matrix) for basis, matrix in zip(p, matrices, strict=True)]
        second = yield Message(_flat(projected), self.coder)
        q = split_views(second.mean, q_shapes)

        def own() -> Tensor:
            return _assemble(fragment, sides, p, split_views(second.own(), q_shapes), first.own()[p_numel:])

        mean = _assemble(fragment, sides, p, q, first.mean[p_numel:])
        return Result(mean, own, self._next(state, warm, q))

    def wire_bytes(self, fragment: Fragment, region: int, num_regions: int) -> int:
        """Payload bytes of one transfer at the first and highest rank."""
        sides = self._sides(fragment)
        rest = fragment.numel - sum(map(math.prod, sides.values()))
        first = self.rank * sum(rows for rows, _ in sides.values()) + rest
        second = self.rank * sum(cols for _, cols in sides.values())
        return sum(message_bytes(self.coder, numel, region, num_regions) for numel in (first, second))

    def _sides(self, fragment: Fragment) -> dict[int, tuple[int, int]]:
        """The parameters that are larger than their factors at the first rank; the same ones at every rank."""
        shapes = {i: (s[0], math.prod(s[1:])) for i, s in enumerate(fragment.shapes) if len(s) > 1}
        return {i: (a, b) for i, (a, b) in shapes.items() if self.rank * (a + b) < a * b}

    def _next(self, state: CodecState, warm: Sequence[Tensor], q: Sequence[Tensor]) -> CodecState:
        """The state after a transfer with the mean factors `q`."""
        # It depends only on means, equal in all regions: with different ranks, regions would wait forever for each other, and
        # with different Q the mean of their projections would mean nothing. Therefore Q changes only element-wise.
        pairs = zip(q, warm, strict=True)
        kept = [torch.cat([_unit(new, old[: len(new)]), old[len(new) :]]) for new, old in pairs]
        ranks = state["effective_ranks"]
        if self.rank_min < self.rank:
            effective = effective_rank(q, self.energy)
            ranks = [*ranks, *([effective] if effective else [])][-self.window :]
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
    """Adaptive gradient compression: one power iteration step per transfer (DiLoCoX, 2506.21263; PowerSGD, 1905.13727).

    For each matrix Delta_m (a, b) of region m, starting from the Q (b, r) of the last transfer::

        P = orthonormalize(mean_m Delta_m Q) ;  Q_m = Delta_m^T P ;  Q = mean_m Q_m
        mean = P Q^T ;  own part = P Q_m^T

    Both means travel through `coder`, in two messages. A parameter with fewer than two dimensions, or not larger than its
    factors at the first rank (r_1 (a + b) >= a b), travels in the first message and is only quantized. A convolution counts as
    the matrix (out, all other dimensions).

    The rank follows the spectrum. The effective rank of a transfer is the smallest r whose directions hold the share `energy`
    of the squared singular values of Q, over all matrices of the fragment together. The next rank is the mean of the last
    `window` effective ranks, rounded up, within rank_min .. r_1; until `window` of them are known, it is r_1. An effective rank
    never exceeds the current rank, so a rank that has fallen rises again only while the window contains higher ones. Q always
    keeps r_1 columns. A lower rank omits the last ones, as if the rank had been lower from the start.

    The columns of Q are scaled to a largest magnitude of 1, so that weak directions do not round to zero. A column that becomes
    zero keeps its old values.

    Most of a full-rank outer gradient is lost: use this codec inside `feedback(lowrank())`.

    Differs from the paper, which says neither how the effective rank is measured nor how Q starts. Here Q starts with uniform
    random numbers, seeded by the positions of the fragment and of the matrix. P is orthonormalized in double precision. If the
    mean has fewer directions than columns, the other columns of P are zero: a QR would fill them with rounding noise, which
    differs between processors.

    Every region computes P and the mean itself. Products are summed in double precision, so their bits follow no setting of the
    script (TF32). Regions get equal bits if they have the same kind of device. Kinds differ in the last bit of a few values, and
    regions that have come apart are brought back to one value (`outer.digest_interval`).

    Args:
        rank: r_1, the first and highest rank.
        coder: coder of both factors; None means 4-bit integers in blocks of 256.
        rank_min: lowest rank; None means a fixed rank.
        energy: share of the squared singular values, 0 to 1.
        window: number of transfers (outer steps) over which the effective rank is averaged.
    """
    return LowRank(rank, coder or Integers(4, 256), rank if rank_min is None else rank_min, energy, window)


def share_of_rank(state: CodecState) -> float:
    """Current rank / first rank of a codec state, with or without `feedback`, in (0, 1]; 1 for a codec without a rank.

    A schedule shortens its interval by this factor: H_t = H_1 r_t / r_1 (DiLoCoX, 2506.21263).

    >>> share_of_rank({"residual": torch.zeros(2), "codec": {"rank": 16, "rank_1": 64}})
    0.25
    """
    while "codec" in state:
        state = state["codec"]
    return state["rank"] / state["rank_1"] if "rank_1" in state else 1.0


def has_rank(codec: object) -> bool:
    """Whether a codec, or one inside it, sends at low rank.

    >>> has_rank(lowrank(4))
    True
    """
    inner = getattr(codec, "codec", None)
    return isinstance(codec, LowRank) or (inner is not None and has_rank(inner))


def effective_rank(factors: Sequence[Tensor], energy: float) -> int:
    """The smallest r whose directions hold the share `energy` of all squared singular values.

    Args:
        factors: tensors of shape (rank, side), all with the same rank.
        energy: share, 0 to 1.

    Returns:
        The effective rank; 0 if all factors are zero or a value is not finite.

    >>> factors = [torch.diag(torch.tensor([3.0, 1.0]))]  # the shares are 0.9 and 0.1
    >>> effective_rank(factors, 0.8), effective_rank(factors, 0.95)
    (1, 2)
    """
    # Double precision: rounding (1e-16), which differs between processors, does not change the integer result. The small
    # matrices are read together, and their spectra found on the host.
    exact = [factor.double() for factor in factors]
    grams = torch.stack([each @ each.T for each in exact]).cpu()
    if not bool(grams.isfinite().all()):
        return 0
    squares = torch.linalg.eigvalsh(grams).flip(1).clamp_(min=0).sum(0)
    total = squares.sum()
    if total == 0:
        return 0
    return min(int((squares.cumsum(0) < energy * total).sum()) + 1, len(squares))


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of two fp32 matrices in fp32, summed in double precision: the first one is the large one, or the product is.

    In fp32 its bits would follow a setting of the user's script (TF32), and the kind of the processor.
    """
    into = left.new_empty(len(left), right.shape[1]) if out is None else out
    exact, high = right.double(), _high(max(left.shape[1], right.shape[1]), left.device)
    for rows, place in zip(left.split(high), into.split(high), strict=True):
        place.copy_(rows.double() @ exact)
    return into


def projection(basis: Tensor, matrix: Tensor) -> Tensor:
    """`product(basis, matrix)` for a large matrix."""
    total = basis.new_zeros(len(basis), matrix.shape[1], dtype=torch.float64)
    high = _high(matrix.shape[1], matrix.device)
    for part, rows in zip(basis.split(high, 1), matrix.split(high), strict=True):
        total.addmm_(part.double(), rows.double())
    return total.float()


def _high(wide: int, device: torch.device) -> int:
    """Rows of a matrix that are brought to fp64 at once, where they take twice the memory."""
    return max(min(_IN_CACHES * longest(device), SLICE) // max(wide, 1), 1)


def _orthonormal(factor: Tensor) -> Tensor:
    """Orthonormal rows that span the rows of `factor`: the Q of a QR in which R has no negative diagonal entry."""
    q, r = torch.linalg.qr(factor.T.double())
    diagonal = r.diagonal()
    sign = torch.where(diagonal < 0, -1.0, 1.0).double()
    # A row in the span of those before becomes zero (4-bit factors often have two rows of one direction). A QR would put
    # rounding noise there, which differs between processors.
    independent = diagonal.abs() > 1e-5 * diagonal.abs().max()
    return (q * sign * independent).T.to(torch.float32).contiguous()


def _unit(new: Tensor, old: Tensor) -> Tensor:
    """Rows of `new`, scaled to a largest magnitude of 1, which does not change P. Zero or non-finite rows stay `old`."""
    top = new.abs().amax(dim=1, keepdim=True)
    return torch.where((top > 0) & top.isfinite(), new / top, old)


def _assemble(
    fragment: Fragment, sides: Sides, p: Sequence[Tensor], q: Sequence[Tensor], rest: Tensor
) -> Tensor:
    """The flat fragment from the factors, and from the values that traveled without them (`rest`)."""
    flat = rest.new_empty(fragment.numel)
    views = dict(enumerate(fragment.views(flat)))
    for (i, shape), p_i, q_i in zip(sides.items(), p, q, strict=True):
        product(p_i.T, q_i, views.pop(i).view(shape))
    shapes = [tuple(view.shape) for view in views.values()]
    for view, values in zip(views.values(), split_views(rest, shapes), strict=True):
        view.copy_(values)
    return flat


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
