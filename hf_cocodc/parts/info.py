"""The facts of a landing that outer transforms and merges can use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OuterInfo:
    """Facts of one transfer that an outer transform can use; each transform reads only the facts it needs.

    Flat tensors are fp32, have the fragment's length, and are on the device of the outer state. A transform must not write to
    them. `global_params` is valid only while the transforms begin; later the outer step may overwrite it.

    Attributes:
        fragment: index of the fragment.
        cut: cuts a flat tensor of this fragment into pieces; a step works on one piece at a time.
        round_lr: mean inner learning rate of the steps that made the outer gradient: the maximum over the regions that count.
        global_at_send: global params of the fragment at the send.
        global_params: global params of the fragment before this outer step.
        total: sums numbers (1-D fp64) over the ranks that hold shards of the fragment, for norms of whole tensors.

    For transforms with `regions_agree=False` only, because each region has its own, and no memory keeps them for others:

    Attributes:
        own_share: this region's share in the mean, w / sum of w over the regions that took part; 1 / M if all count alike.
        taken_share: the share with which the landing before this one has put `own_outer_grad` into the global params.
        fresh_share: the share with which `fresh_outer_grad` counts: `own_share`, or less if it is far larger than ordinary.
        own_outer_grad: outer gradient of this region at the send, global params minus local params.
        fresh_outer_grad: the current global params minus the current local params.
    """

    fragment: int
    cut: Callable[[Tensor], Sequence[Tensor]]
    round_lr: float
    global_at_send: Tensor
    global_params: Tensor
    total: Callable[[Tensor], Tensor] = lambda values: values
    own_share: float = 0.0
    taken_share: float = 0.0
    fresh_share: float = 0.0
    own_outer_grad: Tensor | None = None
    fresh_outer_grad: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MergeInfo:
    """Facts of one landing that a merge can use.

    Attributes:
        sent_at, landed_at: inner steps.
        flight_lr: mean inner learning rate of the steps between the send and the landing.
        total: see `OuterInfo`.
    """

    sent_at: int
    landed_at: int
    flight_lr: float
    total: Callable[[Tensor], Tensor] = lambda values: values

    @property
    def staleness(self) -> int:
        """Inner steps between the send and the landing."""
        return self.landed_at - self.sent_at


class Piece(NamedTuple):
    """A stretch of a fragment, short enough for the cache. A merge computes new local params for one piece at a time.

    Attributes:
        local: current local params, possibly the model's own memory. A merge that writes here must leave the new local params.
        new_global: global params after this landing. Read-only.
        snapshot: local params at the send. A merge may overwrite it.
        room: scratch memory of the same length, with undefined values.
        sizes: number of values in this piece, for each parameter that has values in it.
        norms: for each of these parameters, the two norms over the whole parameter that `Merge.measure` asks for.
        numels: for each of these parameters, the number of values in the whole parameter.
    """

    local: Tensor
    new_global: Tensor
    snapshot: Tensor
    room: Tensor
    sizes: Sequence[int]
    norms: Sequence[tuple[float, float]] = ()
    numels: Sequence[float] = ()
