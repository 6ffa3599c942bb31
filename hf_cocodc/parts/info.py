"""The facts of a landing that outer transforms and merges can use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .tensors.memory import Home


@dataclass(frozen=True, kw_only=True)
class OuterInfo:
    """Facts of one transfer that an outer transform can use; each transform reads only the facts it needs.

    Flat tensors are fp32 and have the fragment's length. They are where the outer state rests (`home`), and a transform must not
    write to them.

    Attributes:
        fragment: index of the fragment.
        round_lr: mean inner learning rate of the steps that made the outer gradient: the maximum over the regions that count.
        global_at_send: global params of the fragment at the send.
        global_params: global params of the fragment before this outer step.
        home: where flat tensors rest, and on which device the step computes.
        total: sums numbers (1-D fp64) over the ranks that hold shards of the fragment, for norms of whole tensors.

    For transforms with `regions_agree=False` only, because each region has its own:

    Attributes:
        taken_share: the share with which the landing before this one has put this region's outer gradient of the send into the
            global params; by default its share in the mean, w / sum of w over the regions that took part.
        fresh_share: the share with which its fresh outer gradient counts: that of the mean, or less if it is far larger than
            ordinary. A number, or a scalar on the device.
    """

    fragment: int
    round_lr: float
    global_at_send: Tensor
    global_params: Tensor
    home: Home = field(default_factory=Home)
    total: Callable[[Tensor], Tensor] = lambda values: values
    taken_share: Tensor | float = 0.0
    fresh_share: Tensor | float = 0.0


class OuterSlice(NamedTuple):
    """A slice of a fragment on the device, for an outer transform.

    Attributes:
        state: the tensors of the transform's state, here. A step may write to those that have the fragment's length.
        own_outer_grad: outer gradient of this region at the send, global params minus local params. This one and the next are
            only for transforms with `regions_agree=False`.
        fresh_outer_grad: the present global params minus the present local params.
    """

    state: dict[str, Any]
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


class MergeSlice(NamedTuple):
    """A slice of a fragment on the device. A merge makes new local params of it; it writes to none of these tensors.

    Attributes:
        local: current local params.
        new_global: global params after this landing.
        snapshot: local params at the send.
        sizes: number of values in this slice, for each parameter that has values in it.
        scales: for each of these parameters, what `Merge.scales` has made of the norms: scalars on the device.
    """

    local: Tensor
    new_global: Tensor
    snapshot: Tensor
    sizes: Sequence[int] = ()
    scales: Sequence[Tensor] = ()
