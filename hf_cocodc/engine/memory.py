"""An estimate of the memory that outer state and transfers take."""

from collections.abc import Sequence

import torch

from ..methods import Method
from ..parts.codecs.base import State
from ..tensors.flat import tensors_in
from ..tensors.pools import HOST
from .fragment import FragmentState


def memory(
    fragments: Sequence[FragmentState], method: Method, num_regions: int
) -> dict[torch.device, tuple[int, int]]:
    """By device: bytes kept throughout, and bytes that the largest transfer adds at most while it is in flight.

    Pool of transfers that have landed serve later ones, so the second counts as often as transfers ever are in flight
    at once.
    """
    device = fragments[0].buffers.device
    kept = {device: sum(each.global_params.nbytes + _bytes(each.outer) for each in fragments)}
    kept[HOST] = kept.get(HOST, 0) + sum(_bytes(each.codec) for each in fragments)
    adds = dict.fromkeys(kept, 0)
    for each in fragments:
        values = each.global_params.nbytes
        copies = 3  # snapshot, outer gradient, mean
        if method.schedule.back_to_back:
            copies += 1  # the global params that it left with, which have moved before it lands
        received = max(method.codec.wire_bytes(each.fragment, r, num_regions) for r in range(num_regions))
        sent = received if received < values else 0  # fp32 is sent from where it lies
        remembered = 2 * _bytes(each.codec)  # what a codec with memory means to send, and its next state
        over_there = 2 * values if device != HOST else 0  # outer gradient and mean, once more for the link
        here = over_there + received + sent + remembered
        added = {device: copies * values}
        added[HOST] = added.get(HOST, 0) + here
        adds = {place: max(most, added[place]) for place, most in adds.items()}
    return {place: (kept[place], adds[place]) for place in kept}


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(state))
