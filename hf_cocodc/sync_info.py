"""What a part may know about the landing it takes part in."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SyncInfo:
    """Facts of one landing, handed to every outer transform and merge; a part says what it needs by reading it.

    Flat tensors are fp32 of the fragment's length, on the host, and must not be written to.

    Attributes:
        fragment: index of the fragment.
        views: cuts a flat tensor of this fragment into one view a parameter, in the parameters' shapes.
        sent_at: inner step after which the transfer left.
        landed_at: inner step after which it lands.
        num_regions: number of regions M.
        inner_lr: learning rate of the last inner step.
        round_lr: mean inner learning rate of the steps whose outer gradient lands; the largest region's, for all alike.
        flight_lr: mean inner learning rate of the steps between this transfer's send and its landing.
        global_at_send: the fragment's global params when the transfer left.
        global_params: the fragment's global params before this landing changes them.
        snapshot: this region's local params when the transfer left.
        own_outer_grad: what this region had to send: global params at the send minus `snapshot`.
        fresh_outer_grad: computes global params minus local params as they are now.
        total: adds up numbers (1-D fp64) over the ranks that hold shards of the fragment, so that a norm is the whole
            tensor's; gives them back as they are where the model is not sharded.
    """

    fragment: int
    views: Callable[[Tensor], list[Tensor]]
    sent_at: int
    landed_at: int
    num_regions: int
    inner_lr: float
    round_lr: float
    flight_lr: float
    global_at_send: Tensor
    global_params: Tensor
    snapshot: Tensor
    own_outer_grad: Tensor
    fresh_outer_grad: Callable[[], Tensor]
    total: Callable[[Tensor], Tensor] = lambda values: values

    @property
    def staleness(self) -> int:
        """Inner steps between the send and the landing."""
        return self.landed_at - self.sent_at
