"""What the engine keeps of each fragment and of each transfer in flight."""

from dataclasses import dataclass, field

from torch import Tensor

from .codecs.base import State
from .fragments import Fragment
from .links.base import Arrival, Handle


@dataclass
class Transfer:
    """An outer gradient on its way."""

    sent_at: int
    snapshot: Tensor
    outer_grad: Tensor
    global_params: Tensor
    lr_sum: float
    handle: Handle


@dataclass
class FragmentState:
    """What the engine keeps of one fragment; `params` are this rank's own tensors, written in place.

    `global_params` is never written to, only replaced, so that transfers may hold on to it.
    """

    fragment: Fragment
    params: list[Tensor]
    global_params: Tensor
    outer: State
    codec: State
    codec_remembers: bool
    in_flight: list[Transfer] = field(default_factory=list)
    num_sends: int = 0
    settled_at: int = 0
    """Inner step up to which local steps have entered the global params (or were thrown away by a merge)."""
    sent_at: int = 0
    """Inner step of the last send."""
    lr_sum: float = 0.0
    """Sum of learning rates at the last send."""
    round_lr: float = 0.0


@dataclass
class Totals:
    """Counters of a run on this rank."""

    sends: int = 0
    landings: int = 0
    bytes_sent: int = 0
    blocked_s: float = 0.0


class Here:
    """The handle of an arrival that needs no waiting."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival

    def done(self) -> bool:
        return True

    def wait(self) -> Arrival:
        return self._arrival
