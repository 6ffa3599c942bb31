"""One transfer in flight, and how it is saved."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..links.base import Arrival, Handle
from ..links.trailer import Trailer
from ..parts.codecs.base import Result, State
from ..tensors.departures import Departure


@dataclass
class Transfer:
    """An outer gradient on its way."""

    sent_at: int
    snapshot: Tensor
    outer_grad: Tensor
    global_params: Tensor
    lr_sum: float
    handle: Handle
    departure: Departure | None = None

    def state_dict(self) -> State:
        """The transfer with its result, un-landed: waits for it."""
        arrival = self.handle.wait()
        kept = {name: getattr(self, name) for name in KEPT_OF_A_TRANSFER}
        return kept | {
            "mean": arrival.result.mean,
            "codec": arrival.result.state,
            "trailers": [trailer._asdict() for trailer in arrival.trailers],
            "bytes_sent": arrival.bytes_sent,
            "seconds": arrival.seconds,
            "square": arrival.square,
        }

    def join(self, local: Tensor) -> None:
        """Make it the transfer of a region that was not there when it left: nothing of it is this region's own."""
        self.snapshot, self.outer_grad = local, torch.zeros_like(local)

    @classmethod
    def from_state(cls, state: State) -> "Transfer":
        """A transfer whose result is here and waits to be landed."""
        mean = state["mean"]
        # who said then that it would leave, and made all stop here, has come back
        trailers = tuple(Trailer(**trailer | {"ending": 0.0}) for trailer in state["trailers"])
        result = Result(mean, lambda: mean, state["codec"])
        handle = Here(
            Arrival(result, trailers, *(state[name] for name in ("bytes_sent", "seconds", "square")))
        )
        return cls(**{name: state[name] for name in KEPT_OF_A_TRANSFER}, handle=handle)


KEPT_OF_A_TRANSFER = ("sent_at", "snapshot", "outer_grad", "global_params", "lr_sum")


class Here:
    """The handle of an arrival that needs no waiting."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival

    def wait(self) -> Arrival:
        return self._arrival
