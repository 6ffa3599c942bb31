"""One transfer in flight."""

from dataclasses import dataclass, field

from torch import Tensor

from ..links.base import Handle
from ..parts.guard import Ordinary
from ..tensors.departures import Departure
from .outer_step import Outcome
from .shares import Trained


@dataclass
class Transfer:
    """An outer gradient on its way.

    Attributes:
        sent_at: inner step of the send.
        snapshot: local params at the send, flat.
        global_params: global params at the send, flat; shared with the fragment and with other transfers.
        lr_sum: sum of inner learning rates up to the send.
        handle: waits for the mean.
        outer_grad: this region's outer gradient, flat; None if its memory gets other uses when the transfer ends.
        departure: how the outer gradient leaves its device; None for a transfer that was loaded.
        outcome: the result of its outer step.
        is_own: whether this region takes part in it; not if it was coming in at the send, or has the transfer from another one.
        taken: share with which a landing has taken in `outer_grad` before (eager updates); None if none has.
        norm: of this region's outer gradient, over all its lanes; 0 if it has no weight.
        ordinary: what was ordinary at the send (`parts.guard`).
        is_finite: whether this region's outer gradient was finite.
        trained: what this region had trained at the send before, so that later steps are carried; nothing if unknown.
    """

    sent_at: int
    snapshot: Tensor
    global_params: Tensor
    lr_sum: float
    handle: Handle
    outer_grad: Tensor | None = None
    departure: Departure | None = None
    outcome: Outcome = field(default_factory=Outcome)
    is_own: bool = True
    taken: float | None = None
    norm: float = 0.0
    ordinary: Ordinary = Ordinary()
    is_finite: bool = True
    trained: Trained = Trained()
