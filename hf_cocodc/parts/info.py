"""What a part may know about the landing it takes part in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SyncInfo:
    """Facts of one landing, handed to every outer transform and merge; a part says what it needs by reading it.

    Flat tensors are fp32 of the fragment's length, where the outer state is kept, and must not be written to. Global params
    are those of before the landing while the outer transforms begin; then the landing itself may overwrite them.

    Attributes:
        fragment: index of the fragment.
        cut: cuts a flat tensor of this fragment into the pieces that are worked on one by one.
        sent_at: inner step after which the transfer left.
        landed_at: inner step after which it lands.
        num_regions: number of regions M.
        round_lr: mean inner learning rate of the steps whose outer gradient lands; the largest region's, for all alike.
        flight_lr: mean inner learning rate of the steps between this transfer's send and its landing.
        global_at_send: the fragment's global params when the transfer left.
        global_params: the fragment's global params before this landing changes them.
        own_outer_grad: what this region had to send: global params minus local params then.
        fresh_outer_grad: gives global params minus local params as they are now.
        total: adds up numbers (1-D fp64) over the ranks that hold shards of the fragment, so that a norm is the whole
            tensor's; gives them back as they are where the model is not sharded.
    """

    fragment: int
    cut: Callable[[Tensor], Sequence[Tensor]]
    sent_at: int
    landed_at: int
    num_regions: int
    round_lr: float
    flight_lr: float
    global_at_send: Tensor
    global_params: Tensor
    own_outer_grad: Tensor
    fresh_outer_grad: Callable[[], Tensor]
    total: Callable[[Tensor], Tensor] = lambda values: values

    @property
    def staleness(self) -> int:
        """Inner steps between the send and the landing."""
        return self.landed_at - self.sent_at


class Piece(NamedTuple):
    """A stretch of a fragment, short enough for the cache, where local params take in new global ones.

    Attributes:
        local: local params as they are now, perhaps themselves: to be written to with what they shall become.
        new_global: global params after this landing; not to be written to.
        snapshot: local params when the transfer left; nobody needs it any more.
        room: as long as these, with anything in it, to write to.
        sizes: how many values there are of each parameter of which any lie here.
        norms: for each of these, the norms over the whole parameter that the merge asked for.
        numels: and how many values those norms are of.
    """

    local: Tensor
    new_global: Tensor
    snapshot: Tensor
    room: Tensor
    sizes: Sequence[int]
    norms: Sequence[tuple[float, float]] = ()
    numels: Sequence[float] = ()
